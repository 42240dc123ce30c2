"""NVIDIA devices: those that are checked in, by short names."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict

from stagec.core.builds.specs import CudaTarget
from stagec.core.telling.errors import Problem, StagecError, near
from stagec.hardware import cuda_devices, tables
from stagec.hardware.cuda_devices import Device
from stagec.hardware.tables import Entry


@functools.cache
def devices() -> Mapping[str, Device]:
    """Return the devices by their short names."""
    return {name: cuda_devices.read(table, "nvidia.toml", name) for name, table in tables.read("cuda").items()}


def device(name: str) -> Device:
    """Return the device of a short name. Raises StagecError, which names near ones, when there is none."""
    if name not in devices():
        write = near(name, devices()) or f"write one of {', '.join(devices())}"
        write += "\nfor another one, write the path of a file that describes it, as stagec describe-device writes it"
        raise StagecError(Problem("", "device", f'unknown device "{name}"', write))
    return devices()[name]


def entries() -> list[Entry]:
    """Return what is checked in."""
    rows = []
    for name, device in devices().items():
        table = tables.read("cuda")[name]
        properties = (
            device.device_memory_size,
            device.bf16_flops,
            float(device.memory_bandwidth),
            device.nvlink_bandwidth or None,
        )
        rows.append(Entry(name, "cuda", table["doc"], table["source"], *properties, (name,), (1,)))
    return rows


def target(name: str) -> CudaTarget | None:
    """Return the target of a short name, one device; None when it is not the name of a device."""
    return CudaTarget(name, name, "1x1x1", asdict(devices()[name]), {}) if name in devices() else None


def names() -> list[str]:
    """Return the short names."""
    return list(devices())


def advice(name: str) -> str:
    """Return what to write for a name that is not a target, where it is nearly one; "" otherwise."""
    return ""


def num_devices(target: CudaTarget) -> int | None:
    """Return how many devices a target has."""
    return cuda_devices.num_devices(target.topology)


def topologies_with(count: int, target: CudaTarget) -> list[str]:
    """Return usual topologies that have `count` devices."""
    return [f"1x1x{count}"]


def mesh_problem(target: CudaTarget, name: str, mesh: Mapping[str, int]) -> tuple[str, str] | None:
    """Return None: every mesh lies on them."""
    return None
