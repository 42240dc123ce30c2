"""NVIDIA devices, described as XLA must know them when it compiles without one.

XLA reads tile sizes, occupancy and cost from these: a missing one stops XLA with a signal or makes other code,
so a description is whole or it is refused here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from stagec.core.messages.errors import Problem, StagecError, nearest, show

CAPABILITY = re.compile(r"(\d+)\.(\d)([af]?)")
"""A compute capability: major, minor, and the features that only this architecture or family has."""
REMARKS = ("doc", "source")
"""Texts for readers that a description may have besides the fields of `Device`."""
_TOPOLOGY = re.compile(r"[1-9]\d*x[1-9]\d*x[1-9]\d*")


@dataclass(frozen=True)
class Device:
    """One device.

    name: NVIDIA's. compute_capability: "8.0"; "9.0a" and "10.0a" with what only that architecture has.
    core_count: multiprocessors. clock_rate_ghz: their highest clock. fpus_per_core: float32 units of each.
    device_memory_size, l2_cache_size: bytes. memory_bandwidth: bytes a second.
    shared_memory_per_core, shared_memory_per_block, shared_memory_per_block_optin: bytes.
    threads_per_core_limit and the other limits: as CUDA's device attributes of like names.
    active_links: NVLink links; 0 without. pcie_bandwidth: bytes a second to the host.
    bf16_flops: peak bfloat16 operations a second, dense; it is for estimates and changes no code, and so are
    nvlink_bandwidth: bytes a second of all NVLink links of a device, in one direction; 0 if there are none, or it is
    not known.
    network_bandwidth: bytes a second of a device to other hosts, in one direction; 0 if it is not known.
    """

    name: str
    compute_capability: str
    core_count: int
    clock_rate_ghz: float
    fpus_per_core: int
    device_memory_size: int
    memory_bandwidth: int
    l2_cache_size: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    threads_per_core_limit: int
    bf16_flops: float
    active_links: int
    pcie_bandwidth: int
    nvlink_bandwidth: float = 0.0
    network_bandwidth: float = 0.0
    # The same on every device since 2017.
    shared_memory_per_block: int = 49152
    threads_per_block_limit: int = 1024
    threads_per_warp: int = 32
    registers_per_core_limit: int = 65536
    registers_per_block_limit: int = 65536
    block_dim_limit_x: int = 2147483647
    block_dim_limit_y: int = 65535
    block_dim_limit_z: int = 65535
    thread_dim_limit_x: int = 1024
    thread_dim_limit_y: int = 1024
    thread_dim_limit_z: int = 64


_KINDS = {field.name: {"str": str, "int": int, "float": float}[str(field.type)] for field in fields(Device)}
_SAY = {str: "a string", int: "an integer", float: "a number"}


def read(description: Mapping[str, Any], file: str = "", key: str = "") -> Device:
    """Read a description whose keys are the fields of `Device`; those that have a default may be left out.

    file, key: its place, for messages; "" for the key when it is the whole file.
    Raises StagecError with every field that is missing, unknown, of another type or not positive.
    """
    problems = [
        Problem(file, ".".join(filter(None, (key, field))), what, write) for field, what, write in _faults(description)
    ]
    if problems:
        raise StagecError(*problems)
    kept = {name: value for name, value in description.items() if name not in REMARKS}
    # A whole number may be written for any other; equal devices have equal properties.
    return Device(**{name: _KINDS[name](value) for name, value in kept.items()})


def _faults(description: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Field, its fault, the correction."""
    for field in fields(Device):
        if field.default is MISSING and field.name not in description:
            what = "missing key: without it XLA stops, or makes code for another device"
            yield field.name, what, _HINTS.get(field.name, "")
    for name, value in description.items():
        kind = _KINDS.get(name)
        if name in REMARKS:
            if not isinstance(value, str):
                yield name, f"{show(value)} is not a string", ""
        elif kind is None:
            yield name, "unknown key", nearest(name, _KINDS)
        elif isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            yield name, f"{show(value)} is not {_SAY[kind]}", ""
        elif isinstance(value, int | float) and not 0 < value < math.inf and (value or name not in _MAYBE_NONE):
            yield name, f"{value} is not positive", ""
        elif name == "compute_capability" and not CAPABILITY.fullmatch(str(value)):
            write = 'write for example "8.9", or "9.0a" for all of an H100'
            yield name, f"{show(value)} is not a compute capability", write


_MAYBE_NONE = ("active_links", "nvlink_bandwidth", "network_bandwidth")
_HINTS = {
    "bf16_flops": "write the peak of dense bfloat16 operations a second, from the device's data sheet",
    "active_links": "write 0 for a device without NVLink",
}


def num_devices(topology: str) -> int:
    """Return the number of devices of a topology; see `shape`."""
    return math.prod(shape(topology))


def shape(topology: str) -> tuple[int, int, int]:
    """Read a topology: "1x2x8" is one partition of two hosts with eight devices each.

    NVLink connects the devices of a partition. Raises StagecError when the string is something else.
    """
    if not _TOPOLOGY.fullmatch(topology):
        write = "write partitions x hosts x devices of each host, for example 1x1x1 or 1x2x8"
        raise StagecError(Problem("", "topology", f'"{topology}" is not a topology of NVIDIA devices', write))
    partitions, hosts, devices = map(int, topology.split("x"))
    return partitions, hosts, devices
