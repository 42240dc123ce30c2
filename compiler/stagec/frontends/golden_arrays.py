"""Golden inputs and outputs of a function: generated or given inputs, and the frontend's results for them on CPUs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from stagec.bundle.safetensors import Tensor
from stagec.checking import trials
from stagec.core.builds.specs import FunctionSpec
from stagec.core.messages.errors import StagecError, nearest
from stagec.core.sizes.avals import SHORT_NAMES, Aval, evaluate_shape, physical
from stagec.core.trees.tree import argument_path
from stagec.frontends.common import user_code
from stagec.frontends.common.frontend import frontend
from stagec.pjrt.arrays import dtype_of
from stagec.pjrt.making import random_arrays
from stagec.stages.exported import Exported


def make(
    spec: FunctionSpec,
    import_roots: Sequence[str],
    serialized: bytes,
    bound: Mapping[int, Tensor],
    given: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> dict[str, Tensor]:
    """Return an array for each argument that is not bound (`args[0]['w']`) and for each result (`result['y']`).

    serialized: the exported artifact. bound: the weights that are arguments, by their numbers.
    given: the arrays of the file of inputs, if `spec` names one, by the paths of arguments. A PRNG key is its words.
    The function runs on as many CPU devices as it was exported for, so this must be the first use of devices.
    Raises StagecError when `given` does not fit the function, or when the function cannot run.
    """
    exported = Exported.deserialize(serialized)
    results_of = [f"result{path}" for path in exported.out_tree.paths()]
    unknown = [path for path in spec.golden["outputs"] if path not in results_of]
    if unknown:
        what = f"there is no {unknown[0]}"
        raise spec.problem("golden.outputs", what, nearest(unknown[0], results_of) or f"write {results_of[0]}")
    sizes = spec.golden["bucket"]
    avals = [Aval(aval.dtype, evaluate_shape(aval.shape, sizes)) for aval in exported.in_avals]
    paths = list(map(argument_path, exported.in_tree.paths()))
    if spec.golden["inputs"]:
        values = _from_file(spec, paths, list(map(physical, avals)), bound, given)
    else:
        values = random_arrays(avals, spec.golden["seed"])
    for i, tensor in bound.items():
        values[i] = np.frombuffer(tensor.read(), dtype_of(avals[i])).reshape(tuple(map(int, avals[i].shape)))

    def call() -> list[np.ndarray[Any, Any]]:
        return frontend(spec).results(spec, import_roots, serialized, values)

    # From the function under `jax.jit`, and not from the export: a fault of the export would be in both, and agree with
    # itself. JAX makes the devices of a sharded function from one CPU.
    results = user_code.run(call, "the golden run raised", spec.manifest, f"{spec.key}.golden")
    taken = [row for i, row in enumerate(zip(paths, values, avals, strict=True)) if i not in bound]
    made = zip(results_of, results, exported.out_avals, strict=True)
    return {
        path: Tensor(Aval(physical(aval).dtype, value.shape), memoryview(value.tobytes()))
        for path, value, aval in (*taken, *made)
    }


def _from_file(
    spec: FunctionSpec,
    paths: Sequence[str],
    avals: Sequence[Aval],
    bound: Collection[int],
    given: Mapping[str, np.ndarray[Any, Any]] | None,
) -> list[Any]:
    """Return the arrays of the arguments, None for a bound one. Raises StagecError with all faults."""
    file = spec.golden["inputs"]
    if given is None:
        raise spec.problem("golden.inputs", f"no {file} is given", "give it with --inputs")
    values: list[Any] = [None] * len(paths)
    wanted = {path: i for i, path in enumerate(paths) if i not in bound}
    faults = []
    for path, i in wanted.items():
        if path not in given:
            faults.append((f"{file} lacks {path} ({avals[i]})", "save it under this name"))
            continue
        values[i] = trials.as_dtype(given[path], dtype_of(avals[i]))
        have = Aval(SHORT_NAMES.get(str(values[i].dtype), str(values[i].dtype)), values[i].shape)
        if have != Aval(avals[i].dtype, avals[i].shape):
            other = ", or name another bucket" if spec.golden["bucket"] else ""
            what = f"{path} of {file} is {have}; expected {avals[i]}"
            faults.append((what, f"save it with this dtype and shape{other}"))
    for path in sorted(given.keys() - wanted.keys()):
        if path in paths:
            faults.append((f"{file} has {path}, which is bound to weights", "leave it out of the file"))
        else:
            write = nearest(path, wanted.keys() - given.keys()) or "leave it out of the file"
            faults.append((f"{file} has {path}, which is not an argument", write))
    if faults:
        raise StagecError(*(problem for fault in faults for problem in spec.problem("golden.inputs", *fault).problems))
    return values
