"""The costs of a run of an optimized program on one device: operations, bytes of memory, and exchanges with others.

XLA counts the body of a loop once; here it counts as often as it runs (`loops`). Of a conditional the
larger branch counts, for each metric by itself. A metric is None if it depends on something unknown: how often a
loop turns, or what a custom call does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from stagec.costs import accesses, collectives, hlo, operations
from stagec.costs.collectives import Exchange
from stagec.costs.hlo import Instruction
from stagec.costs.loops import Scope

Metrics: TypeAlias = dict[tuple[str, ...], float | None]
"""Metrics by name, those of collectives by kind and name; None if not known. Missing metrics are 0.

Keys with three parts are those of a part: "operation" and the opcode, or "among" and the exchange (`Cost`)."""
_ENDS = ("-done", "-update")
"""How opcodes end that finish something: it was counted where it started."""
FLOPS, BYTES, SECONDS = ("flops",), ("bytes",), ("seconds",)


@dataclass(frozen=True)
class Cost:
    """The costs of a run of a program on one device, and its parts, multiplied by their runs.

    flops: operations (`operations`). bytes: read from main memory and written to it (`accesses`). seconds: that links
    are busy at least; None also where they are not known. collectives: kind -> "count", how often; "bytes" of the
    arrays; and "sent_bytes" of a device. unknown: what metrics that are None depend on, as a person knows it.
    opcodes: opcode -> "count", how many instructions run, and "flops", their operations. exchanges: kind and among
    whom, as `Exchange` has them -> "count", "bytes", "sent_bytes" and "seconds".
    """

    flops: float | None
    bytes: float | None
    seconds: float | None
    collectives: Mapping[str, Mapping[str, float | None]]
    unknown: tuple[str, ...]
    opcodes: Mapping[str, Mapping[str, float | None]]
    exchanges: Mapping[tuple[str, str], Mapping[str, float | None]]


@functools.lru_cache(maxsize=1)  # the description of a program that was compiled asks, and then its inventory
def count(text: str, devices: int, seconds: Callable[[Exchange], float | None]) -> Cost:
    """Return the costs of a program.

    text: the optimized HLO. devices: on how many it runs. seconds: how long links need for an exchange; None where that
    is not known.
    """
    counter, program = Counter(devices, seconds), hlo.parse(text)
    metrics = counter.computation(Scope(program, program.entry)) if program.entry else {}
    kinds: dict[str, dict[str, float | None]] = {}
    opcodes: dict[str, dict[str, float | None]] = {}
    exchanges: dict[tuple[str, str], dict[str, float | None]] = {}
    for key, value in sorted(metrics.items()):
        match key:
            case (kind, name):
                kinds.setdefault(kind, {})[name] = value
            case ("operation", opcode, name):
                opcodes.setdefault(opcode, {"count": 0, "flops": 0})[name] = value
            case ("among", whom, name):
                kind, among = whom.split(" ", 1)
                exchanges.setdefault((kind, among), {})[name] = value
    flops, bytes_, busy = (metrics.get(key, 0) for key in (FLOPS, BYTES, SECONDS))
    return Cost(flops, bytes_, busy, kinds, tuple(counter.unknown), opcodes, exchanges)


@dataclass(frozen=True)
class Runs:
    """An instruction of a program, with what it computes as a whole.

    times: how often it runs; of what only some branch of a conditional has, the most. flops, bytes: of one run; None
    where they are not known. multiplied: the operations of products and convolutions among them, which units of their
    own compute.
    """

    times: int | None
    flops: float | None
    bytes: float | None
    multiplied: float


def runs(program: hlo.Program, devices: int) -> dict[str, Runs]:
    """Return the instructions that a program runs, by name, without those that only name arrays. devices: on how many.

    What a fusion or a custom call has is that instruction's. Loops and branches are their instructions.
    """
    counter = Counter(devices, lambda _: 0.0)
    instructions: dict[str, Runs] = {}

    def walk(scope: Scope, times: int | None) -> None:
        for instruction in scope.computation.instructions.values():
            match instruction.operation:
                case "while":
                    turns = scope.turns(instruction)
                    condition, body = scope.loop(instruction)
                    turned = None if turns is None or times is None else times * turns
                    walk(body, turned)
                    walk(condition, None if turned is None or times is None else turned + times)
                case "conditional":
                    for name, given in instruction.branches:
                        if name in program.computations:
                            walk(Scope(program, name, scope, (given,)), times)
                case "call" | "async" if instruction.called in program.computations:
                    walk(Scope(program, instruction.called, scope, instruction.operands), times)
                case _ if instruction.opcode not in hlo.FREE:
                    metrics = counter.metrics_of(instruction, scope, set())
                    before = instructions.get(instruction.name)
                    again = before.times if before else 0
                    instructions[instruction.name] = Runs(
                        None if times is None or again is None else times + again,
                        metrics.get(FLOPS, 0),
                        metrics.get(BYTES, 0),
                        sum(metrics.get(("operation", opcode, "flops"), 0) or 0 for opcode in operations.MULTIPLIED),
                    )

    if program.entry:
        walk(Scope(program, program.entry), 1)
    return instructions


class Counter:
    """Counts computations. unknown: unknown facts on the way, by their name for a person."""

    def __init__(self, devices: int, seconds: Callable[[Exchange], float | None]) -> None:
        self.devices, self.unknown = devices, dict[str, None]()
        self._seconds = seconds
        self._exchanges: dict[Exchange, Metrics] = {}
        self._applied: dict[str, int | None] = {}

    def computation(self, scope: Scope, chains: set[str] | None = None) -> Metrics:
        """Return the metrics of a computation. chains: of exchanges that were counted; None outside fusions."""
        total: Metrics = {}
        counted = set[str]() if chains is None else chains
        for instruction in scope.computation.instructions.values():
            _add(total, self.metrics_of(instruction, scope, counted, chains is not None))
        return total

    def metrics_of(self, instruction: Instruction, scope: Scope, chains: set[str], fused: bool = False) -> Metrics:
        """Return the metrics of one instruction. chains: as for `computation`. fused: whether it is in a fusion."""
        if instruction.opcode in hlo.FREE:
            return {}
        program, computation = scope.program, scope.computation
        match instruction.operation:
            case "while":
                return self._loop(instruction, scope)
            case "conditional":
                # Which branch runs is known at a call alone, so each metric is that of its worst one.
                branches = [(name, given) for name, given in instruction.branches if name in program.computations]
                return _largest(self.computation(Scope(program, name, scope, (given,))) for name, given in branches)
            case "fusion":
                metrics = self.computation(Scope(program, instruction.called, scope, instruction.operands), chains)
                return metrics if fused else metrics | {BYTES: accesses.accessed(instruction, computation, program)}
            case "call" | "async" if instruction.called in program.computations:
                return self.computation(Scope(program, instruction.called, scope, instruction.operands))
        metrics = {FLOPS: self._flops(instruction, scope)}
        if not fused:
            metrics[BYTES] = accesses.accessed(instruction, computation, program)
        # Nobody knows what such a call reads either: a count of its operands would look like the whole.
        if metrics[FLOPS] is None:
            metrics[BYTES] = None
        metrics["operation", instruction.operation, "count"] = 0 if instruction.opcode.endswith(_ENDS) else 1
        metrics["operation", instruction.operation, "flops"] = metrics[FLOPS]
        exchange = collectives.exchange(instruction, computation, fused)
        # XLA:TPU splits one exchange over several fusions: only the first part counts it.
        if exchange and not (exchange.chain and exchange.chain in chains):
            chains.add(exchange.chain)
            _add(metrics, self._exchange(exchange))
        return metrics

    def _loop(self, instruction: Instruction, scope: Scope) -> Metrics:
        turns = scope.turns(instruction)
        condition, body = scope.loop(instruction)
        metrics = _times(self.computation(body), turns)
        # The condition runs once more than the body: it also says that the loop ends.
        _add(metrics, _times(self.computation(condition), None if turns is None else turns + 1))
        if turns is None and any(value is None for key, value in metrics.items() if len(key) < 3):
            self.unknown[f"how often the loop {instruction.model_name or instruction.name} turns"] = None
        return metrics

    def _flops(self, instruction: Instruction, scope: Scope) -> int | None:
        operands = [scope.computation.instructions[name].type for name in instruction.operands]
        flops = operations.flops(instruction, operands, lambda: self._applied_flops(instruction.called, scope))
        if flops is None:
            target = operations.TARGET.search(instruction.attributes)
            self.unknown[f"what {target[1] if target else instruction.name} computes"] = None
        return flops

    def _applied_flops(self, name: str, scope: Scope) -> int | None:
        """The operations of a computation of scalars, such as a reduction applies."""
        if name not in self._applied:
            flops = self.computation(Scope(scope.program, name), set()).get(FLOPS, 0)
            self._applied[name] = None if flops is None else int(flops)
        return self._applied[name]

    def _exchange(self, exchange: Exchange) -> Metrics:
        if exchange not in self._exchanges:
            if not exchange.among:
                self.unknown[f"which devices exchange arrays in an {exchange.kind}"] = None
            sent = collectives.sent_bytes(exchange, self.devices) if exchange.among else None
            metrics: Metrics = {
                SECONDS: self._seconds(exchange) if exchange.among else None,
                (exchange.kind, "count"): 1,
                (exchange.kind, "bytes"): exchange.bytes,
                (exchange.kind, "sent_bytes"): sent,
            }
            whom = f"{exchange.kind} {exchange.among}"
            parts = {("among", whom, key[-1]): value for key, value in metrics.items()}
            self._exchanges[exchange] = metrics | parts
        return self._exchanges[exchange]


def _add(total: Metrics, metrics: Metrics) -> None:
    """Add metrics to those of `total`."""
    for key, value in metrics.items():
        before = total.get(key, 0)
        total[key] = None if before is None or value is None else before + value


def _times(metrics: Metrics, times: int | None) -> Metrics:
    """Metrics of an operation that runs several times; 0 stays 0 for any number of runs."""
    return {key: value and (None if times is None else value * times) for key, value in metrics.items()}


def _largest(branches: Iterable[Metrics]) -> Metrics:
    """For each metric the largest of all branches."""
    values_of: dict[tuple[str, ...], list[float | None]] = {}
    for metrics in branches:
        for key, value in metrics.items():
            values_of.setdefault(key, []).append(value)
    return {k: None if None in values else max(v for v in values if v is not None) for k, values in values_of.items()}
