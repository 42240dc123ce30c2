"""Compute the costs of an executable: memory, operations, communication, and the least time of its hardware.

Metrics are those of one device for one call. An unknown value is "unknown": XLA's 0 for some values, and its count of
each loop as one turn, would be wrong. docs/costs.md explains the counts, and the assumptions about links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from stagec.backends.compilation import CompiledModule, Hardware
from stagec.costs import hlo, totals
from stagec.costs.links import Seconds

UNKNOWN: Literal["unknown"] = "unknown"
Metric: TypeAlias = int | float | Literal["unknown"]
_MEMORY = {
    "argument_bytes": "argument_size_in_bytes",
    "output_bytes": "output_size_in_bytes",
    "alias_bytes": "alias_size_in_bytes",
    "temporary_bytes": "temp_size_in_bytes",
    "code_bytes": "generated_code_size_in_bytes",
    "peak_bytes": "peak_memory_in_bytes",
}
"""Our names of sizes -> XLA's."""
KERNEL_METRICS = ("registers", "shared_memory", "spills")
_NEVER_NOTHING = ("code_bytes", "peak_bytes")
"""Metrics that are never 0, because every program has code and arrays: a 0 means that XLA did not look."""


def analyze(
    memory_analysis: Mapping[str, int],
    program: str,
    hardware: Hardware,
    devices: int = 1,
    coords: Sequence[Sequence[int]] = (),
) -> dict[str, Any]:
    """Return the known costs of an executable.

    memory_analysis, coords: those of `CompiledModule`. program: the optimized HLO as a string. devices: their number.
    The result has "argument_bytes", "output_bytes", "alias_bytes" (outputs in the memory of arguments),
    "temporary_bytes", "code_bytes", "peak_bytes"; "flops" and "bytes_accessed", which count loops as often as they turn
    (`costs`); "collectives", by kind: "count", how often they run, "bytes" of the arrays, and "sent_bytes" of a device;
    "roofline", from `roofline`; and "unknown", the missing facts behind unknown metrics. A metric, or the whole
    roofline, is "unknown" if it is not known.
    """
    metrics: dict[str, Any] = {}
    for name, xlas in _MEMORY.items():
        metric: Metric = memory_analysis.get(xlas, UNKNOWN) if any(memory_analysis.values()) else UNKNOWN
        metrics[name] = UNKNOWN if name in _NEVER_NOTHING and not metric else metric
    cost = totals.count(program, devices, Seconds(hardware.links, devices, tuple(map(tuple, coords))))
    metrics["flops"], metrics["bytes_accessed"] = _metric(cost.flops), _metric(cost.bytes)
    metrics["collectives"] = {
        kind: {name: _metric(value) for name, value in moved.items()} for kind, moved in cost.collectives.items()
    }
    metrics["roofline"] = roofline(cost.flops, cost.bytes, cost.seconds, hardware)
    slow = cost.seconds is None and not cost.unknown and hardware.flops
    metrics["unknown"] = [*cost.unknown, *([f"how fast the links of {hardware.device_kind} are"] if slow else [])]
    return metrics


def of_module(module: CompiledModule, hardware: Hardware) -> dict[str, Any]:
    """Return `analyze` of a backend's result."""
    return analyze(module.memory_analysis, module.hlo, hardware, len(module.device_ids), module.coords)


def of_kernels(kernels: Sequence[Mapping[str, Any]]) -> dict[str, Metric]:
    """Return the figures of kernels for limits and baselines, from rows of `backends.gpu.kernels`.

    "registers" and "shared_memory" are those of the kernel with the most, "spills" those of all; "unknown" where that
    of some kernel is. All are 0 if there is none.
    """
    columns = {name: [kernel[name] for kernel in kernels] for name in KERNEL_METRICS}
    return {
        name: UNKNOWN if UNKNOWN in values else sum(values) if name == "spills" else max(values, default=0)
        for name, values in columns.items()
    }


def _metric(value: float | None) -> Metric:
    return UNKNOWN if value is None else value


def roofline(
    flops: float | None, bytes_accessed: float | None, link_seconds: float | None, hardware: Hardware
) -> dict[str, float | str] | str:
    """Return the least time of a device by its peak rates: the longest of computing, memory and links.

    The result has "compute_seconds", "memory_seconds", "link_seconds", "seconds", and "bound": "compute", "memory" or
    "links". All three go on at the same time, and the peak is that of bfloat16. "unknown" if a rate is.
    """
    if not hardware.flops or not hardware.bandwidth or flops is None or bytes_accessed is None or link_seconds is None:
        return UNKNOWN
    times = {"links": link_seconds, "memory": bytes_accessed / hardware.bandwidth, "compute": flops / hardware.flops}
    bound = max(times, key=lambda name: times[name])
    return {
        "compute_seconds": times["compute"],
        "memory_seconds": times["memory"],
        "link_seconds": times["links"],
        "seconds": times[bound],
        "bound": bound,
    }


@dataclass(frozen=True)
class Buffer:
    """An array of a program on one device.

    kind: "argument", "result" or "temporary". index: among the arguments that the program takes, or its results.
    name: JAX's name of the argument, or of the operation that makes a temporary; "" if XLA has none.
    type: without layout. bytes: with padding.
    """

    kind: Literal["argument", "result", "temporary"]
    index: int
    name: str
    type: str
    bytes: int


def buffers(program: str) -> list[Buffer]:
    """Return the arrays of an optimized program, largest first; not all of them exist at the same time.

    Those inside fusions never exist, and those in a memory of a core's own are left out.
    """
    instructions = [op for part in hlo.parse(program).computations.values() for op in part.instructions.values()]
    fused = {
        op.called for op in instructions if op.called and op.opcode != "call" and not op.opcode.startswith("async")
    }
    by_name = {(op.computation, op.name): op for op in instructions}
    roots = [op for op in instructions if op.entry and op.root]
    result: list[Buffer] = []
    results = {name for root in roots for name in (root.name, *(root.operands if root.opcode == "tuple" else ()))}
    for root in roots:
        for index, array in enumerate(hlo.elements(root.type)):
            result.append(Buffer("result", index, "", hlo.plain(array), hlo.size(array)))
    for op in instructions:
        if op.computation in fused or op.type.startswith("("):
            continue
        if op.opcode == "parameter":
            if op.entry and op.number is not None:
                result.append(Buffer("argument", op.number, op.model_name, hlo.plain(op.type), hlo.size(op.type)))
            continue
        made = by_name.get((op.computation, op.operands[0])) if op.opcode == "get-tuple-element" else op
        if made is None or made.opcode in _NO_BUFFER or op.opcode.endswith("-start"):
            continue
        if hlo.in_main_memory(op.type) and not (op.entry and op.name in results):
            name = op.model_name or made.model_name or made.opcode
            index = -1 if op.number is None else op.number
            result.append(Buffer("temporary", index, name, hlo.plain(op.type), hlo.size(op.type)))
    return sorted(result, key=lambda buffer: (-buffer.bytes, _ORDER.index(buffer.kind), buffer.index))


_NO_BUFFER = hlo.FREE - {"constant"} | {"while", "conditional", "opt-barrier"}
"""Operations without memory of their own."""
_ORDER: Sequence[str] = ("argument", "result", "temporary")
