"""The virtual drivers for GPUs (cuda.c, hip.c): compile one for a device, and put it where XLA's plugin looks."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from pathlib import Path

from stagec.backends.compilation import CannotCompile
from stagec.backends.gpu import amd
from stagec.core.messages.errors import mistake
from stagec.hardware.gpu_devices import AmdDevice, Device

LIBRARIES = (
    "libcuda.so.1",
    "libnvidia-ml.so.1",
    "libcudnn.so.9",
    *(f"lib{name}.so.{release}" for name in ("cudart", "cublas", "cublasLt") for release in (13, 12)),
)
"""What the driver for NVIDIA devices is at once, under these names."""
MOST_DEVICES = 64
"""How many devices a virtual driver can have."""
_NAME = "stagec_virtual_driver.so"
_BUS = 6144
"""Bits of the bus to the memory. XLA multiplies it and the memory's clock, and looks at neither alone."""
_FLAGS = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")


def install(device: Device, folder: Path) -> None:
    """Compile the driver of a device into `folder`; for NVIDIA, under the names of its libraries.

    Raises StagecError if there is no C compiler: the driver's functions are called by XLA, so they are machine code.
    """
    is_of_amd = isinstance(device, AmdDevice)
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise mistake("a virtual GPU needs a C compiler, and there is none", "apt-get install gcc libc6-dev")
    answers = (_of_amd if is_of_amd else _of_nvidia)(device)
    attributes = ",".join(f"{{{number},{value}}}" for number, value in answers)
    defined = (
        f'-DDEVICE_NAME="{device.name}"',
        f'-DDEVICE_CAPABILITY="{device.compute_capability}"',
        f"-DDEVICE_MEMORY={device.device_memory_size}ull",
        f"-DDEVICE_ATTRIBUTES={attributes}",
        f"-DMOST_DEVICES={MOST_DEVICES}",
    )
    source = Path(__file__).with_name("hip.c" if is_of_amd else "cuda.c")
    command = [compiler, *_FLAGS, *defined, str(source), "-o", str(folder / _NAME)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise mistake(f"{compiler} does not compile the virtual driver: {done.stderr.strip()}")
    for name in () if is_of_amd else LIBRARIES:
        (folder / name).symlink_to(_NAME)


def load(platform: str) -> None:
    """Load the driver of a platform into this process, before JAX is imported. LD_LIBRARY_PATH has its folder.

    JAX's modules for CUDA load NVIDIA's own libraries where wheels have them, by their RPATH, which comes before
    LD_LIBRARY_PATH. The first library of a name is the one that XLA gets. XLA's plugin for AMD devices is linked with
    ROCm's: it gets the driver's functions, and stubs for all others.
    """
    if platform == "rocm":
        ctypes.CDLL(_NAME, ctypes.RTLD_GLOBAL)
        with contextlib.suppress(CannotCompile):  # without the plugin, of which the report tells
            amd.load_stubs()
        return
    for name in LIBRARIES:
        ctypes.CDLL(name)


def _memory_clock(device: Device) -> int:
    return device.memory_bandwidth * 8 // (2 * _BUS * 1000)


def _of_nvidia(device: Device) -> list[tuple[int, int]]:
    """Return what the device answers for each CU_DEVICE_ATTRIBUTE_...; for others, it answers 0."""
    major, minor = device.compute_capability.rstrip("af").split(".")
    return [
        (1, device.threads_per_block_limit),
        (2, device.thread_dim_limit_x),
        (3, device.thread_dim_limit_y),
        (4, device.thread_dim_limit_z),
        (5, device.block_dim_limit_x),
        (6, device.block_dim_limit_y),
        (7, device.block_dim_limit_z),
        (8, device.shared_memory_per_block),
        (10, device.threads_per_warp),
        (12, device.registers_per_block_limit),
        (13, round(device.clock_rate_ghz * 1e6)),
        (16, device.core_count),
        (32, 1),  # error correction
        (36, _memory_clock(device)),
        (37, _BUS),
        (38, device.l2_cache_size),
        (39, device.threads_per_core_limit),
        (41, 1),  # one space of addresses for host and device
        (75, int(major)),
        (76, int(minor)),
        (81, device.shared_memory_per_core),
        (82, device.registers_per_core_limit),
        (97, device.shared_memory_per_block_optin),
        (102, 1),  # addresses apart from memory
    ]


def _of_amd(device: Device) -> list[tuple[int, int]]:
    """Return what the device answers for each hipDeviceAttribute_t; for others, it answers 0."""
    return [
        (0, 1),  # error correction
        (5, round(device.clock_rate_ghz * 1e6)),
        (19, device.l2_cache_size),
        (26, device.thread_dim_limit_x),
        (27, device.thread_dim_limit_y),
        (28, device.thread_dim_limit_z),
        (29, device.block_dim_limit_x),
        (30, device.block_dim_limit_y),
        (31, device.block_dim_limit_z),
        (56, device.threads_per_block_limit),
        (57, device.threads_per_core_limit),
        (59, _BUS),
        (60, _memory_clock(device)),
        (63, device.core_count),
        (71, device.registers_per_block_limit),
        (72, device.registers_per_core_limit),
        (74, device.shared_memory_per_block),
        (85, 1),  # one space of addresses for host and device
        (87, device.threads_per_warp),
        (10002, device.shared_memory_per_core),
    ]
