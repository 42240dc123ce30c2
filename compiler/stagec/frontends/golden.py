"""Golden inputs and outputs of a function: generated inputs, and what `jax.jit` makes of them on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.export
import numpy as np

from stagec.avals import Aval, evaluate_shape, physical
from stagec.bundle.safetensors import Tensor
from stagec.frontends import jax as frontend
from stagec.frontends import user_code
from stagec.runtime import trials
from stagec.specs import FunctionSpec
from stagec.stages.exported import Exported
from stagec.trees import argument_path


def make(
    spec: FunctionSpec, import_roots: Sequence[str], serialized: bytes, bound: Mapping[int, Tensor]
) -> dict[str, Tensor]:
    """Return an array for each argument that is not bound (`args[0]['w']`) and for each result (`result['y']`).

    serialized: the portable artifact. bound: the weights that are arguments, by their numbers.
    A PRNG key is its words. Raises StagecError when the function cannot be run.
    """
    exported = Exported.deserialize(serialized)
    sizes = spec.golden["bucket"]
    avals = [Aval(aval.dtype, evaluate_shape(aval.shape, sizes)) for aval in exported.in_avals]
    values = trials.random_arrays(avals, spec.golden["seed"])
    for i, tensor in bound.items():
        values[i] = np.frombuffer(tensor.data, values[i].dtype).reshape(values[i].shape)

    def call() -> list[Any]:
        if spec.is_module:
            jax.config.update("jax_enable_x64", True)  # a module has the dtypes that it has
        leaves = [_logical(value, aval) for value, aval in zip(values, avals, strict=True)]
        if spec.is_module:
            portable = jax.export.deserialize(bytearray(serialized))
            args, kwargs = jax.tree.unflatten(portable.in_tree, leaves)
            return jax.tree.leaves(portable.call(*args, **kwargs))
        staged = frontend.stage(spec, import_roots)
        args, kwargs = jax.tree.unflatten(jax.tree.structure((staged.args, staged.kwargs)), leaves)
        return jax.tree.leaves(staged.jitted(*args, **kwargs))

    results = list(map(_words, user_code.run(call, "the golden run raised", spec.manifest, f"{spec.key}.golden")))
    paths = map(argument_path, exported.in_tree.paths())
    taken = [row for i, row in enumerate(zip(paths, values, avals, strict=True)) if i not in bound]
    given = zip(map("result{}".format, exported.out_tree.paths()), results, exported.out_avals, strict=True)
    return {path: _tensor(value, aval) for path, value, aval in (*taken, *given)}


def _logical(value: np.ndarray[Any, Any], aval: Aval) -> Any:
    if aval.dtype.startswith("key<"):
        return jax.random.wrap_key_data(jax.numpy.asarray(value), impl=frontend.KEY_IMPLEMENTATIONS[aval.dtype])
    return value


def _words(result: Any) -> np.ndarray[Any, Any]:
    is_key = jax.numpy.issubdtype(result.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(result) if is_key else result)


def _tensor(value: np.ndarray[Any, Any], aval: Aval) -> Tensor:
    return Tensor(Aval(physical(aval).dtype, value.shape), memoryview(value.tobytes()))
