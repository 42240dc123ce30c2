"""Run a function on generated or given inputs, and write inputs and outputs to check executables with."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from stagec.cli.files import Options, read, read_arrays, read_weights, write_parts
from stagec.cli.options import FUNCTION, tracing

if TYPE_CHECKING:
    from stagec.core.builds.specs import FunctionSpec

ARRAYS = {
    "--exported EXPORTED": "its exported artifact",
    "--description DESCRIPTION": "what that was made from",
    "[--weights NAME=FILE]...": "a safetensors file that arguments are bound to; NAME is its path in the manifest",
    "--output OUTPUT": "where to write the arrays, a safetensors file",
}
"""Of a command that writes arrays (`write`)."""
OPTIONS = {**FUNCTION, **ARRAYS, "[--inputs FILE.npz]": "the file of inputs that the spec names, if it does"}


def preload() -> None:
    from stagec.backends.cpu import eager

    eager.prepare_process()
    import stagec.bundle.binding
    import stagec.frontends.golden_arrays  # noqa: F401
    from stagec.frontends.common import frontend

    frontend.preload()
    eager.find_code()


def run(options: Options) -> None:
    with tracing(options) as spec:
        write(options, spec, read_arrays(options.inputs) if options.inputs else None)


def write(options: Options, spec: FunctionSpec, given: dict[str, Any] | None = None) -> None:
    """Write the inputs and outputs of a function to the file of `ARRAYS`. given: its inputs, by name."""
    from stagec.bundle import safetensors
    from stagec.bundle.binding import Bindings
    from stagec.frontends import golden_arrays

    serialized = read(options.exported)
    bindings = Bindings(read_weights(options.weights))
    bound = bindings.entries(spec, json.loads(read(options.description)))
    bindings.check(only_used=False)
    weights = {entry["leaf"]: bindings.tensors[entry["weight"]] for entry in bound}
    golden_values = golden_arrays.make(spec, options.import_root, serialized, weights, given)
    try:
        parts = safetensors.parts(golden_values)
    except ValueError as error:
        raise spec.problem("golden", str(error), "leave golden out") from error
    write_parts(options.output, parts)
