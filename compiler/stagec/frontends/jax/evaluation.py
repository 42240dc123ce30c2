"""Compute JAX's results for leaves of arguments on this process's CPU devices: golden outputs of JAX functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from stagec.backends.cpu import defects
from stagec.core.sizes.avals import Aval
from stagec.pjrt.jax_arrays import KEYS
from stagec.stages.exported import Exported


def results(
    serialized: bytes,
    values: Sequence[np.ndarray[Any, Any]],
    reference: Callable[[], tuple[Callable[..., Any], Any]],
    mesh: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> list[np.ndarray[Any, Any]]:
    """Return the leaves of a function's result under `jax.jit`; for PRNG keys their words.

    serialized: the exported artifact of the function; it has the dtypes and the number of devices.
    reference: returns the function, and JAX's structure of its `(args, kwargs)`. mesh: enters the function's mesh.
    This must be the first use of JAX's devices.
    """
    exported = Exported.deserialize(serialized)
    jax.config.update("jax_num_cpu_devices", exported.nr_devices)
    function, structure = reference()

    # PRNG keys are made in a jit of ours: an array that lies on a device has no place in the mesh of the other.
    def run(leaves: list[Any]) -> list[Any]:
        args, kwargs = jax.tree.unflatten(structure, map(_logical, leaves, exported.in_avals))
        return list(map(words, jax.tree.leaves(function(*args, **kwargs))))

    with mesh():
        lowered = jax.jit(run).lower(list(values))

        def compiling(options: Mapping[str, Any]) -> jax.stages.Compiled:
            return lowered.compile(dict(options))

        compiled, _ = defects.around(compiling, {}, lambda made: made.as_text() or "")
        return list(map(np.asarray, compiled(list(values))))


def _logical(value: Any, aval: Aval) -> Any:
    if aval.dtype.startswith("key<"):
        return jax.random.wrap_key_data(value, impl=KEYS[aval.dtype])
    return value


def words(result: Any) -> Any:
    """Return the words of a PRNG key; another array unchanged."""
    is_key = jax.numpy.issubdtype(result.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(result) if is_key else result
