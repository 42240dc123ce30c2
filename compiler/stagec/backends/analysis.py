"""What an executable takes: memory, operations, communication, and the time that its hardware needs at least.

Figures are those of one device. What XLA does not say is "unknown": it gives 0 for some of it, which would be a lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from stagec.backends import hlo
from stagec.backends.compilation import CompiledModule, Hardware
from stagec.specs import COLLECTIVES

UNKNOWN: Literal["unknown"] = "unknown"
Figure: TypeAlias = int | float | Literal["unknown"]
_MEMORY = {
    "argument_bytes": "argument_size_in_bytes",
    "output_bytes": "output_size_in_bytes",
    "alias_bytes": "alias_size_in_bytes",
    "temporary_bytes": "temp_size_in_bytes",
    "code_bytes": "generated_code_size_in_bytes",
    "peak_bytes": "peak_memory_in_bytes",
}
"""Our names of sizes -> XLA's."""
_NEVER_NOTHING = ("code_bytes", "peak_bytes")
"""Where 0 means that XLA did not look: there is no program without code, nor one without arrays."""


def analyze(
    memory_analysis: Mapping[str, int], cost_analysis: Mapping[str, float], program: str, hardware: Hardware
) -> dict[str, Any]:
    """Return what is known of an executable.

    memory_analysis, cost_analysis, program: those of `CompiledModule`; program is the optimized HLO as text.
    The result has "argument_bytes", "output_bytes", "alias_bytes" (outputs in the memory of arguments),
    "temporary_bytes", "code_bytes", "peak_bytes", "flops", "bytes_accessed"; "collectives", as `collectives` says; and
    "roofline", as `roofline` says. A figure, or the whole roofline, is "unknown" where XLA does not say.
    """
    figures: dict[str, Any] = {}
    for name, xlas in _MEMORY.items():
        figure: Figure = memory_analysis.get(xlas, UNKNOWN) if any(memory_analysis.values()) else UNKNOWN
        figures[name] = UNKNOWN if name in _NEVER_NOTHING and not figure else figure
    for name in ("flops", "bytes_accessed"):
        # XLA leaves out what is 0 of a program that it has counted.
        figures[name] = cost_analysis.get(name, 0.0) if cost_analysis else UNKNOWN
    figures["collectives"] = collectives(program)
    figures["roofline"] = roofline(figures["flops"], figures["bytes_accessed"], hardware)
    return figures


def of_module(module: CompiledModule, hardware: Hardware) -> dict[str, Any]:
    """Return `analyze` of what a backend made."""
    return analyze(module.memory_analysis, module.cost_analysis, module.hlo, hardware)


def collectives(program: str) -> dict[str, dict[str, int]]:
    """Return how often an optimized program communicates, and how much: kind -> {"count", "bytes"}, sorted by kind.

    A start and its end count once, and so does an instruction in a loop, however often it runs; branches of a
    conditional count each. An instruction for several arrays is one. bytes: of the arrays on one device before it, or
    after an all-gather, which is when they are whole. Kinds that do not occur are left out.
    """
    if not any(f" {kind}" in program for kind in COLLECTIVES):
        return {}
    found = hlo.instructions(program)
    types = {(one.computation, one.name): one.type for one in found}
    result: dict[str, dict[str, int]] = {}
    for one in found:
        kind = one.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        before = sum(hlo.size(types.get((one.computation, name), ""), padded=False) for name in one.operands)
        # The start of an all-gather has its operands beside its results.
        after = hlo.size(one.type, padded=False) - (before if one.opcode.endswith("-start") else 0)
        entry = result.setdefault(kind, {"count": 0, "bytes": 0})
        entry["count"] += 1
        entry["bytes"] += after if kind == "all-gather" else before
    return dict(sorted(result.items()))


def roofline(flops: Figure, bytes_accessed: Figure, hardware: Hardware) -> dict[str, float | str] | str:
    """Return how long a device needs at least, by its peak figures: the longer of computing and reading memory.

    The result has "compute_seconds", "memory_seconds", "seconds", and "bound": "compute" or "memory". Communication
    between devices is not in it, and the peak is that of bfloat16. "unknown" where a figure is.
    """
    if isinstance(flops, str) or isinstance(bytes_accessed, str) or not hardware.flops or not hardware.bandwidth:
        return UNKNOWN
    compute, memory = flops / hardware.flops, bytes_accessed / hardware.bandwidth
    return {
        "compute_seconds": compute,
        "memory_seconds": memory,
        "seconds": max(compute, memory),
        "bound": "compute" if compute > memory else "memory",
    }


@dataclass(frozen=True)
class Buffer:
    """An array of a program on one device.

    kind: "argument", "result" or "temporary". index: among the arguments that the program takes, or its results.
    name: JAX's name of the argument, or of the operation that makes a temporary; "" where XLA has none.
    type: without layout. bytes: with padding.
    """

    kind: Literal["argument", "result", "temporary"]
    index: int
    name: str
    type: str
    bytes: int


def buffers(program: str) -> list[Buffer]:
    """Return the arrays of an optimized program, largest first; not all of them exist at the same time.

    Those inside of fusions never exist, and those in a memory of a core's own are left out.
    """
    found = hlo.instructions(program)
    fused = {one.called for one in found if one.called}
    by_name = {(one.computation, one.name): one for one in found}
    roots = [one for one in found if one.entry and one.root]
    result: list[Buffer] = []
    results = {name for root in roots for name in (root.name, *(root.operands if root.opcode == "tuple" else ()))}
    for root in roots:
        for index, array in enumerate(hlo.elements(root.type)):
            result.append(Buffer("result", index, "", hlo.plain(array), hlo.size(array)))
    for one in found:
        if one.computation in fused or one.type.startswith("("):
            continue
        if one.opcode == "parameter":
            if one.entry:
                result.append(Buffer("argument", one.number, one.model_name, hlo.plain(one.type), hlo.size(one.type)))
            continue
        made = by_name.get((one.computation, one.operands[0])) if one.opcode == "get-tuple-element" else one
        if made is None or made.opcode in _NO_BUFFER or one.opcode.endswith("-start"):
            continue
        if hlo.in_main_memory(one.type) and not (one.entry and one.name in results):
            name = one.model_name or made.model_name or made.opcode
            result.append(Buffer("temporary", one.number, name, hlo.plain(one.type), hlo.size(one.type)))
    return sorted(result, key=lambda buffer: (-buffer.bytes, _ORDER.index(buffer.kind), buffer.index))


_NO_BUFFER = ("parameter", "while", "conditional", "bitcast", "tuple", "optimization-barrier", "get-tuple-element")
"""What has no memory of its own."""
_ORDER: Sequence[str] = ("argument", "result", "temporary")
