"""How many blocks of a kernel run on a multiprocessor of a GPU at the same time, by its vendor's own rules.

CUDA's are those of `cuda_occupancy.h`, which comes with CUDA and needs no device; the tests compare with it. Left out
is a limit that XLA does not set: the part of shared memory that a program prefers as L1 cache. HIP's are in
`hipamd/src/hip_platform.cpp` of github.com/ROCm/clr. Left out is a limit of scalar registers, which few kernels reach.
"""

from __future__ import annotations

from typing import NamedTuple

from stagec.hardware.gpu_devices import AmdDevice, Device, NvidiaDevice

_PARTITIONS, _REGISTER_UNIT, _MOST_REGISTERS = 4, 256, 255
"""In how many parts a multiprocessor has its registers; the number of which a warp's registers are a multiple; the most
registers of a thread."""
_SHARED_UNIT, _RESERVED = 128, 1024
"""Bytes. The shared memory of a block is a multiple of the first; the system adds the second to it."""
_BLOCKS = {
    **dict.fromkeys(((8, 0), (9, 0), (10, 0), (10, 3)), 32),
    **dict.fromkeys(((8, 9), (12, 0), (12, 1)), 24),
    **dict.fromkeys(((8, 6), (8, 7)), 16),
}
"""Blocks on a multiprocessor at the same time, by compute capability."""
_TWO_BARRIERS = {(8, 0), (9, 0), (10, 0)}
"""Capabilities that have two barriers for each block of those; the others have one."""

_CDNA = {"gfx90a", "gfx940", "gfx941", "gfx942", "gfx950"}
"""Processors of AMD's whose compute units have four SIMDs, each with as many of these as follow."""
_SIMDS, _WAVES, _VECTOR_REGISTERS, _VECTOR_UNIT = 4, 8, 512, 8
"""SIMDs; wavefronts and vector registers of each; the number of which a wavefront's registers are a multiple."""


class Occupancy(NamedTuple):
    """The blocks that fit on a multiprocessor.

    blocks: of a kernel at the same time; 0: it cannot run. warps: of these blocks; most: what the device could have.
    limit: the scarce resource: "registers", "shared memory", "threads", "blocks" or "barriers".
    """

    blocks: int
    warps: int
    most: int
    limit: str

    @property
    def share(self) -> float:
        """The warps, as a share of those that the device could have."""
        return self.warps / self.most


def occupancy(device: Device, threads: int, registers: int, shared: int, barriers: int = 0) -> Occupancy | None:
    """Return the blocks that fit on a multiprocessor; None if the rules of its compute capability are not known.

    threads: of a block. registers: of a thread. shared: bytes of shared memory of a block. barriers: of a block.
    """
    if isinstance(device, AmdDevice):
        return _of_amd(device, threads, registers, shared)
    match = NvidiaDevice.CAPABILITY.fullmatch(device.compute_capability)
    capability = (int(match[1]), int(match[2])) if match else (0, 0)
    if capability not in _BLOCKS:
        return None
    warps = max(1, _up(threads, device.threads_per_warp) // device.threads_per_warp)
    of_warp = _up(registers * device.threads_per_warp, _REGISTER_UNIT)
    memory = _up(shared + _RESERVED, _SHARED_UNIT)
    limits = {"blocks": _BLOCKS[capability]}
    limits["threads"] = device.threads_per_core_limit // device.threads_per_warp // warps
    limits["shared memory"] = device.shared_memory_per_core // memory
    if of_warp:
        # A warp has all its registers in one partition, so what is left of each is lost.
        in_all = device.registers_per_core_limit // _PARTITIONS // of_warp * _PARTITIONS
        limits["registers"] = in_all // warps
    if barriers and capability[0] >= 9:
        limits["barriers"] = _BLOCKS[capability] * (2 if capability in _TWO_BARRIERS else 1) // barriers
    if threads > device.threads_per_block_limit:
        limits["threads"] = 0
    if memory > device.shared_memory_per_block_optin + _RESERVED:
        limits["shared memory"] = 0
    if registers > _MOST_REGISTERS or of_warp * _up(warps, _PARTITIONS) > device.registers_per_block_limit:
        limits["registers"] = 0
    limit = min(limits, key=lambda name: limits[name])
    most = device.threads_per_core_limit // device.threads_per_warp
    return Occupancy(limits[limit], limits[limit] * warps, most, limit)


def _of_amd(device: AmdDevice, threads: int, registers: int, shared: int) -> Occupancy | None:
    if device.compute_capability.partition(":")[0] not in _CDNA:
        return None
    warps, most = -(-threads // device.threads_per_warp), device.threads_per_core_limit // device.threads_per_warp
    limits = {"threads": most // warps if threads <= device.threads_per_block_limit else 0}
    if registers:
        limits["registers"] = _SIMDS * min(_WAVES, _VECTOR_REGISTERS // _up(registers, _VECTOR_UNIT)) // warps
    if shared:
        limits["shared memory"] = device.shared_memory_per_core // shared
    limit = min(limits, key=lambda name: limits[name])
    return Occupancy(limits[limit], limits[limit] * warps, most, limit)


def _up(number: int, unit: int) -> int:
    """Return the next multiple of a unit."""
    return -(-number // unit) * unit
