"""Trace a function and write its exported artifact."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING

from stagec.cli.files import Answer, Options, digest, read_text, write_whole
from stagec.cli.options import ANOTHER_MACHINE, IMPORT_ROOTS, SOURCES, telling_unread

if TYPE_CHECKING:
    from stagec.core.builds.specs import FunctionSpec

OPTIONS = {
    "--spec SPEC": "the function's spec, a JSON file",
    "[--output OUTPUT]": "where to write the exported artifact",
    "[--lowered LOWERED]": "where to write what JAX lowers for the devices of the targets",
    "[--description DESCRIPTION]": "where to write what it was made from, a JSON file",
    "[--debug-output DEBUG_OUTPUT]": "where to write the module with source locations, as text",
    "[--jax-key JAX_KEY]": "where to write what JAX looks an executable up by in its compilation cache",
    "[--executable EXECUTABLE]": "the spec of that executable, a JSON file",
    "[--committed POSITIONS]...": 'arguments on a device that the program chose, such as "0,2", or "none"; '
    "may be repeated (default: none)",
    "[--jaxpr JAXPR]": "where to write the function's jaxpr, as text",
    **ANOTHER_MACHINE,
    **IMPORT_ROOTS,
    **SOURCES,
}


def preload() -> None:
    from stagec.backends.cpu import eager

    eager.prepare_process()
    from stagec.building import by_device, export_description  # noqa: F401
    from stagec.frontends import constants  # noqa: F401
    from stagec.frontends.common import frontend, reads  # noqa: F401
    from stagec.stages import serialization  # noqa: F401

    frontend.preload()
    eager.find_code()
    if "jax" in sys.modules:
        from stagec.frontends.jax import warming

        warming.warm()


def run(options: Options) -> Answer | None:
    from stagec.backends.cpu import eager

    if options.as_another_machine:
        eager.be_another_machine()
    eager.prepare_process()
    if options.unread:
        eager.find_code()  # it calls native code, which a model does not
    with telling_unread(options):
        from stagec.core.builds import specs

        spec = specs.function_spec(read_text(options.spec))
        with eager.computing(spec):
            return _export(options, spec)


def _export(options: Options, spec: FunctionSpec) -> Answer | None:
    from stagec.core.builds import specs
    from stagec.core.messages import phases

    if options.jax_key:
        from stagec.frontends.jax import export

        executable = specs.executable_spec(read_text(options.executable))
        ways = [[] if way == "none" else [*map(int, way.split(","))] for way in options.committed or ["none"]]
        keys = export.jax_keys(spec, executable, options.import_root, ways)
        write_whole(options.jax_key, b"".join(key.to_bytes() for key in keys))
        return None
    with phases.phase("import"):
        from stagec.frontends.common.frontend import frontend as frontend_of

        frontend = frontend_of(spec)
    if options.debug_output:
        write_whole(options.debug_output, frontend.export_with_locations(spec, options.import_root).encode())
    if options.jaxpr:
        write_whole(options.jaxpr, frontend.jaxpr(spec, options.import_root).encode())
    if not options.output:
        return None
    with phases.phase("export"):
        serialized, lowered_for = frontend.export(spec, options.import_root)
        parameters = frontend.parameters(spec, options.import_root)
        bound: dict[str, str] = {}
        if spec.padding or spec.bind or spec.serve:
            from stagec.frontends import declarations

            bound = declarations.check(spec, serialized, parameters)
        from stagec.frontends import constants

        large = constants.find(serialized, functools.partial(frontend.named_arrays, spec))
    for problem in constants.advice(spec, large):
        sys.stderr.write(f"{problem}\n")
    write_whole(options.output, serialized)
    if options.lowered:
        write_whole(options.lowered, lowered_for)
    if options.description:
        with phases.phase("import"):
            from stagec.building import export_description

        versions = frontend.versions(spec)
        description = export_description.describe(spec, serialized, versions, bound, large, parameters)
        write_whole(options.description, description.encode())
    return Answer({"function": spec.name, "output": options.output, **digest(serialized)}) if options.json else None
