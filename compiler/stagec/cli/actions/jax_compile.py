"""Compile an executable for JAX's compilation cache."""

from __future__ import annotations

import dataclasses
import sys

from stagec.cli.actions import compile as compile_action
from stagec.cli.files import Options, read, write_asked, write_whole
from stagec.cli.options import EXECUTABLE, compiling
from stagec.core.messages.errors import blaming

OPTIONS = {
    **EXECUTABLE,
    "--key KEY": "what JAX looks it up by: the file that stagec action jax-key wrote",
    "--output OUTPUT": "where to write the executable",
    "--entry ENTRY": "where to write the names that it has in the cache, a JSON file",
    "[--costs COSTS]": "where to write what it takes, a JSON file",
    "[--machine FINGERPRINT]...": "a machine to name it for there: what python -m stagec.jax_cache prints",
}
preload = compile_action.preload


def run(options: Options) -> None:
    with compiling(options) as spec:
        from stagec.building.compilation import notices
        from stagec.building.for_jax import compile_for_jax, costs
        from stagec.jaxcache import jax_entries

        with blaming(options.key, "let stagec action jax-key write it again", "not a key of JAX's compilation cache: "):
            keys = jax_entries.Key.read(read(options.key))
        with blaming("--machine", "write what python -m stagec.jax_cache prints there", "not a fingerprint: "):
            for machine in options.machine:
                jax_entries.fingerprint(machine)
        compiled, entries = compile_for_jax(keys, spec, options.machine)
        for warning in notices(spec, compiled.avoided, compiled.hlo):
            print(dataclasses.replace(warning, label=options.label), file=sys.stderr)
        write_whole(options.output, compiled.executable)
        write_whole(options.entry, jax_entries.to_json(entries).encode())
        write_asked(options.costs, costs(compiled, spec.target).encode() if options.costs else None)
