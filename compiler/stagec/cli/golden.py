"""Run a function on generated or given inputs, and write inputs and outputs to check executables with."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator

from stagec.cli.files import Answer, read, read_arrays, read_text, read_weights, write_parts
from stagec.cli.options import add_import_roots, add_lists, add_sources, telling_unread


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--spec", required=True, help="the function's spec, a JSON file")
    parser.add_argument("--exported", required=True, help="its exported artifact")
    parser.add_argument("--description", required=True, help="what that was made from")
    parser.add_argument("--output", required=True, help="where to write the arrays, a safetensors file")
    what = "a safetensors file that arguments are bound to; NAME is its path in the manifest"
    add_lists(parser, {"--weights NAME=FILE": what})
    parser.add_argument("--inputs", metavar="FILE.npz", help="the file of inputs that the spec names, if it does")
    parser.add_argument(
        "--on-cpu-of", metavar="SPEC", help="the spec of an executable: let JAX compile for the CPU of its target"
    )
    add_import_roots(parser)
    add_sources(parser)


def preload() -> None:
    import stagec.bundle.binding
    import stagec.frontends.golden  # noqa: F401
    from stagec.frontends import frontend

    frontend.preload()


def run(options: argparse.Namespace) -> Answer:
    with telling_unread(options):
        return _golden(options)


@contextlib.contextmanager
def _on_cpu_of(file: str | None) -> Iterator[None]:
    """Have JAX's client made, and its programs compiled, where XLA sees the CPU of a target; None: this machine's."""
    if file is None:
        yield
        return
    from stagec.backends.cpu import compiler
    from stagec.core.builds import specs

    target = specs.executable_spec(read_text(file)).target
    assert isinstance(target, specs.CpuTarget)
    compiler.prepare_process(target)
    with compiler.presented(target):
        yield


def _golden(options: argparse.Namespace) -> Answer:
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
    with _on_cpu_of(options.on_cpu_of):
        golden_values = golden.make(spec, options.import_root, serialized, weights, given)
    try:
        parts = safetensors.parts(golden_values)
    except ValueError as error:
        raise spec.problem("golden", str(error), "leave golden out") from error
    write_parts(options.output, parts)
    return Answer({name: str(tensor.aval) for name, tensor in golden_values.items()})
