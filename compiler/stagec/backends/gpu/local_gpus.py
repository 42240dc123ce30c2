"""The GPUs of this machine: describe one, and time kernels on an NVIDIA one. Nothing that is built needs a device.

XLA needs the driver for both. To time kernels it also needs the libraries that they call: cuBLAS, cuDNN and others of
CUDA. It searches for them like any program.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagec.backends import plugins
from stagec.backends.compilation import CannotCompile
from stagec.backends.gpu import descriptions, nvidia
from stagec.core.builds.platforms import GPUS
from stagec.core.builds.specs import GpuTarget
from stagec.core.messages.errors import StagecError
from stagec.hardware import autotuning
from stagec.hardware.autotuning import Result
from stagec.pjrt import accelerators, compatibility
from stagec.pjrt.packages import folder

if TYPE_CHECKING:
    from jaxlib.mlir import ir

_RESULTS = "results.textproto"
_SAME = ("name", "compute_capability", "core_count", "l2_cache_size")
"""Properties that identify the device. Drivers report slightly different clocks and bandwidths."""


def prepare_process() -> None:
    """Prepare this process to use devices; must run before jaxlib is imported. CUDA_VISIBLE_DEVICES chooses them."""
    plugins.prepare_process({"TF_CPP_MIN_LOG_LEVEL": "3", "XLA_FLAGS": ""}, ("XLA_", "PJRT_", "TF_"))


def describe_device() -> str:
    """Return XLA's description of the first GPU of this machine, for `descriptions.properties`.

    CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES decides the first one. Raises CannotCompile when there is none, or no
    plugin.
    """
    prepare_process()
    return _describe(devices(next((platform for platform in GPUS if not accelerators.refusal(platform)), "cuda"))[0])


def autotune(module: ir.Module, target: GpuTarget, mesh: Sequence[int]) -> list[Result]:
    """Compile a StableHLO module on devices of this machine and return XLA's fastest choices for them.

    The process must have been prepared by `prepare_process`. mesh: as for `compiler.compile_module`.
    Raises CannotCompile when there are not as many devices as the module needs, when they are others than the
    target's, when a library is missing that XLA times, and when XLA refuses the module.
    """
    count = math.prod(mesh)
    here = devices()
    if len(here) < count:
        what = f"it needs {count} devices, and CUDA finds {len(here)} here"
        raise CannotCompile(what, "topology", "run this on a machine with as many")
    reported = descriptions.properties(_describe(here[0]))
    refuse_another(reported, target)
    missing = [name for name in nvidia.TOOLKIT.libraries if not _loads(name)]
    if missing:
        write = f"install CUDA {nvidia.TOOLKIT.release} and cuDNN 9, and name their folders in LD_LIBRARY_PATH"
        raise CannotCompile(f"XLA times kernels of libraries that are not here: {', '.join(missing)}", "", write)
    nvidia.register_custom_calls()
    form = autotuning.form(compatibility.numbers())
    options = {**target.compiler_options, **form, "xla_gpu_dump_autotune_results_to": _RESULTS}
    with nvidia.scratch():
        plugins.compile_for(nvidia.PLUGIN, here[:count], module, options, load=True, examined=target.examined)
        # XLA writes no file if there is nothing to time.
        text = Path(_RESULTS).read_text("ascii") if Path(_RESULTS).exists() else ""
    try:
        return autotuning.read(text)
    except StagecError as error:
        raise CannotCompile.from_error(error) from error


@functools.cache
def devices(platform: str = "cuda") -> tuple[Any, ...]:
    """Return jaxlib's objects for a vendor's devices of this machine. Raises CannotCompile when there is none."""
    plugins.load(plugins.of(platform))
    from jaxlib import _jax, xla_client

    options: dict[str, str | bool] = {"preallocate": False, **({"platform_name": "ROCM"} if platform == "rocm" else {})}
    try:
        client = xla_client.make_c_api_client(platform, options)
    except _jax.JaxRuntimeError as error:
        driver, device = ("ROCm", "an AMD") if platform == "rocm" else ("CUDA", "an NVIDIA")
        write = f"run this on a machine with {device} device and its driver"
        raise CannotCompile(f"{driver} finds no device here: {error}", write=write) from error
    return tuple(client.local_devices())


def _describe(device: Any) -> str:
    from jaxlib import xla_client

    return str(xla_client.get_topology_for_devices([device]).target_config)


def refuse_another(reported: Mapping[str, Any], target: GpuTarget) -> None:
    """Raise CannotCompile unless the device here is the target's. reported: the result of `descriptions.properties`."""

    def bare(value: object) -> str:  # a driver does not say which features of its architecture code may use
        return str(value).rstrip("af")

    rows = ((key, reported.get(key), target.figures[key]) for key in _SAME)
    others = [f"{key} is {here}, not {wanted}" for key, here, wanted in rows if bare(here) != bare(wanted)]
    if others:
        raise CannotCompile(f"this machine has another device: {', '.join(others)}", "device")


def _loads(library: str) -> bool:
    folders = [folder(package) for package in nvidia.TOOLKIT.folders]  # where the plugin looks too
    if any(folder and (folder / "lib" / library).exists() for folder in folders):
        return True
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
