"""Lower a function as `jax.jit` does, and write what JAX looks its executable up by in its compilation cache."""

from __future__ import annotations

from stagec.cli.actions import export
from stagec.cli.files import Options, read_text, write_whole
from stagec.cli.options import FUNCTION, tracing

OPTIONS = {
    **FUNCTION,
    "--executable EXECUTABLE": "the spec of the executable, a JSON file",
    "--output OUTPUT": "where to write it",
    "[--committed POSITIONS]...": 'arguments on a device that the program chose, such as "0,2", or "none"; '
    "may be repeated (default: none)",
}
preload = export.preload


def run(options: Options) -> None:
    with tracing(options) as spec:
        from stagec.core.builds import specs
        from stagec.frontends.jax.export import jax_keys

        executable = specs.executable_spec(read_text(options.executable))
        ways = [[] if way == "none" else [*map(int, way.split(","))] for way in options.committed or ["none"]]
        keys = jax_keys(spec, executable, options.import_root, ways)
        write_whole(options.output, b"".join(key.to_bytes() for key in keys))
