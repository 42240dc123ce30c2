"""Accelerators of this machine: whether there are any, and a client for them through the PJRT plugin of the platform.

A plugin is a library in a Python package, and stagec finds it without an import. It asks the kernel for a device first,
because libtpu waits or aborts if there is none.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stagec.core.builds.platforms import GPUS, PLATFORMS
from stagec.core.messages.refusal import LoadError
from stagec.pjrt.packages import library

if TYPE_CHECKING:
    from jaxlib import _jax

_DEVICES = Path("/dev")
_PCI = Path("/sys/bus/pci/devices")


class Job(NamedTuple):
    """The processes that run together, and the number of this one.

    runtime: jaxlib's client of their coordinator.
    """

    runtime: _jax.DistributedRuntimeClient
    process_id: int
    num_processes: int


def refusal(platform: str) -> str:
    """Return why this process cannot run executables for `platform`; "" when it may. Loads no library."""
    known = PLATFORMS.get(platform)
    plugin = known.plugin if known else None
    if known is None or plugin is None:
        return f"this loader has no client for {platform}"
    if not any(any(_DEVICES.glob(pattern)) for pattern in known.nodes):
        return f"this machine has no {known.device}: no {' or '.join(f'{_DEVICES}/{node}' for node in known.nodes)}"
    vendor, numbers = known.pci
    slots = _PCI.glob("*")
    if vendor and not any(_read(slot / "vendor") == vendor and _read(slot / "device") in numbers for slot in slots):
        return f"this machine has no {known.device}: none on its PCI bus ({_PCI})"
    if library(plugin) is None:
        return f"the plugin for {platform} is not installed: pip install {plugin.distribution}"
    return ""


def versions(platform: str) -> dict[str, str]:
    """Return the version of the platform's plugin by the name of its wheel; empty if it is not installed."""
    from importlib import metadata

    known = PLATFORMS.get(platform)
    if known is None or known.plugin is None:
        return {}
    name = known.plugin.distribution
    try:
        return {name: metadata.version(name)}
    except metadata.PackageNotFoundError:
        return {}


def make_client(platform: str, job: Job | None = None) -> Any:
    """Return a new client for the devices of `platform`: one a process. Raises LoadError ("platform").

    job: the processes that this one runs together with; None: it runs alone.
    """
    unusable = refusal(platform)
    if unusable:
        raise LoadError("platform", unusable)
    from jaxlib import _jax, xla_client

    from stagec.pjrt import compatibility

    known = PLATFORMS[platform]
    assert known.plugin is not None
    try:
        if not _jax.pjrt_plugin_loaded(platform):
            interface = xla_client.load_pjrt_plugin_dynamically(platform, str(library(known.plugin)))
            if platform in GPUS:
                from stagec.pjrt import gpu_calls

                gpu_calls.register(known.plugin, interface)
        if not _jax.pjrt_plugin_initialized(platform):
            xla_client.initialize_pjrt_plugin(platform)
    except Exception as error:  # XLA's status, by version RuntimeError or JaxRuntimeError
        named = " ".join(*versions(platform).items() or [(known.plugin.distribution,)])
        what = f"{named} cannot be used with jaxlib {compatibility.version()} on this machine"
        raise LoadError("platform", f"{what}: {_first_line(error)}") from error
    try:
        # As jax's own backends do (jax/_src/xla_bridge.py): XLA_PYTHON_CLIENT_* say how much memory it takes.
        options = {**xla_client.generate_pjrt_gpu_plugin_options()} if platform in GPUS else {}
        if platform == "rocm":
            options["platform_name"] = "ROCM"
        if job is None:
            return xla_client.make_c_api_client(platform, options)
        options = {**options, "node_id": job.process_id, "num_nodes": job.num_processes}
        return xla_client.make_c_api_client(platform, options, job.runtime)
    except Exception as error:  # XLA's status, by version RuntimeError or JaxRuntimeError
        what = f"{known.plugin.distribution} finds no {known.device} it can use"
        raise LoadError("platform", f"{what}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
