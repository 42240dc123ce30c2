"""What is AMD's own when XLA compiles for its devices: libraries that XLA's plugin is linked with.

LLVM's compiler, lld and AMD's device libraries are in the plugin, so no program of ROCm's runs. `stubs` stand in for
ROCm's libraries, with which the plugin is linked: XLA asks them for a device, and compiles as without one.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stagec.backends import plugins
from stagec.backends.gpu import descriptions, stubs
from stagec.hardware.gpu_devices import Device
from stagec.pjrt import gpu_calls

PLUGIN = plugins.of("rocm")
PREFIXES: Sequence[str] = (
    "HIP_",
    "ROCR_",
    "ROCM_",
    "HSA_",
    "AMD_",
    "MIOPEN_",
    "HIPBLASLT_",
    "ROCBLAS_",
    "TENSILE_",
    "GPU_",
)
"""Variables that the plugin and ROCm read, besides XLA's."""
ENVIRONMENT: Mapping[str, str] = {"HIP_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": "-1"}
"""A machine with a device must compile as one without, so ROCm shows none."""
# The ROCm and the MIOpen that the plugin was built with.
_ROCM, _MIOPEN = "7.0.0", (3, 5, 0)


def versions() -> dict[str, str]:
    """Return no versions: the plugin has all that makes code."""
    return {}


def target_config(device: Device, miopen: tuple[int, int, int] | None = None) -> str:
    """Return the device as XLA reads it. miopen: the version that kernels were timed with; None if they were not."""
    names = {
        "device_vendor": "Advanced Micro Devices, Inc",
        "platform_version": f"AMDGPU ISA version: {device.compute_capability}",
        "driver_version": _ROCM,
        "runtime_version": _ROCM,
        "compile_time_toolkit_version": _ROCM,
    }
    capability = f'rocm_compute_capability {{ gcn_arch_name: "{device.compute_capability}" }}'
    return descriptions.target_config(device, "ROCM", capability, names, miopen or _MIOPEN)


def in_jax_keys(devices: Sequence[Any]) -> dict[str, bytes]:
    """Return the parts of JAX's cache keys that describe the devices of a topology, by name; none if a build cannot."""
    version = _built_with()
    return plugins.gpus_in_jax_keys(devices, version) if version else {}


@functools.cache
def _built_with() -> str:
    """Return the ROCm that the plugin was built with, as clients for a device say it: only the plugin knows it.

    "" from jax-rocm7-pjrt 0.11.1 on, where clients say the ROCm of their machine.
    """
    with plugins.path(PLUGIN).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        said = re.search(rb"rocm \d{5,6}(?=\0)", content)
        return said[0].decode() if said else ""


@contextlib.contextmanager
def scratch() -> Iterator[None]:
    """Work in an empty folder for a while."""
    with tempfile.TemporaryDirectory(prefix="stagec-") as empty, contextlib.chdir(empty):
        yield


@functools.cache
def register_custom_calls() -> None:
    """Register with XLA the functions that JAX calls on AMD devices: it compiles no other call."""
    load_stubs()
    plugins.register_custom_calls(PLUGIN)


def load_stubs() -> None:
    """Give this process, for good, stubs for the libraries of ROCm's, and for their functions that it does not have."""
    folder = gpu_calls.folder_of(PLUGIN)
    for library in (plugins.path(PLUGIN), *sorted(folder.glob("*.so") if folder else ())):
        stubs.load(library)
