"""The devices of this process: jaxlib's clients, one for each platform, or for each number of CPU devices.

A client is made once, at the first use, and lives as long as the process. Where JAX has made one by then, it is JAX's:
a second one would have its own threads and, on an accelerator, its own memory, and arrays would have to be copied.
Where several processes run together (`pjrt.distributed`, or `jax.distributed` in a process with JAX), a client has the
devices of all of them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxlib import _jax, xla_client

from stagec.core.messages.refusal import LoadError
from stagec.pjrt import turns

if TYPE_CHECKING:
    from stagec.pjrt.accelerators import Job

# Several threads may ask first: two clients for the same devices would not share arrays.
_LOCK = threading.Lock()
_CLIENTS: dict[str | int, Any] = {}


_JOB: list[Job] = []
"""The group that this process has joined; empty: it runs alone, or JAX has joined."""

_EVERYWHERE = "cpu of all processes"
"""The key of its client of CPUs."""

MOST_CPU_DEVICES = 4096
"""The most devices of this machine's CPU: they take 6 seconds and 0.5 GB, and 16,384 would take minutes."""


def too_many(num_devices: int) -> str:
    """Return why a CPU cannot become `num_devices` devices; "" if it can."""
    if num_devices <= MOST_CPU_DEVICES:
        return ""
    return f"{num_devices:,} devices are asked for, and a machine's CPU becomes {MOST_CPU_DEVICES:,} at most"


def cpu_client(num_devices: int, asynchronous: bool = True) -> _jax.Client:
    """Return the process's client with that many CPU devices; JAX's may have more.

    One process has one pool of threads for everything on one device. asynchronous: whether a call returns before its
    results are there; only for who asks first. Raises LoadError ("device-count").
    """
    refusal = too_many(num_devices)
    if refusal:
        raise LoadError("device-count", refusal)

    def make() -> _jax.Client:
        known = of_jax("cpu")
        if len(known) >= num_devices:
            return known[0].client
        return xla_client.make_cpu_client(asynchronous=asynchronous, num_devices=num_devices)

    return _once(num_devices, make)


def of_jax(platform: str, start: bool = False) -> list[_jax.Device]:
    """Return JAX's devices of a platform, if this process has imported JAX and JAX has started; else none.

    JAX starts at its first array, or at `jax.devices()`. start: start JAX here, if the process has imported it.
    """
    bridge, jax = sys.modules.get("jax._src.xla_bridge"), sys.modules.get("jax")
    # Both may be in the middle of their import, in another thread.
    has_started, local_devices = getattr(bridge, "backends_are_initialized", bool), getattr(jax, "local_devices", None)
    if local_devices is None or not (start or has_started()):
        return []
    try:
        return list(local_devices(backend=platform))
    except RuntimeError:  # JAX has no such platform
        return []


def devices(platform: str = "cpu", count: int | None = None) -> list[_jax.Device]:
    """Return devices that functions can run on.

    As `jax.devices` does (https://docs.jax.dev/en/latest/_autosummary/jax.devices.html).

    platform: "cpu", "cuda", "rocm" or "tpu".
    count: how many. The machine's CPU becomes as many devices as you ask for; None means one. A function
        that runs on one of 2 CPU devices copies an array that is on one of 4. For accelerators, None means all.
        In a process that runs together with others (`distributed`), None means the devices of all processes, and a
        number means devices of this process if it has that many, and otherwise the first ones of all processes.

    If JAX has started before the first use of a platform here, they are JAX's devices.

    Raises LoadError ("platform", "device-count") if this process has no such devices, or fewer.

    >>> stagec.devices("cpu", 2)
    [CpuDevice(id=0), CpuDevice(id=1)]
    """
    client = _of_all_processes(platform)
    if client is not None:
        return _of_several(client, platform, count)
    if platform == "cpu":
        return list(cpu_client(count or 1).local_devices())[: count or 1]
    local = list(_of_accelerators(platform).local_devices())
    if count is not None and count > len(local):
        raise LoadError("device-count", f"{count} devices are asked for, this process has {len(local)} of {platform}")
    return local[:count]


def own_device() -> _jax.Device:
    """Return the default CPU device of this process for arrays."""
    client = _of_all_processes("cpu") or cpu_client(1)
    device: _jax.Device = client.local_devices()[0]
    return device


def join(job: Job, cpu: _jax.Client) -> None:
    """Use the devices of all processes of `job` from now on. cpu: the client of their CPUs."""
    _JOB.append(job)
    _CLIENTS[_EVERYWHERE] = cpu


def in_use() -> str:
    """Return the platform of a client that this process has already; "" if there is none."""
    return next(("cpu" if isinstance(key, int) else key for key in _CLIENTS), "")


def jax_joined() -> bool:
    """Whether this process has called `jax.distributed.initialize`."""
    distributed = getattr(sys.modules.get("jax"), "distributed", None)  # it may be in the middle of its import
    return distributed is not None and bool(distributed.is_initialized())


def are_of_several_processes() -> bool:
    """Whether `devices` lists those of several processes."""
    return bool(_JOB) or jax_joined()


def num_processes(of: Sequence[_jax.Device]) -> int:
    """Return the number of processes with these devices."""
    return len({device.process_index for device in of})


def _of_all_processes(platform: str) -> Any:
    """Return the client that has the devices of several processes; None if this process runs alone."""
    if _JOB:
        return _CLIENTS[_EVERYWHERE] if platform == "cpu" else _of_accelerators(platform)
    if jax_joined():
        try:
            return sys.modules["jax"].devices(platform)[0].client
        except RuntimeError as error:
            raise LoadError("platform", f"JAX has no devices of {platform} in this process: {error}") from error
    return None


def _of_several(client: Any, platform: str, count: int | None) -> list[_jax.Device]:
    own, every = list(client.local_devices()), list(client.devices())
    if count is None or count > len(own):
        if count is not None and count > len(every):
            what = (
                f"{count} devices are asked for, the {num_processes(every)} processes have {len(every)} of {platform}"
            )
            raise LoadError("device-count", what)
        return every[:count]
    return own[:count]


def _of_accelerators(platform: str) -> Any:
    from stagec.pjrt import accelerators  # most processes run on the CPU

    def make() -> Any:
        # A process loads a plugin once: JAX would find no device if it started after this.
        known = of_jax(platform, start=True)
        return known[0].client if known else accelerators.make_client(platform, *_JOB)

    return _once(platform, make)


def platform_of(device: _jax.Device) -> str:
    """Return the platform of a device by the name that manifests have."""
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in device.client.platform_version else "cuda"


def compile_options(ids: Sequence[int], replicated: bool = False) -> xla_client.CompileOptions:
    """Return XLA's options for a program of one replica, with a partition on each of these devices, in their order.

    replicated: for a program that each of the devices runs by itself.
    """
    assigned = np.array([ids], np.int32)
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = (len(ids), 1) if replicated else (1, len(ids))
    options.device_assignment = xla_client.DeviceAssignment.create(assigned.T if replicated else assigned)
    return options


def _once(key: str | int, make: Callable[[], Any]) -> Any:
    made = _CLIENTS.get(key)
    if made is None:
        with turns.for_this_machine(), _LOCK:
            made = _CLIENTS.get(key)
            if made is None:
                made = _CLIENTS[key] = make()
    return made
