"""Abstract arguments of a manifest's function, for tracing with JAX, and their placeholders in one bucket."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import numpy as np

from stagec.core.builds.specs import ExecutableSpec, FunctionSpec
from stagec.core.sizes import size
from stagec.core.sizes.avals import DTYPES, Aval
from stagec.frontends.common import entries, user_code
from stagec.frontends.jax import advice, filtering, wholes
from stagec.pjrt.calling_convention import NUMBERS
from stagec.pjrt.jax_arrays import KEYS


def arguments(spec: FunctionSpec, roots: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the abstract arguments. Raises StagecError with all their faults."""
    if spec.avals is not None:
        return _arguments_of_callable(spec)
    constraints = functools.partial(jax.export.SymbolicScope, tuple(spec.constraints))
    scope = user_code.run(constraints, "the constraints raised", spec.manifest, f"{spec.key}.constraints")

    def struct(aval: Aval, key: str) -> jax.ShapeDtypeStruct:
        def make() -> jax.ShapeDtypeStruct:
            shape = jax.export.symbolic_shape(",".join(map(str, aval.shape)), scope=scope)
            return jax.ShapeDtypeStruct(shape, _dtype(aval.dtype), weak_type=aval.weak_type)

        return user_code.run(make, f"{aval} raised", spec.manifest, f"{spec.key}.{key}")

    return entries.arguments(spec, struct, roots)


def _arguments_of_callable(spec: FunctionSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
    result, write = entries.arguments_of_callable(spec, "jax.ShapeDtypeStruct")
    result = filtering.closed(result)
    if any(isinstance(leaf, jax.Ref) for leaf in jax.tree.leaves(result)):
        raise spec.problem("avals", f"{spec.avals} returned a mutable reference", advice.REFERENCE)
    if spec.in_shardings is None and (sharded := _sharded(result)):
        what = f"{spec.avals} returned avals with shardings: {', '.join(sharded)}"
        raise spec.problem("avals", what, "name a mesh in the manifest, and write in_shardings over it")
    return entries.abstracted(spec, wholes.closed(result), _abstract, write)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the placeholder of an example's leaf: an array's shape and dtype, or a number as `jax.jit` traces it."""
    aval = jax.typeof(leaf) if isinstance(leaf, NUMBERS) else leaf
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def _sharded(avals: Any) -> list[str]:
    """Return the paths of the avals with a sharding over devices."""
    leaves = jax.tree_util.tree_leaves_with_path(avals)
    return [
        jax.tree_util.keystr(path)
        for path, leaf in leaves
        if isinstance(leaf, jax.ShapeDtypeStruct) and isinstance(leaf.sharding, jax.sharding.NamedSharding)
    ]


def _dtype(name: str) -> Any:
    if name in KEYS:
        return jax.eval_shape(lambda: jax.random.key(0, impl=KEYS[name])).dtype
    return jax.dtypes.float0 if name == "f0" else jax.numpy.dtype(DTYPES[name].numpy_name)


def in_bucket(executable: ExecutableSpec, sharding: Any, leaf: Any) -> Any:
    """Return the placeholder of an array, with the sizes of a bucket, and where it is from `sharding`."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    shape = [dim if isinstance(dim, int) else size.evaluate(str(dim), executable.bucket) for dim in leaf.shape]
    return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=leaf.weak_type, sharding=sharding)


def zeros(leaf: Any) -> Any:
    """Return an array instead of its placeholder; it takes no memory until somebody reads it."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        zeros = np.zeros(leaf.shape, leaf.dtype)
        return jax.device_put(zeros, leaf.sharding) if leaf.sharding else zeros
    words = jax.eval_shape(jax.random.key_data, leaf)
    implementation = KEYS[str(leaf.dtype)]
    return jax.random.wrap_key_data(jax.numpy.zeros(words.shape, words.dtype), impl=implementation)
