"""Run a function on generated or given inputs, and write inputs and outputs to check executables with."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stagec.cli.files import Answer, Options, read, read_arrays, read_text, read_weights, write_parts
from stagec.cli.options import ANOTHER_MACHINE, IMPORT_ROOTS, SOURCES, telling_unread

if TYPE_CHECKING:
    from stagec.core.builds.specs import FunctionSpec

OPTIONS = {
    "--spec SPEC": "the function's spec, a JSON file",
    "--exported EXPORTED": "its exported artifact",
    "--description DESCRIPTION": "what that was made from",
    "--output OUTPUT": "where to write the arrays, a safetensors file",
    "[--weights NAME=FILE]...": "a safetensors file that arguments are bound to; NAME is its path in the manifest",
    "[--inputs FILE.npz]": "the file of inputs that the spec names, if it does",
    "[--on-cpu-of SPEC]": "the spec of an executable: let JAX compile for the CPU of its target",
    **ANOTHER_MACHINE,
    **IMPORT_ROOTS,
    **SOURCES,
}


def preload() -> None:
    from stagec.backends.cpu import eager

    eager.prepare_process()
    import stagec.bundle.binding
    import stagec.frontends.golden  # noqa: F401
    from stagec.frontends.common import frontend

    frontend.preload()
    eager.find_code()


def run(options: Options) -> Answer:
    from stagec.backends.cpu import eager

    if options.as_another_machine:
        eager.be_another_machine()
    if options.on_cpu_of is None:
        eager.prepare_process()
    if options.unread:
        eager.find_code()  # it calls native code, which a model does not
    with telling_unread(options):
        return _golden(options)


@contextlib.contextmanager
def _on_cpu_of(file: str | None, spec: FunctionSpec) -> Iterator[None]:
    """Have JAX's client made, and its programs compiled, where XLA sees the CPU of a target.

    None: the CPU on which the function computes while it is traced.
    """
    from stagec.backends.cpu import compiler, eager

    if file is None:
        with eager.computing(spec):
            yield
        return
    from stagec.core.builds import specs

    target = specs.executable_spec(read_text(file)).target
    assert isinstance(target, specs.CpuTarget)
    compiler.prepare_process(target)
    with compiler.presented(target):
        yield


def _golden(options: Options) -> Answer:
    from stagec.bundle import safetensors
    from stagec.bundle.binding import Bindings
    from stagec.core.builds import specs
    from stagec.frontends import golden

    spec = specs.function_spec(read_text(options.spec))
    serialized = read(options.exported)
    bindings = Bindings(read_weights(options.weights))
    bound = bindings.of(spec, json.loads(read(options.description)))
    bindings.check(only_used=False)
    weights = {entry["leaf"]: bindings.tensors[entry["weight"]] for entry in bound}
    given = read_arrays(options.inputs) if options.inputs else None
    with _on_cpu_of(options.on_cpu_of, spec):
        golden_values = golden.make(spec, options.import_root, serialized, weights, given)
    try:
        parts = safetensors.parts(golden_values)
    except ValueError as error:
        raise spec.problem("golden", str(error), "leave golden out") from error
    write_parts(options.output, parts)
    return Answer({name: str(tensor.aval) for name, tensor in golden_values.items()})
