"""A slice of TPUs that is not there: JAX's CPU client, which answers as TPUs, and libtpu, which compiles for them.

libtpu makes no client without chips, but it describes the devices of a topology and compiles for them. So JAX's CPU
client holds the arrays, and each of its devices says what libtpu's says: of the same host, and the same place among the
host's. JAX runs what was compiled from Python, where nothing is run: results are zeros in memory that nobody has
written, and takes none. A slice of several hosts has a process for each, and XLA joins their clients.
"""

from __future__ import annotations

import atexit
import functools
import mmap
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax._src import compiler, core, distributed, sharding_impls, xla_bridge
from jaxlib import _jax, xla_client

from stagec.backends import plugins
from stagec.backends.tpu import compiler as tpu
from stagec.core.builds.specs import TpuTarget

_PLATFORM = "tpu"


class Slice:
    """The devices. here: what the calling thread is about to compile: the module, and which arguments are donated."""

    def __init__(self, target: TpuTarget, address: str, processes: int, number: int) -> None:
        """Make them JAX's TPUs, before it starts. JAX's own backend for TPUs would look for those of this machine.

        address: where the processes join their parts of the slice. number: of this process.
        """
        self._target, self._processes = target, processes
        self._join = functools.partial(
            distributed.State.initialize, coordinator_address=address, num_processes=processes, process_id=number
        )
        self._client: Any = None
        self._twins: dict[Any, Any] = {}
        self.here = threading.local()
        xla_bridge.register_backend_factory(_PLATFORM, self._start, priority=300, fail_quietly=False)

    def __contains__(self, device: Any) -> bool:
        return self._client is not None and device.client is self._client

    def _start(self) -> Any:
        """Return the client. Raises CannotCompile if libtpu is missing, or does not run here."""
        tpu.check_machine()
        topology = tpu.slice_of(self._target)
        devices = plugins.topology_devices(tpu.PLUGIN, str(topology), topology.options())
        client: Any = xla_client.make_cpu_client(num_devices=len(devices) // self._processes, **self._joined())
        # Both list a host's devices in a row, as JAX expects; libtpu numbers them across hosts.
        self._twins = dict(zip(client.devices(), devices, strict=True))
        self._answer()
        self._client = client
        kind = devices[0].device_kind
        print(
            f"stagec: {len(devices)} virtual {kind} ({topology}); no program runs, and results are zeros",
            file=sys.stderr,
        )
        return client

    def _joined(self) -> dict[str, Any]:
        """Return how a client is one of several. A program on TPUs need not call `jax.distributed.initialize`.

        If it does, JAX's client for the CPU tells the others of its devices at that address, so this has its own.
        """
        if self._processes == 1:
            return {}
        state = distributed.State()
        self._join(state)
        atexit.register(state.shutdown)
        return {"distributed_client": state.client, "node_id": state.process_id, "num_nodes": state.num_processes}

    def _answer(self) -> None:
        """Let the types of jaxlib answer for these devices as they answer for libtpu's, and for others as before."""

        def asked(type_: Any, name: str, answer: Callable[[Any], Any], mine: Callable[[Any], bool]) -> None:
            before = getattr(type_, name)
            get = before.__get__ if isinstance(before, property) else None

            def of_property(self: Any) -> Any:
                return answer(self) if mine(self) else get(self)  # type: ignore[misc]

            def of_method(self: Any, *args: Any) -> Any:
                return answer(self)(*args) if mine(self) else before(self, *args)

            setattr(type_, name, property(of_property) if get else of_method)

        def of_twin(name: str) -> Callable[[Any], Any]:
            return lambda device: getattr(self._twin(device), name)

        def of_client(name: str) -> Callable[[Any], Any]:
            return lambda _: getattr(first.client, name)

        of_slice, is_client = self.__contains__, lambda client: client is self._client
        first = next(iter(self._twins.values()))
        for name in ("id", "platform", "device_kind"):
            asked(_jax.Device, name, of_twin(name), of_slice)
        asked(_jax.Device, "__getattr__", lambda device: functools.partial(getattr, self._twin(device)), of_slice)
        asked(_jax.Device, "__repr__", lambda device: lambda: repr(self._twin(device)), of_slice)
        asked(_jax.Device, "__str__", lambda device: lambda: str(self._twin(device)), of_slice)
        asked(_jax.Device, "memory_stats", lambda _: self._memory, of_slice)
        asked(_jax.DeviceList, "device_kind", lambda _: first.device_kind, lambda listed: listed[0] in self)
        for name in ("platform", "platform_version", "_raw_platform"):
            asked(_jax.Client, name, of_client(name), is_client)
        asked(_jax.Client, "deserialize_executable", lambda _: self._found, is_client)
        fingerprinted, compile_ = xla_client.get_topology_for_devices, compiler.backend_compile_and_load

        def described(devices: Sequence[Any]) -> Any:
            return fingerprinted([self._twin(device) if device in self else device for device in devices])

        def compiled(backend: Any, module: Any, devices: Any, options: Any, *more: Any) -> Any:
            if backend is not self._client:
                return compile_(backend, module, devices, options, *more)
            return self._compile(module, devices, options)

        xla_client.get_topology_for_devices = described
        compiler.backend_compile_and_load = compiled

    def _twin(self, device: Any) -> Any:
        return self._twins[device]

    def _memory(self) -> dict[str, int]:
        return {"bytes_limit": tpu.hardware(self._target).memory or 0, "bytes_in_use": 0, "peak_bytes_in_use": 0}

    def _compile(self, module: Any, devices: Any, options: Any) -> Executable:
        """Compile for the slice. Raises what XLA raises, such as RESOURCE_EXHAUSTED for a program that does not fit."""
        twins = [self._twin(device) for device in devices]
        made = twins[0].client.compile(module, _jax.DeviceList(tuple(twins)), options)
        return Executable(made, self._client, list(devices), self.here.donated)

    def _found(self, serialized: bytes, devices: Any, options: Any) -> Executable:
        """Take an entry of JAX's cache. libtpu loads none without chips, so the program is compiled once more.

        Raises NotImplementedError for any other executable: nobody knows its program.
        """
        if getattr(self.here, "module", None) is None:
            raise NotImplementedError(
                "a TPU that is not there loads no executable; compile the program, or use JAX's cache"
            )
        return self._compile(self.here.module, devices, options)


class Executable:
    """What JAX runs: of libtpu, with figures of libtpu's. It runs nothing, and returns zeros.

    It says nothing of layouts, as those of the CPU client's arrays are others.
    """

    def __init__(self, made: Any, client: Any, devices: Sequence[Any], donated: Sequence[int]) -> None:
        self._made, self.client, self._donated = made, client, donated
        self._devices = [device for device in devices if device.process_index == client.process_index()]
        result = xla_client.XlaComputation(made.hlo_modules()[0].as_serialized_hlo_module_proto())
        shape = result.program_shape().result_shape()
        shapes = shape.tuple_shapes() if shape.is_tuple() else [shape]
        (kinds,) = made.get_output_memory_kinds()
        self._results = [(*_shape(each), kind) for each, kind in zip(shapes, kinds, strict=True)]
        for name in ("cost_analysis", "get_compiled_memory_stats", "hlo_modules", "serialize"):
            setattr(self, name, getattr(made, name))
        for name in ("parameter_shardings", "output_shardings", "output_memory_kinds"):
            setattr(self, f"get_{name}", getattr(made, f"get_{name}"))

    def local_devices(self) -> list[Any]:
        """Return those of this process, in the order in which the program is on them."""
        return [*self._devices]

    def execute_sharded(self, arguments: Sequence[Any], with_tokens: bool = False) -> _Results:
        """Return zeros, and take what was donated."""
        results = [
            [_zeros(shape, dtype, kind, device) for device in self._devices] for shape, dtype, kind in self._results
        ]
        for position in self._donated:
            arguments[position].delete()
        return _Results(results)


@dataclass
class _Results:
    """As jaxlib's `ExecuteResults`. left: for each result that nobody has taken, its arrays, one for a device."""

    left: list[list[Any]]

    def consume_with_handlers(self, handlers: Sequence[Callable[..., Any]], strict: bool = True) -> list[Any]:
        taken, self.left = self.left[: len(handlers)], self.left[len(handlers) :]
        return [handler(arrays) for handler, arrays in zip(handlers, taken, strict=True)]

    def consume_token(self) -> _Results:
        return self

    def get_token(self, _: int) -> _Results:
        return self

    def block_until_ready(self) -> None:
        """Return at once: nothing runs."""


def _shape(shape: Any) -> tuple[tuple[int, ...], Any]:
    if shape.is_token():  # JAX holds it as an empty array
        return (0,), np.dtype(bool)
    return tuple(shape.dimensions()), shape.numpy_dtype()


_NEVER_WRITTEN: list[mmap.mmap] = []


def _zeros(shape: tuple[int, ...], dtype: Any, kind: str, device: Any) -> Any:
    """Return an array of zeros on a device. All are of the same memory, which cannot be written."""
    size = max(1, int(np.prod(shape)) * dtype.itemsize)
    if not _NEVER_WRITTEN or len(_NEVER_WRITTEN[-1]) < size:
        _NEVER_WRITTEN.append(mmap.mmap(-1, size, prot=mmap.PROT_READ))
    value = np.frombuffer(_NEVER_WRITTEN[-1], np.uint8, int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)
    sharding = sharding_impls.SingleDeviceSharding(device, memory_kind=kind)
    return _jax.batched_device_put(core.ShapedArray(shape, dtype), sharding, [value], [device], True)
