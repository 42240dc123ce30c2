"""GPUs of NVIDIA and AMD, described as XLA must know them when it compiles without one.

XLA reads tile sizes, occupancy and cost from these: a missing one stops XLA with a signal or makes other code,
so a description is whole or it is refused here.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar, Literal

from stagec.core.builds.platforms import PLATFORMS
from stagec.core.builds.specs import GpuTarget
from stagec.core.messages.errors import Problem, StagecError, near, nearest, show
from stagec.hardware import tables
from stagec.hardware.tables import Entry, Hardware

REMARKS = ("doc", "source")
"""Texts for readers that a description may have besides the fields of `Device`."""
_TOPOLOGY = re.compile(r"[1-9]\d*x[1-9]\d*x[1-9]\d*")


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, of any vendor.

    name: the vendor's. compute_capability: what its code may use, as JAX has it.
    core_count: multiprocessors. clock_rate_ghz: their highest clock. fpus_per_core: float32 units of each.
    device_memory_size, l2_cache_size: bytes. memory_bandwidth: bytes a second.
    shared_memory_per_core, shared_memory_per_block, shared_memory_per_block_optin: bytes.
    threads_per_core_limit and the other limits: as CUDA's and HIP's device attributes of like names.
    active_links: links between devices; 0 without. pcie_bandwidth: bytes a second to the host.
    bf16_flops: peak bfloat16 operations a second, dense; it is for estimates and changes no code, and so are the
    bandwidths of links.
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
    network_bandwidth: float = 0.0
    shared_memory_per_block: int
    threads_per_block_limit: int = 1024
    threads_per_warp: int
    registers_per_core_limit: int = 65536
    registers_per_block_limit: int = 65536
    block_dim_limit_x: int = 2147483647
    block_dim_limit_y: int
    block_dim_limit_z: int
    thread_dim_limit_x: int = 1024
    thread_dim_limit_y: int = 1024
    thread_dim_limit_z: int

    CAPABILITY: ClassVar[re.Pattern[str]]
    """Every compute capability."""
    EXAMPLE: ClassVar[str]
    """What to write for one."""
    LINKS: ClassVar[str]
    """Name of the links between devices."""

    @property
    def f32_flops(self) -> float:
        """Peak float32 operations a second of its `fpus_per_core`."""
        return self.core_count * self.fpus_per_core * 2 * self.clock_rate_ghz * 1e9

    @property
    def links_bandwidth(self) -> float:
        """Bytes a second of all links between devices, in one direction; 0 if there are none, or it is not known."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class NvidiaDevice(Device):
    """A device of NVIDIA's.

    compute_capability: "8.0"; "9.0a" and "10.0a" with what only that architecture has.
    nvlink_bandwidth: bytes a second of all NVLink links of a device, in one direction; 0 as of `links_bandwidth`.
    """

    nvlink_bandwidth: float = 0.0
    # The same on every device since 2017.
    shared_memory_per_block: int = 49152
    threads_per_warp: int = 32
    block_dim_limit_y: int = 65535
    block_dim_limit_z: int = 65535
    thread_dim_limit_z: int = 64

    CAPABILITY = re.compile(r"(\d+)\.(\d)([af]?)")  # major, minor, and features of only this architecture or family
    EXAMPLE = 'write for example "8.9", or "9.0a" for all of an H100'
    LINKS = "NVLink"

    @property
    def links_bandwidth(self) -> float:
        """As of `Device`."""
        return self.nvlink_bandwidth


@dataclass(frozen=True, kw_only=True)
class AmdDevice(Device):
    """A device of AMD's.

    compute_capability: LLVM's name of the processor, with its features, as `rocminfo` prints it: without
    "amdgcn-amd-amdhsa--". A wavefront has threads_per_warp threads.
    infinity_fabric_bandwidth: bytes a second of all links of a device, in one direction; 0 as of `links_bandwidth`.
    """

    infinity_fabric_bandwidth: float = 0.0
    # The same on every device since 2020.
    shared_memory_per_block: int = 65536
    block_dim_limit_y: int = 65536
    block_dim_limit_z: int = 65536
    thread_dim_limit_z: int = 1024

    CAPABILITY = re.compile(r"(gfx[0-9a-f]{3,5})((?::(?:sramecc|xnack)[+-])*)")
    EXAMPLE = 'write for example "gfx942:sramecc+:xnack-", as rocminfo prints it'
    LINKS = "Infinity Fabric"

    @property
    def f32_flops(self) -> float:
        """As of `Device`. RDNA 3 and 4 issue two operations at a time, which XLA does not count."""
        return super().f32_flops * (2 if self.compute_capability.startswith(("gfx11", "gfx120")) else 1)

    @property
    def links_bandwidth(self) -> float:
        """As of `Device`."""
        return self.infinity_fabric_bandwidth


VENDORS: Mapping[str, type[NvidiaDevice | AmdDevice]] = {"cuda": NvidiaDevice, "rocm": AmdDevice}
"""By platform."""
_SAY = {str: "a string", int: "an integer", float: "a number"}


def _kinds(vendor: type[Device]) -> dict[str, Any]:
    return {field.name: {"str": str, "int": int, "float": float}[str(field.type)] for field in fields(vendor)}


def read(platform: str, description: Mapping[str, Any], file: str = "", key: str = "") -> Device:
    """Read a description whose keys are the fields of the platform's `Device`; those with a default may be left out.

    file, key: its place, for messages; "" for the key when it is the whole file.
    Raises StagecError with every field that is missing, unknown, of another type or not positive.
    """
    vendor = VENDORS[platform]
    problems = [
        Problem(file, ".".join(filter(None, (key, field))), what, write)
        for field, what, write in _faults(vendor, description)
    ]
    if problems:
        raise StagecError(*problems)
    kept = {name: value for name, value in description.items() if name not in REMARKS}
    # A whole number may be written for any other; equal devices have equal properties.
    kinds = _kinds(vendor)
    return vendor(**{name: kinds[name](value) for name, value in kept.items()})


def _faults(vendor: type[Device], description: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Field, its fault, the correction."""
    kinds = _kinds(vendor)
    hints = {**_HINTS, "active_links": f"write 0 for a device without {vendor.LINKS}"}
    for field in fields(vendor):
        if field.default is MISSING and field.name not in description:
            what = "missing key: without it XLA stops, or makes code for another device"
            yield field.name, what, hints.get(field.name, "")
    for name, value in description.items():
        kind = kinds.get(name)
        if name in REMARKS:
            if not isinstance(value, str):
                yield name, f"{show(value)} is not a string", ""
        elif kind is None:
            yield name, "unknown key", nearest(name, kinds)
        elif isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            yield name, f"{show(value)} is not {_SAY[kind]}", ""
        elif isinstance(value, int | float) and not 0 < value < math.inf and (value or name not in _MAYBE_NONE):
            yield name, f"{value} is not positive", ""
        elif name == "compute_capability" and not vendor.CAPABILITY.fullmatch(str(value)):
            yield name, f"{show(value)} is not a compute capability", vendor.EXAMPLE


_MAYBE_NONE = ("active_links", "nvlink_bandwidth", "infinity_fabric_bandwidth", "network_bandwidth")
_HINTS = {"bf16_flops": "write the peak of dense bfloat16 operations a second, from the device's data sheet"}


@functools.cache
def _devices(platform: str) -> Mapping[str, Device]:
    catalog = PLATFORMS[platform].catalog
    return {name: read(platform, row, catalog, name) for name, row in tables.read(platform).items()}


class GpuHardware(Hardware):
    """The checked-in devices of a platform's vendor."""

    def __init__(self, platform: Literal["cuda", "rocm"]) -> None:
        self.platform: Literal["cuda", "rocm"] = platform

    def devices(self) -> Mapping[str, Device]:
        """Return the devices by their short names."""
        return _devices(self.platform)

    def device(self, name: str) -> Device:
        """Return the device of a short name. Raises StagecError with similar names when there is none."""
        if name not in self.devices():
            write = near(name, self.devices()) or f"write one of {', '.join(self.devices())}"
            write += (
                "\nfor another one, write the path of a file that describes it, as stagec describe-device writes it"
            )
            raise StagecError(Problem("", "device", f'unknown device "{name}"', write))
        return self.devices()[name]

    def entries(self) -> list[Entry]:
        """As of `Hardware`."""
        rows = []
        for name, device in self.devices().items():
            table = tables.read(self.platform)[name]
            memory, flops = device.device_memory_size, device.bf16_flops
            properties = memory, flops, float(device.memory_bandwidth), device.links_bandwidth or None
            rows.append(Entry(name, self.platform, table["doc"], table["source"], *properties, (name,), (1,)))
        return rows

    def target(self, name: str) -> GpuTarget | None:
        """As of `Hardware`."""
        if name not in self.devices():
            return None
        return GpuTarget(name, name, "1x1x1", asdict(self.devices()[name]), {}, platform=self.platform)

    def names(self) -> list[str]:
        """As of `Hardware`."""
        return list(self.devices())

    def num_devices(self, target: GpuTarget) -> int:
        """As of `Hardware`."""
        return num_devices(target.topology)

    def topologies_with(self, count: int, target: GpuTarget) -> list[str]:
        """As of `Hardware`."""
        return [f"1x1x{count}"]


def num_devices(topology: str) -> int:
    """Return the number of devices of a topology; see `shape`."""
    return math.prod(shape(topology))


def shape(topology: str) -> tuple[int, int, int]:
    """Read a topology: "1x2x8" is one partition of two hosts with eight devices each.

    NVLink or Infinity Fabric connects the devices of a partition. Raises StagecError when the string is something else.
    """
    if not _TOPOLOGY.fullmatch(topology):
        write = "write partitions x hosts x devices of each host, for example 1x1x1 or 1x2x8"
        raise StagecError(Problem("", "topology", f'"{topology}" is not a topology of GPUs', write))
    partitions, hosts, devices = map(int, topology.split("x"))
    return partitions, hosts, devices
