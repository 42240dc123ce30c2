"""The kernels of an executable for GPUs: the resources of each, and the bound on its time.

Nothing here needs a device, or a tool of a vendor's. docs/costs.md lists the assumptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from stagec.backends.analysis import UNKNOWN
from stagec.backends.gpu import code_objects, container, cubins
from stagec.backends.gpu.container import Launch
from stagec.costs import hlo, totals
from stagec.costs.totals import Runs
from stagec.hardware.gpu_devices import Device
from stagec.hardware.occupancy import occupancy

Kernel: TypeAlias = dict[str, Any]
"""A row of `of`."""
LAUNCH_SECONDS = 1e-6
"""The least time of a launch: kKernelLaunchOverhead of xla/service/gpu/model/gpu_performance_model_base.h."""
_TRANSACTION = 32
"""Bytes of main memory that a multiprocessor moves in a cycle at most, as XLA assumes in the same place."""


_UNEVEN = 1.1
"""If the busiest multiprocessor needs this much longer, occupancy is the bound."""


def of(serialized: bytes, device: Device, program: str = "", devices: int = 1) -> list[Kernel]:
    """Return the facts about the kernels of an executable, in the order of their first launch.

    program: its optimized HLO as a string; "": no times. devices: their number.
    A row has "name", of the function in the code; "instructions" of HLO that it computes; "blocks", "threads" of each;
    "registers" of a thread; "shared_memory", bytes of a block; "spills" and "stack", bytes of a thread (`cubins`);
    "occupancy", the share of a multiprocessor's warps that run at a time, and "limited_by", which resource limits it;
    "runs" in a call; "seconds", the least time of one run, and "bound", its cause: "compute", "memory", "launch" or
    "occupancy". Unknown values are "unknown".
    Raises ValueError when the bytes are not such an executable. A kernel whose code cannot be read has unknown numbers.
    """
    runs = totals.runs(hlo.parse(program), devices) if program else {}
    read: dict[bytes, dict[str, cubins.Function]] = {}
    kernels: dict[str, Kernel] = {}
    computed: set[tuple[str, str]] = set()
    for launch in container.launches(serialized):
        for name, function in _functions(launch, read):
            row = kernels.setdefault(name, _row(launch, name, function, device))
            if (name, launch.instruction) not in computed:
                computed.add((name, launch.instruction))
                row["instructions"].append(launch.instruction)
    for row in kernels.values():
        row.update(_time(row, [runs[name] for name in row["instructions"] if name in runs], device))
    return [{key: UNKNOWN if value is None else value for key, value in row.items()} for row in kernels.values()]


def functions(code: bytes) -> dict[str, cubins.Function]:
    """Return the functions of a kernel's machine code by their names. Raises ValueError when it is damaged."""
    return code_objects.read(code) if code_objects.are_in(code) else cubins.read(code)


def _functions(
    launch: Launch, read: dict[bytes, dict[str, cubins.Function]]
) -> Iterable[tuple[str, cubins.Function | None]]:
    """Return the functions of a launch: one, or all if the launch does not name it. read: a cache."""
    if launch.code is None:
        return [(launch.function, None)]
    if launch.code not in read:
        try:
            read[launch.code] = functions(launch.code)
        except ValueError:
            read[launch.code] = {}
    inside = read[launch.code]
    if launch.function or not inside:
        return [(launch.function or launch.instruction, inside.get(launch.function))]
    return inside.items()


def _row(launch: Launch, name: str, function: cubins.Function | None, device: Device) -> Kernel:
    """Return the resources of a kernel; None: unknown."""
    threads = launch.threads or (function.threads if function else None)
    row: Kernel = {"name": name, "instructions": [], "blocks": launch.blocks, "threads": threads}
    row |= dict.fromkeys(("registers", "shared_memory", "spills", "stack", "occupancy", "limited_by"))
    if function is None:
        return row
    row |= {"registers": function.registers, "spills": function.spills, "stack": function.stack}
    if launch.shared is None or threads is None:
        return row
    row["shared_memory"] = function.shared + launch.shared
    fits = occupancy(device, threads, function.registers, row["shared_memory"], function.barriers)
    return row | ({"occupancy": round(fits.share, 4), "limited_by": fits.limit} if fits else {})


def _time(row: Kernel, runs: Sequence[Runs], device: Device) -> Kernel:
    """Return the runs of a kernel, and the bound of one run; None: unknown. All its instructions are the same."""
    if not runs:
        return dict.fromkeys(("runs", "seconds", "bound"))
    times = [run.times for run in runs]
    seconds, bound = bounds(runs[0], row["blocks"], device) or (None, None)
    return {"runs": None if None in times else sum(filter(None, times)), "seconds": seconds, "bound": bound}


def bounds(run: Runs, blocks: int | None, device: Device) -> tuple[float, str] | None:
    """Return the least time of a run, and its cause; None if its operations or bytes are not known.

    blocks: of the launch; None: unknown. Where there are fewer than multiprocessors, or some have one more than others,
    the operations and bytes of the busiest one bound the run: that is "occupancy".
    """
    if run.flops is None or run.bytes is None:
        return None
    clock, cores = device.clock_rate_ghz * 1e9, device.core_count
    compute = max(run.multiplied / device.bf16_flops, (run.flops - run.multiplied) / device.f32_flops)
    times = {"launch": LAUNCH_SECONDS, "memory": run.bytes / device.memory_bandwidth, "compute": compute}
    if blocks:
        busy = blocks / -(-blocks // cores)
        waiting = max(compute * cores / busy, run.bytes / (busy * _TRANSACTION * clock))
        if waiting > _UNEVEN * max(times.values()):
            times["occupancy"] = waiting
    bound = max(times, key=lambda name: times[name])
    return times[bound], bound
