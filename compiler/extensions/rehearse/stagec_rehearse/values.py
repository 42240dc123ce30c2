"""`--values cpu`: compute on the CPU what a virtual device would, for a program that looks at numbers.

JAX lowers the same jaxpr once more, for the CPU, and runs it with what is in the arguments' memory. The results are
written into the memory of the virtual device, which is memory of this process.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax._src.interpreters import pxla


class Values:
    """What executables compute. here.computing: whether this thread computes that, with programs of its own."""

    def __init__(self) -> None:
        """Remember from now on what JAX lowers, and from what."""
        self.here = threading.local()
        self._lowered: dict[int, tuple[Any, Any, int]] = {}
        self._functions: dict[int, tuple[Any, Callable[..., Any], int]] = {}  # an id is of what is kept
        lower = pxla._cached_lowering_to_hlo

        def remembering(closed: Any, name: str, backend: Any, constants: int, *more: Any, **kwargs: Any) -> Any:
            made = lower(closed, name, backend, constants, *more, **kwargs)
            self._lowered[id(made[0])] = made[0], closed, constants
            return made

        pxla._cached_lowering_to_hlo = remembering  # type: ignore[assignment]

    def compiled(self, executable: Any, module: Any) -> None:
        """Take an executable, and the module that it was compiled from."""
        if id(module) in self._lowered:
            _, closed, constants = self._lowered[id(module)]
            closed = closed.replace(consts=[_host(each) for each in closed.consts])
            self._functions[id(executable)] = executable, jax.jit(core.jaxpr_as_fun(closed)), constants

    def of(self, executable: Any, arguments: Sequence[Any]) -> list[np.ndarray] | str:
        """Return the results of a run, or why they are not known. arguments: those that the executable takes."""
        if id(executable) not in self._functions:
            return "what JAX lowered it from is not known"
        _, function, constants = self._functions[id(executable)]
        self.here.computing = True
        try:
            # Not as a part of what is traced at this moment.
            with core.eval_context(), jax.default_device(jax.local_devices(backend="cpu")[0]):
                results = function(*map(_host, arguments[constants:]))
                return [np.asarray(_plain(each)) for each in results]
        except Exception as error:  # noqa: BLE001  # the program goes on with zeros, and the report says so
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        finally:
            self.here.computing = False


def _plain(value: Any) -> Any:
    """Return the array of integers that an array of keys of random numbers is."""
    return getattr(value, "_base_array", value)


def _host(value: Any) -> Any:
    """Return a value that is on no device."""
    if (plain := _plain(value)) is not value:
        data: Any = np.asarray(plain)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    return np.asarray(value) if isinstance(value, jax.Array) else value


def write(results: Sequence[Any], values: Sequence[np.ndarray]) -> str:
    """Write values into the memory of a virtual device's arrays; return what could not be written, "" if all was."""
    for result, value in zip(jax.block_until_ready(results), values, strict=True):
        for shard in _plain(result).addressable_shards:
            part = np.ascontiguousarray(value[shard.index])
            order = shard.data.format.layout.major_to_minor
            # XLA packs types of less than a byte.
            if part.nbytes != shard.data.on_device_size_in_bytes() or list(order) != sorted(order):
                return f"{value.dtype}[{','.join(map(str, value.shape))}] lies otherwise on the device"
            ctypes.memmove(shard.data.unsafe_buffer_pointer(), part.ctypes.data, part.nbytes)
    return ""
