"""JAX's arrays as arguments and results of calls, in a process that has imported JAX.

They are jaxlib's arrays, like the buffers of device arrays, so both name the same memory and nothing is copied. Only
the classes that describe them differ: here `AbstractArray` and `Sharding`, there `jax.core.ShapedArray` and
`jax.sharding`. This module imports no JAX: who has an array of JAX's has imported it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxlib import _jax

from stagec.core.sizes.avals import Aval
from stagec.pjrt import compatibility, layouts
from stagec.pjrt.arrays import AbstractArray, DeviceArray, abstract_array, single_device
from stagec.pjrt.executable import Executable
from stagec.pjrt.shardings import Sharding

JaxArray = _jax.ArrayImpl
"""The type of JAX's arrays, of all but those of PRNG keys."""

KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}
"""JAX's names of the implementations of PRNG keys, by dtype."""


def taken(array: Any) -> DeviceArray:
    """Return one of JAX's arrays as a device array: it has the same buffer, and a call that donates deletes both."""
    sharding = _sharding(array.sharding, array.ndim)
    # XLA does not report the layout of a deleted array.
    layout = None if array.is_deleted() else layouts.of_array(array, array.shape, array.dtype, sharding)
    return DeviceArray(array, abstract_array(array.shape, array.dtype, sharding, layout))


@functools.lru_cache(maxsize=1024)
def _sharding(sharding: Any, ndim: int) -> Sharding:
    devices = tuple(sharding._device_assignment)
    kind = sharding.memory_kind
    kind = None if kind == devices[0].default_memory().kind else kind
    if len(devices) == 1:
        return single_device(devices[0], kind)
    return Sharding(devices, sharding._to_xla_hlo_sharding(ndim), kind)


class Results:
    """How the results of an executable become JAX arrays.

    avals, shardings: JAX's, of each. committed: whether JAX keeps them on their device, like results of an array that
    somebody put there.
    """

    def __init__(self, executable: Executable, committed: bool, named: Callable[[AbstractArray], Any] | None) -> None:
        """named: gives JAX's sharding of an array on several devices, by the axes of a mesh; None: no mesh is known."""
        jax = sys.modules["jax"]
        self.committed = committed
        self.avals = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in executable.results]
        self.shardings = [_of_jax(aval, named) for aval in executable.results]
        self._execute = executable.execute
        self._handlers = [
            compatibility.result_handler(aval, sharding, committed)
            for aval, sharding in zip(self.avals, self.shardings, strict=True)
        ]

    def execute(self, buffers: Sequence[_jax.ArrayImpl]) -> list[Any]:
        """Run the executable on buffers that lie as it wants them, and return JAX's arrays."""
        return self._execute(buffers, self._handlers)


def _of_jax(aval: AbstractArray, named: Callable[[AbstractArray], Any] | None) -> Any:
    own = aval.sharding
    if own.spec is None:
        return sys.modules["jax"].sharding.SingleDeviceSharding(own.devices[0], memory_kind=own.memory_kind)
    return named(aval) if named else own.xla  # JAX has the same class


def as_key(words: Any, aval: Aval) -> Any:
    """Return words that are the result `aval` as JAX's array of keys; others as they are."""
    name = KEYS.get(aval.dtype)
    return words if name is None else sys.modules["jax"].random.wrap_key_data(words, impl=name)
