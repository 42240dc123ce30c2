"""Lower with JAX for a device that this machine does not have: kernels, and everything in its newest form.

JAX lowers a Pallas kernel for the device that is there: it asks for its kind, and so may the kernel. For an export it
lowers some operations in an older form, which the JAX of last month reads too
(https://docs.jax.dev/en/latest/export/export.html#compatibility-guarantees). An executable is for one device and one
compiler; it is made from `jax.jit`'s lowering on a machine that has them.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import util
from typing import Any, NamedTuple

import jax
from jax._src import config
from jax._src.interpreters import mlir

from stagec.core.builds.platforms import GPUS, PLATFORMS
from stagec.core.builds.specs import FunctionSpec
from stagec.core.messages.errors import StagecError
from stagec.frontends.common import patched

_MOSAIC_GPU = b"mosaic_gpu_v2"
_KERNELS = (b"tpu_custom_call", _MOSAIC_GPU, b"__gpu$xla.gpu.triton")
"""Custom calls of Pallas kernels: of Mosaic for TPUs and NVIDIA devices, and of Triton."""
_NO_MOSAIC_GPU = ("Cannot lower pallas_call on platform: gpu", "No module named 'absl'")
"""JAX's message if it cannot lower kernels for NVIDIA devices: it imports absl-py there without requiring it."""
_NO_DEVICE = {"tpu": "TPU device kind", "cuda": "No supported GPU devices", "rocm": "No supported GPU devices"}
"""JAX's message if a kernel, or JAX, asks for a device of a platform and there is none."""
_WHO_ASKS = ("jax._src.pallas.mosaic.tpu_info", "jax._src.tpu_info", "jax._src.pallas.triton.gpu_info")
"""Modules of JAX that ask for the device; some exist only in some versions."""


class Device(NamedTuple):
    """The properties of a device that JAX and kernels ask for; the names are those of `jax.Device`.

    platform: "tpu" or "gpu". num_cores: TensorCores of a TPU. core_count: multiprocessors of a GPU.
    compute_capability: of a GPU, such as "9.0".
    """

    platform: str
    device_kind: str
    num_cores: int | None = None
    core_count: int | None = None
    compute_capability: str | None = None

    @staticmethod
    def from_spec(described: Mapping[str, Any]) -> Device:
        """Return the device that a function's spec describes (`FunctionSpec.devices`)."""
        given = {key: value for key, value in described.items() if key in Device._fields}
        return Device(**{**given, "platform": "gpu" if described["platform"] in GPUS else described["platform"]})


def asked_for(error: Exception, devices: Sequence[Mapping[str, Any]]) -> Device | None:
    """Return the first of `devices` with the platform that a function asked for in vain; None for any other error."""
    platforms = [platform for platform, text in _NO_DEVICE.items() if text in str(error)]
    return next((Device.from_spec(described) for described in devices if described["platform"] in platforms), None)


def are_in(module: bytes) -> bool:
    """Whether a serialized module has Pallas kernels."""
    return any(name in module for name in _KERNELS)


def check_plugin(spec: FunctionSpec, module: bytes) -> None:
    """Raise StagecError if a serialized module was lowered without the parts of a plugin that it depends on.

    Without them JAX takes other instructions for some conversions (jax/experimental/mosaic/gpu/fragmented_array.py).
    """
    if _MOSAIC_GPU in module:
        _need_plugin(spec, "its Pallas kernels of Mosaic GPU are lowered with parts of JAX's plugin for NVIDIA devices")


@contextlib.contextmanager
def naming_the_device(device: Device) -> Iterator[None]:
    """Add the device to every problem."""
    try:
        yield
    except StagecError as error:
        of_device = f"for {device.device_kind}: "
        raise StagecError(*(replace(problem, what=of_device + problem.what) for problem in error.problems)) from error


@contextlib.contextmanager
def naming_the_plugin(spec: FunctionSpec) -> Iterator[None]:
    """Add advice if JAX cannot lower kernels for NVIDIA devices: JAX's own advice would install another jaxlib."""
    try:
        yield
    except StagecError as error:
        if any(text in str(error) for text in _NO_MOSAIC_GPU):
            _need_plugin(spec, "its Pallas kernels for NVIDIA devices are lowered with packages that are not there")
            what = f"Mosaic GPU cannot be imported: {_cannot_import()}"
            raise spec.problem("plugins", what, "add absl-py to the lock of the CUDA plugin (cuda_lock)") from error
        raise


def _need_plugin(spec: FunctionSpec, what: str) -> None:
    if "cuda" not in spec.plugins:
        raise spec.problem("plugins", what, 'write plugins = ["cuda"]')
    plugin = PLATFORMS["cuda"].plugin
    assert plugin is not None
    name = plugin.kernels
    if util.find_spec(name.replace("-", "_")) is None:
        raise spec.problem("plugins", f"{name} is not installed", f"add {name} to the packages that trace the function")


def _cannot_import() -> str:
    try:
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    except ImportError as error:
        return str(error)
    return "its import succeeds now"


@contextlib.contextmanager
def noticing_forms() -> Iterator[list[str]]:
    """Yield a list that grows: the operations that JAX lowers meanwhile and that have a form for exports."""
    seen: list[str] = []

    def noticing(before: Callable[..., bool], context: mlir.LoweringRuleContext) -> bool:
        seen.append(str(context.primitive))
        return before(context)

    with patched.FORMS.by(noticing):
        yield seen


@contextlib.contextmanager
def on(device: Device) -> Iterator[None]:
    """Make JAX trace and lower as if `device` were the default one. Clear its traces before and after."""

    def local_devices(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return [device] if kwargs.get("backend") == device.platform else before(*args, **kwargs)

    def default_device(before: Callable[..., Any]) -> Any:
        # These modules ask what the device can do. Others want to put arrays on it, and there is none.
        return device if patched.caller() in _WHO_ASKS else before()

    with contextlib.ExitStack() as changes:
        changes.enter_context(patched.LOCAL_DEVICES.by(local_devices))
        changes.enter_context(patched.DEFAULT_DEVICE.by(lambda before: device))
        changes.enter_context(patched.DEFAULT_DEVICE_OF_ALL.by(default_device))
        jax.clear_caches()
        # What JAX has traced and lowered before is for another device, and it would ask no more.
        changes.callback(jax.clear_caches)
        yield


@contextlib.contextmanager
def newest() -> Iterator[None]:
    """Let JAX lower everything in its newest form, also for an export, in this thread.

    It asks by the date of its build whether a compiler knows that form, and takes the older one if there is none to
    ask. The compiler that goes with this jaxlib does.
    """

    def any_backend(before: Callable[..., Any], context: mlir.ModuleContext, optional: bool = False) -> Any:
        # JAX asks with `optional` only to learn how old the compiler may be.
        return context.backend if optional else before(context)

    with config.export_ignore_forward_compatibility(True), patched.BACKEND.by(any_backend):
        yield
