"""Trace a function and write its exported artifact."""

from __future__ import annotations

import functools
import sys

from stagec.cli.files import Options, write_asked, write_whole
from stagec.cli.options import FUNCTION, tracing
from stagec.core.messages import phases

OPTIONS = {
    **FUNCTION,
    "--output OUTPUT": "where to write the exported artifact",
    "[--lowered LOWERED]": "where to write what JAX lowers for the devices of the targets",
    "[--description DESCRIPTION]": "where to write what it was made from, a JSON file",
}


def preload() -> None:
    from stagec.backends.cpu import eager

    eager.prepare_process()
    from stagec.building import by_device, export_description, readers  # noqa: F401
    from stagec.frontends import constants  # noqa: F401
    from stagec.frontends.common import frontend, reads  # noqa: F401
    from stagec.stages import serialization  # noqa: F401

    frontend.preload()
    eager.find_code()
    if "jax" in sys.modules:
        from stagec.frontends.jax import warming

        warming.warm()


def run(options: Options) -> None:
    with tracing(options) as spec:
        with phases.phase("import"):
            from stagec.building import by_device, export_description, readers
            from stagec.frontends import constants, declarations
            from stagec.frontends.common.frontend import frontend as frontend_of

            frontend = frontend_of(spec)
        with phases.phase("export"):
            serialized, lowered_for, premises = frontend.export(spec, options.import_root)
            readable = functools.partial(readers.readable, spec)
            serialized, lowered_for = readable(serialized), by_device.changed(lowered_for, readable)
            parameters = frontend.parameters(spec, options.import_root)
            bound = declarations.check(spec, serialized, parameters)
            large = constants.find(serialized, functools.partial(frontend.named_arrays, spec))
        for problem in constants.advice(spec, large):
            sys.stderr.write(f"{problem}\n")
        write_whole(options.output, serialized)
        write_asked(options.lowered, lowered_for)
        versions = frontend.versions(spec)
        description = export_description.describe(spec, serialized, versions, bound, large, parameters, premises)
        write_asked(options.description, description.encode())
