"""The checked-in NVIDIA devices, by short names."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict

from stagec.core.builds.specs import CudaTarget
from stagec.core.messages.errors import Problem, StagecError, near
from stagec.hardware import cuda_devices, tables
from stagec.hardware.cuda_devices import Device
from stagec.hardware.tables import Entry, Hardware


@functools.cache
def devices() -> Mapping[str, Device]:
    """Return the devices by their short names."""
    return {name: cuda_devices.read(table, "nvidia.toml", name) for name, table in tables.read("cuda").items()}


def device(name: str) -> Device:
    """Return the device of a short name. Raises StagecError with similar names when there is none."""
    if name not in devices():
        write = near(name, devices()) or f"write one of {', '.join(devices())}"
        write += "\nfor another one, write the path of a file that describes it, as stagec describe-device writes it"
        raise StagecError(Problem("", "device", f'unknown device "{name}"', write))
    return devices()[name]


class _NvidiaDevices(Hardware):
    def entries(self) -> list[Entry]:
        rows = []
        for name, device in devices().items():
            table = tables.read("cuda")[name]
            memory, flops = device.device_memory_size, device.bf16_flops
            properties = memory, flops, float(device.memory_bandwidth), device.nvlink_bandwidth or None
            rows.append(Entry(name, "cuda", table["doc"], table["source"], *properties, (name,), (1,)))
        return rows

    def target(self, name: str) -> CudaTarget | None:
        return CudaTarget(name, name, "1x1x1", asdict(devices()[name]), {}) if name in devices() else None

    def names(self) -> list[str]:
        return list(devices())

    def num_devices(self, target: CudaTarget) -> int:
        return cuda_devices.num_devices(target.topology)

    def topologies_with(self, count: int, target: CudaTarget) -> list[str]:
        return [f"1x1x{count}"]


HARDWARE = _NvidiaDevices()
