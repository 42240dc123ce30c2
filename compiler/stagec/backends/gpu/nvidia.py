"""What is NVIDIA's own when XLA compiles for its devices: CUDA's files, versions, and the functions of custom calls.

XLA runs NVIDIA's ptxas, which needs no device. XLA stores the folder of CUDA as it was given, by default
./cuda_sdk_lib: it is there, as a link in a scratch folder that is the current one while XLA compiles. So no path
enters, and no other CUDA of the machine is found first.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from stagec.backends import plugins
from stagec.backends.compilation import CannotCompile
from stagec.backends.gpu import descriptions
from stagec.hardware.gpu_devices import Device, NvidiaDevice
from stagec.pjrt import gpu_calls
from stagec.pjrt.gpu_calls import MOSAIC
from stagec.pjrt.packages import folder

PLUGIN = plugins.of("cuda")
PREFIXES: Sequence[str] = ("CUDA_", "MOSAIC_", "NVIDIA_")
"""Variables that the plugin reads, besides XLA's."""
ENVIRONMENT: Mapping[str, str] = {"CUDA_VISIBLE_DEVICES": ""}
"""A machine with a device must compile as one without, so XLA sees none."""


@dataclass(frozen=True)
class Toolkit:
    """A release of CUDA, which the plugin was built with.

    folder: the package with its files. tools: those that XLA needs, below it. wheels: which bring them, with what fits.
    libraries: with kernels that XLA times beside its own. folders: the packages that have them.
    cuda, cudnn, cub: XLA refuses to load an executable where a library is older than these. They are the oldest that
        the plugin works with: the CUDA that it was built with, the cuDNN that its wheel requires, the CUB in that CUDA.
    """

    release: int
    folder: str
    tools: Sequence[str]
    wheels: Mapping[str, str]
    libraries: Sequence[str]
    folders: Sequence[str]
    cuda: str
    cudnn: tuple[int, int, int]
    cub: str


TOOLKITS = {
    "jax-cuda13-pjrt": Toolkit(
        13,
        "nvidia.cu13",
        ("bin/ptxas", "bin/nvlink", "nvvm/libdevice/libdevice.10.bc"),
        {"nvidia-cuda-nvcc": "13.0.*", "nvidia-nvvm": "13.0.*"},
        ("libcublas.so.13", "libcublasLt.so.13", "libcudnn.so.9"),
        ("nvidia.cu13", "nvidia.cudnn"),
        "13.0.0",
        (9, 12, 0),
        "3.0.0",
    ),
    "jax-cuda12-pjrt": Toolkit(
        12,
        "nvidia.cuda_nvcc",
        ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc"),
        {"nvidia-cuda-nvcc-cu12": "12.9.*"},
        ("libcublas.so.12", "libcublasLt.so.12", "libcudnn.so.9"),
        ("nvidia.cublas", "nvidia.cudnn"),
        "12.9.0",
        (9, 8, 0),
        "2.8.0",
    ),
}
"""By the plugin's wheel."""
TOOLKIT = TOOLKITS[PLUGIN.distribution]
"""That of the plugin that is installed."""
_SDK = "cuda_sdk_lib"
"""The value of XLA's option xla_gpu_cuda_data_dir, when none is given."""


def versions() -> dict[str, str]:
    """Return the versions of the packages that make code besides the plugin. Raises CannotCompile if one is missing."""
    _toolkit()
    # ptxas and libdevice make the machine code, so their versions are inputs of it, like the plugin's.
    return {name: metadata.version(name) for name in TOOLKIT.wheels}


def target_config(device: Device, cudnn: tuple[int, int, int] | None = None) -> str:
    """Return the device as XLA reads it. cudnn: the version that kernels were timed with; None if they were not."""
    match = NvidiaDevice.CAPABILITY.fullmatch(device.compute_capability)
    assert match is not None
    capability = f"major: {match[1]} minor: {match[2]} feature_extension: {descriptions.FEATURES[match[3]]}"
    names = {
        "device_vendor": "NVIDIA Corporation",
        "platform_version": f"Compute Capability {device.compute_capability}",
        "driver_version": TOOLKIT.cuda,
        "runtime_version": TOOLKIT.cuda,
        "compile_time_toolkit_version": TOOLKIT.cuda,
        "cub_version": TOOLKIT.cub,
    }
    # XLA finds results by the version of cuDNN too; the executable asks for that version when it is loaded.
    dnn = cudnn or TOOLKIT.cudnn
    return descriptions.target_config(device, "CUDA", f"cuda_compute_capability {{ {capability} }}", names, dnn)


def in_jax_keys(devices: Sequence[Any]) -> dict[str, bytes]:
    """Return the parts of JAX's cache keys that describe the devices of a topology, by name."""
    from jaxlib import plugin_support

    versions = plugin_support.import_from_plugin("cuda", "_versions")
    return plugins.gpus_in_jax_keys(devices, f"cuda {versions.cuda_runtime_build_version()}" if versions else "cuda")


def _toolkit() -> Path:
    """Return the folder of CUDA that XLA is to use. Raises CannotCompile when a part of it is missing."""
    where = folder(TOOLKIT.folder)
    missing = [name for name in TOOLKIT.tools if where is None or not (where / name).exists()]
    if where is None or missing:
        what = f"XLA needs {', '.join(missing)} of CUDA {TOOLKIT.release}, which are not installed"
        write = plugins.to_lock("cuda", " and ".join(f"{name}=={fits}" for name, fits in TOOLKIT.wheels.items()))
        raise CannotCompile(what, "platform", write)
    # XLA would silently take another CUDA of the machine.
    if not os.access(where / TOOLKIT.tools[0], os.X_OK):
        raise CannotCompile(f"{where / TOOLKIT.tools[0]} may not be run here", "platform")
    return where


@contextlib.contextmanager
def scratch() -> Iterator[None]:
    """Work in an empty folder for a while, in which XLA finds CUDA and nothing else.

    Mosaic, which is in XLA's plugin, reads from variables where CUDA and its own library are.
    """
    # XLA stores the path of CUDA in an executable. A relative one, through a link in an empty folder, keeps the
    # machine's out of the bytes.
    links = {_SDK: _toolkit()}
    if (extension := gpu_calls.folder_of(PLUGIN)) is not None:
        links[MOSAIC] = extension / MOSAIC
    variables = {"CUDA_ROOT": f"./{_SDK}", "MOSAIC_GPU_RUNTIME_LIB_PATH": f"./{MOSAIC}"}
    with tempfile.TemporaryDirectory(prefix="stagec-") as empty:
        for name, path in links.items():
            (Path(empty) / name).symlink_to(path.absolute())
        os.environ.update(variables)
        try:
            with contextlib.chdir(empty):
                yield
        finally:
            for name in variables:
                del os.environ[name]


@functools.cache
def register_custom_calls() -> None:
    """Register with XLA the functions that JAX calls on NVIDIA devices: it compiles no other call."""
    plugins.register_custom_calls(PLUGIN)
