"""Compile an exported artifact for a target."""

from __future__ import annotations

import dataclasses
import sys
import time

from stagec.cli.files import Options, write_asked, write_whole
from stagec.cli.options import PROGRAM, compiling, program
from stagec.core.messages import phases

OPTIONS = {
    **PROGRAM,
    "--output OUTPUT": "where to write the executable",
    "[--description DESCRIPTION]": "where to write its description, a JSON file",
    "[--module MODULE]": "where to write the module for this target and bucket, a portable artifact",
    "[--inventory INVENTORY]": "where to write its arrays, operations, exchanges and limits, a JSON file",
}


def preload() -> None:
    import stagec.building.compilation
    import stagec.stages.compiling
    import stagec.stages.serialization  # noqa: F401
    from stagec.backends.cpu import compiler as cpu

    cpu.find_code()


def run(options: Options) -> None:
    with compiling(options) as spec:
        with phases.phase("import"):
            from stagec.building import inventory
            from stagec.building.compilation import compile_exported, notices
            from stagec.building.limits import advice

        started = time.monotonic()
        compiled = compile_exported(*program(options, spec), itemized=bool(options.inventory))
        warnings = notices(spec, compiled.description.avoided, compiled.hlo or "")
        for warning in filter(None, (*warnings, advice(spec, time.monotonic() - started))):
            print(dataclasses.replace(warning, label=options.label), file=sys.stderr)
        write_whole(options.output, compiled.executable)
        write_asked(options.description, compiled.description.to_json().encode())
        write_asked(options.module, compiled.stablehlo)
        if compiled.inventory is not None:
            write_asked(options.inventory, inventory.to_json(compiled.inventory).encode())
