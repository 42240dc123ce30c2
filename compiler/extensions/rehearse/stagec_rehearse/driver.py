"""The virtual driver for NVIDIA devices (driver.c): compile it for a device, and put it where XLA's plugin looks."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

from stagec.core.messages.errors import mistake
from stagec.hardware.gpu_devices import Device

LIBRARIES = (
    "libcuda.so.1",
    "libcudart.so.13",
    "libnvidia-ml.so.1",
    "libcublas.so.13",
    "libcublasLt.so.13",
    "libcudnn.so.9",
)
"""What the driver is at once, under these names."""
_BUS = 6144
"""Bits of the bus to the memory. XLA multiplies it and the memory's clock, and looks at neither alone."""
_FLAGS = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")


def install(device: Device, folder: Path) -> None:
    """Compile the driver of a device into `folder`, under the names of NVIDIA's libraries.

    Raises StagecError if there is no C compiler: the driver's functions are called by XLA, so they are machine code.
    """
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise mistake("a virtual NVIDIA device needs a C compiler, and there is none", "apt-get install gcc libc6-dev")
    library = folder / "stagec_virtual_driver.so"
    attributes = ",".join(f"{{{number},{value}}}" for number, value in _attributes(device))
    defined = (
        f'-DDEVICE_NAME="{device.name}"',
        f"-DDEVICE_MEMORY={device.device_memory_size}ull",
        f"-DDEVICE_ATTRIBUTES={attributes}",
    )
    source = Path(__file__).with_name("driver.c")
    command = [compiler, *_FLAGS, *defined, str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise mistake(f"{compiler} does not compile the virtual driver: {done.stderr.strip()}")
    for name in LIBRARIES:
        (folder / name).symlink_to(library.name)


def load() -> None:
    """Load the driver into this process, before JAX is imported.

    JAX's modules for CUDA load NVIDIA's own libraries where wheels have them, by their RPATH, which comes before
    LD_LIBRARY_PATH. The first library of a name is the one that XLA gets.
    """
    for name in LIBRARIES:
        ctypes.CDLL(name)


def _attributes(device: Device) -> list[tuple[int, int]]:
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
        (36, device.memory_bandwidth * 8 // (2 * _BUS * 1000)),
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
