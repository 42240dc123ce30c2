"""Run a function on generated inputs, where JAX compiles it for the CPU of a target; `stagec compare-jit` does."""

from __future__ import annotations

from stagec.cli.actions import golden
from stagec.cli.files import Options, read_text
from stagec.cli.options import IMPORT_ROOTS

OPTIONS = {
    "--spec SPEC": "the function's spec, a JSON file",
    "--executable EXECUTABLE": "the spec of an executable for the target, a JSON file",
    **golden.ARRAYS,
    **IMPORT_ROOTS,
}


def run(options: Options) -> None:
    from stagec.backends.cpu import compiler
    from stagec.core.builds import specs

    spec = specs.function_spec(read_text(options.spec))
    target = specs.executable_spec(read_text(options.executable)).target
    assert isinstance(target, specs.CpuTarget)
    compiler.prepare_process(target)
    with compiler.presented(target):
        golden.write(options, spec)
