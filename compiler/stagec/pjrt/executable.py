"""Executables that XLA has loaded: device arrays in, device arrays out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from jaxlib import _jax, xla_client

from stagec.core.messages.refusal import LoadError
from stagec.pjrt import clients, compatibility, failures, layouts, turns
from stagec.pjrt.arrays import AbstractArray, DeviceArray, abstract_array, in_layout, placing, single_device
from stagec.pjrt.shardings import Sharding

if TYPE_CHECKING:
    from numpy.typing import NDArray  # numpy does not import it itself

ArraySpecs: TypeAlias = Sequence[tuple[tuple[int, ...], np.dtype[Any]]]
"""Shape and dtype of each array, whole."""

_COLLECTIVES = threading.Lock()
"""Held by a call on several devices of one CPU until it is done: they share the CPU's threads, so that parts of two
such calls, each waiting until its other parts have a thread, would wait forever (XLA ends the process after 40 s)."""


def donation_refusal(platform: str, memory_kinds: Mapping[int, str], donated: Sequence[bool]) -> str:
    """Return why a donated parameter cannot lie in a memory; "" if all can. The fields are those of `Executable`.

    XLA:CPU gives the result that takes its buffer another memory than that of the buffer, and ends the process.
    """
    for number, kind in memory_kinds.items():
        if platform == "cpu" and number < len(donated) and donated[number] and kind != "device":
            what = f"parameter {number} is donated and lies in {kind}, and a CPU reuses the buffers of its own memory"
            return f"{what} alone; leave out the donation, or the kind of memory"
    return ""


class Executable:
    """A loaded executable: device arrays in, device arrays out, flat and in the order of the executable's parameters.

    loaded: jaxlib's executable.
    devices: those that it runs on, in the order of its partitions; the executable decides how they split arrays.
    parameter_shardings, output_shardings: the sharding of each array.
    parameters, results: of each array the shape, dtype, sharding and layout.
    """

    def __init__(
        self,
        loaded: _jax.LoadedExecutable,
        parameters: ArraySpecs,
        results: ArraySpecs,
        devices: Sequence[_jax.Device],
        memory_kinds: Mapping[int, str] | None = None,
        donated: Sequence[bool] = (),
    ) -> None:
        """Raises ValueError if an array has a sharding or layout that calls cannot pass or return.

        memory_kinds: of the parameters, by number, that lie in another memory than the device's own.
        donated: of each parameter, whether a call consumes its buffer.
        """
        refusal = donation_refusal(clients.platform_of(devices[0]), memory_kinds or {}, donated)
        if refusal:
            raise ValueError(refusal)
        self.loaded = loaded
        self._execute = loaded.execute_sharded
        self.devices = tuple(devices)
        self._alone = _COLLECTIVES if len(devices) > 1 and clients.platform_of(devices[0]) == "cpu" else None
        kinds = memory_kinds or {}
        of_parameters = [kinds.get(number) for number in range(len(parameters))]
        self.parameter_shardings = self._shardings(loaded.get_parameter_shardings, parameters, of_parameters)
        self.output_shardings = self._shardings(loaded.get_output_shardings, results, self._of_results(len(results)))
        self.parameters, self.results = (
            self._arrays(specs, shardings, layouts_of)
            for specs, shardings, layouts_of in (
                (parameters, self.parameter_shardings, loaded.get_parameter_layouts),
                (results, self.output_shardings, loaded.get_output_layouts),
            )
        )
        self._handlers = [compatibility.result_handler(aval, aval.sharding.xla) for aval in self.results]

    def _shardings(
        self,
        protos: Callable[[], Sequence[xla_client.OpSharding] | None],
        arrays: ArraySpecs,
        memory_kinds: Sequence[str | None],
    ) -> list[Sharding]:
        if len(self.devices) == 1:
            return [single_device(self.devices[0], kind) for kind in memory_kinds]
        forms = [xla_client.HloSharding.from_proto(proto) for proto in protos() or ()]
        if len(forms) == 1:  # XLA may say once what all share, and something where there are none; JAX does the same
            forms *= len(arrays)
        shardings = [Sharding(self.devices, form, kind) for form, kind in zip(forms, memory_kinds, strict=True)]
        for sharding, (shape, _) in zip(shardings, arrays, strict=True):
            sharding.parts(shape)
        return shardings

    def _arrays(
        self,
        arrays: ArraySpecs,
        shardings: Sequence[Sharding],
        layouts_of: Callable[[], Sequence[_jax.PjRtLayout]],
    ) -> list[AbstractArray]:
        own_layouts = layouts.of_executable(layouts_of, arrays, shardings)
        for layout, sharding in zip(own_layouts, shardings, strict=True):
            if layout and sharding.memory_kind:
                what = f"it wants an array in layout {layout} in {sharding.memory_kind}, and stagec makes other layouts"
                raise ValueError(f"{what} in a device's own memory alone; leave out the layout, or the kind of memory")
        return [
            abstract_array(*array, of, layout) for array, of, layout in zip(arrays, shardings, own_layouts, strict=True)
        ]

    def _of_results(self, count: int) -> list[str | None]:
        """Return the kind of memory of each result; None for the device's own."""
        try:
            (kinds,) = self.loaded.get_output_memory_kinds()
        except _jax.JaxRuntimeError:  # a plugin that does not say
            return [None] * count
        usual = self.devices[0].default_memory().kind
        return [None if kind == usual else kind for kind in kinds]

    @staticmethod
    def load(
        serialized: bytes | memoryview,
        parameters: ArraySpecs,
        results: ArraySpecs,
        custom_calls: Sequence[str],
        devices: Sequence[_jax.Device],
        memory_kinds: Mapping[int, str] | None = None,
        donated: Sequence[bool] = (),
    ) -> Executable:
        """Load an executable that takes arrays `parameters` and gives arrays `results`, for as many devices as given.

        The devices may be others than it was compiled for, of the same kind, in any order.
        memory_kinds, donated: as of the class.
        Raises LoadError ("custom-call", "executable", "memory"), ("device-count") if all devices belong to other
        processes.
        """
        here = devices[0].client.process_index()
        if all(device.process_index != here for device in devices):
            what = f"process {here} has none of the devices that it is to run on"
            raise LoadError("device-count", f"{what}; name its own, or those of all processes: devices=[...]")
        # An accelerator's plugin brings its own handlers.
        if custom_calls and clients.platform_of(devices[0]) == "cpu":
            from stagec.pjrt.custom_calls import register_custom_calls  # most executables call nothing

            if unknown := register_custom_calls(custom_calls):
                what = f"the executable calls {', '.join(unknown)}, which jaxlib does not have"
                raise LoadError("custom-call", what)
        # Otherwise XLA takes the stored assignment, to the first devices.
        options = clients.compile_options([device.id for device in devices])
        try:
            where = _jax.DeviceList(tuple(devices))
            with turns.for_this_machine():
                loaded = devices[0].client.deserialize_executable(bytes(serialized), where, options)
        except Exception as error:  # XLA's status, by version RuntimeError or JaxRuntimeError
            what = f"jaxlib does not load the executable: {error}"
            raise LoadError(failures.code(error, "executable"), what) from error
        try:
            return Executable(loaded, parameters, results, devices, memory_kinds, donated)
        except ValueError as error:
            raise LoadError("executable", f"the executable cannot be called: {error}") from error

    def put(self, number: int, values: NDArray[Any] | DeviceArray, donated: bool = False) -> _jax.ArrayImpl:
        """Return the buffer of parameter `number`, without a copy if the array already has the right place and layout.

        values: of the parameter's own shape and dtype. donated: the call will overwrite it.
        """
        aval = self.parameters[number]
        if isinstance(values, DeviceArray):
            if values.aval.lies_as(aval):
                return values._buffer
            if values.sharding.same(aval.sharding, values.shape):
                return in_layout(values._buffer, values.aval, aval)
            values = values.numpy()
        return placing(aval, donated)(aval.sharding.pieces(values))

    def run(self, buffers: Sequence[_jax.ArrayImpl]) -> list[DeviceArray]:
        """Run on `buffers`. They must have the executable's own shapes and dtypes, because XLA does not check."""
        return list(map(DeviceArray, self.execute(buffers), self.results))

    def execute(self, buffers: Sequence[_jax.ArrayImpl], handlers: Sequence[Any] | None = None) -> list[_jax.ArrayImpl]:
        """Run as `run` does; the results are buffers. handlers: make arrays from them; None: its own."""
        handlers = handlers or self._handlers
        if self._alone is None:
            return self._execute(buffers).consume_with_handlers(handlers)  # type: ignore[no-any-return]
        with self._alone:
            outputs: list[_jax.ArrayImpl] = self._execute(buffers).consume_with_handlers(handlers)
            _jax.batched_block_until_ready(outputs)
        return outputs
