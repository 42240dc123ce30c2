"""Accelerators of this machine: whether there are any, and a client for them through the PJRT plugin of the platform.

A plugin is a library in a Python package, which is found without being imported. Whether the machine has a device is
asked of the kernel first: libtpu waits or aborts where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stagec.core.refusal import LoadError


class Accelerator(NamedTuple):
    """A platform besides the CPU.

    told: what a person calls its devices.
    nodes: files of the kernel, as patterns below /dev, one of which is there where the machine has a device.
    package, library, distribution: the Python package in whose folder the plugin is, its file, and its wheel.
    pci: vendor and devices by their numbers on the PCI bus, where the files tell too little; "" and none otherwise.
    """

    told: str
    nodes: Sequence[str]
    package: str
    library: str
    distribution: str
    pci: tuple[str, frozenset[str]] = ("", frozenset())


ACCELERATORS: Mapping[str, Accelerator] = {
    "cuda": Accelerator(
        "NVIDIA device", ("nvidia[0-9]*", "dxg"), "jax_plugins.xla_cuda13", "xla_cuda_plugin.so", "jax-cuda13-pjrt"
    ),
    # Other devices have /dev/vfio as well. The numbers are those of jax/_src/hardware_utils.py, from v3 to tpu7x.
    "tpu": Accelerator(
        "TPU",
        ("accel[0-9]*", "vfio/[0-9]*"),
        "libtpu",
        "libtpu.so",
        "libtpu",
        ("0x1ae0", frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})),
    ),
}
_DEVICES = Path("/dev")
_PCI = Path("/sys/bus/pci/devices")


def refusal(platform: str) -> str:
    """Return why this process cannot run executables for `platform`; "" when it may. Loads no library."""
    known = ACCELERATORS.get(platform)
    if known is None:
        return f"this loader has no client for {platform}"
    if not any(any(_DEVICES.glob(pattern)) for pattern in known.nodes):
        return f"this machine has no {known.told}: no {' or '.join(f'{_DEVICES}/{node}' for node in known.nodes)}"
    vendor, numbers = known.pci
    if vendor and not any(_read(slot / "vendor") == vendor and _read(slot / "device") in numbers for slot in _slots()):
        return f"this machine has no {known.told}: none on its PCI bus ({_PCI})"
    if _library(known) is None:
        return f"the plugin for {platform} is not installed: pip install {known.distribution}"
    return ""


def versions(platform: str) -> dict[str, str]:
    """Return the version of the platform's plugin by the name of its wheel; empty where it is not installed."""
    from importlib import metadata

    try:
        name = ACCELERATORS[platform].distribution
        return {name: metadata.version(name)}
    except (KeyError, metadata.PackageNotFoundError):
        return {}


def make_client(platform: str) -> Any:
    """Return a new client for the devices of `platform`: one a process. Raises LoadError ("platform")."""
    unusable = refusal(platform)
    if unusable:
        raise LoadError("platform", unusable)
    from jaxlib import _jax, xla_client

    known = ACCELERATORS[platform]
    try:
        if not _jax.pjrt_plugin_loaded(platform):
            interface = xla_client.load_pjrt_plugin_dynamically(platform, str(_library(known)))
            if platform == "cuda":
                _register_cuda_calls(interface)
        if not _jax.pjrt_plugin_initialized(platform):
            xla_client.initialize_pjrt_plugin(platform)
        # As jax's own backends do (jax/_src/xla_bridge.py): XLA_PYTHON_CLIENT_* say how much memory it takes.
        options = xla_client.generate_pjrt_gpu_plugin_options() if platform == "cuda" else {}
        return xla_client.make_c_api_client(platform, options)
    except Exception as error:  # XLA's status, by version RuntimeError or JaxRuntimeError
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise LoadError("platform", f"{known.distribution} finds no {known.told} it can use: {first}") from error


def _register_cuda_calls(interface: Any) -> None:
    """Make the custom calls callable that the CUDA plugin's second wheel has, as its own `initialize` does with JAX."""
    import functools
    import os

    from jaxlib import gpu_linalg, gpu_prng, gpu_solver, gpu_sparse, plugin_support, xla_client

    extension = plugin_support.import_from_plugin("cuda", "cuda_plugin_extension")
    if extension is None:  # the wheel is not installed: programs without such calls run
        return
    # Kernels of Mosaic are linked with it when they are loaded (jax/experimental/mosaic/gpu/core.py).
    library = Path(str(extension.__file__)).with_name("libmosaic_gpu_runtime.so")
    os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", str(library))
    name = "CUDA"
    xla_client.register_custom_type_handler(name, functools.partial(extension.register_custom_type, interface))
    xla_client.register_custom_call_handler(name, functools.partial(extension.register_custom_call_target, interface))
    for target, value in extension.ffi_types().items():
        xla_client.register_custom_type(target, value, platform=name)
    for target, value in extension.ffi_handlers().items():
        xla_client.register_custom_call_target(target, value, platform=name, api_version=1)
    for module in (gpu_linalg, gpu_prng, gpu_solver, gpu_sparse):
        for target, value, api_version in module.registrations().get(name, ()):
            xla_client.register_custom_call_target(target, value, platform=name, api_version=api_version)


def _slots() -> list[Path]:
    return list(_PCI.iterdir()) if _PCI.is_dir() else []


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _library(known: Accelerator) -> Path | None:
    """Return where the plugin is; None where it is not installed. A folder is found without importing its package."""
    from importlib import util

    try:
        spec = util.find_spec(known.package)
    except ModuleNotFoundError:  # the package around it is missing
        return None
    for place in spec.submodule_search_locations or () if spec else ():
        path = Path(place) / known.library
        if path.is_file():
            return path
    return None
