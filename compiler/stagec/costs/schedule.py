"""When a device would run the instructions of an optimized program, by its peak rates: an estimate, and no measurement.

XLA's text has instructions in the order in which a device starts them. Each takes as long as its operations or its
bytes need at the peak, the longer of both. What is started and finished later, exchanges and copies, goes on meanwhile;
its end waits for it. Exchanges follow each other on the links.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from stagec.costs import hlo, operations, totals
from stagec.costs.collectives import Exchange
from stagec.costs.hlo import Instruction
from stagec.costs.loops import Scope

COMPUTE, LINKS, COPIES = "compute", "links", "copies"


class Event(NamedTuple):
    """Something that a device does.

    track: COMPUTE, LINKS or COPIES. name: of the instruction, or what it waits for. kind: opcode, "wait" or "turns".
    at, seconds: when it begins and how long it takes. model_name: JAX's name of the operation. flops, bytes: None where
    they are not known. turns: of a loop; None where that is not known, and for others.
    """

    track: str
    name: str
    kind: str
    at: float
    seconds: float
    model_name: str = ""
    flops: float | None = None
    bytes: float | None = None
    turns: int | None = None


_About: TypeAlias = tuple[str, float | None, float | None]
"""What is known of an event's instruction: its name in the model, operations and bytes."""


class Rates(NamedTuple):
    """Peak rates of a device. flops: operations a second; bandwidth: bytes a second of its main memory."""

    flops: float
    bandwidth: float


def schedule(
    program: hlo.Program, devices: int, seconds: Callable[[Exchange], float | None], rates: Rates
) -> tuple[list[Event], float]:
    """Return what a device does, in the order in which it begins, and when it has ended.

    devices, seconds: as for `totals.count`. Of a loop there is the first turn, and the others as one; where the number
    of turns is not known, one turn. Of a conditional there is the longest branch. An exchange of unknown length takes
    none.
    """
    simulation = _Simulation(totals.Counter(devices, seconds), rates)
    if program.entry:
        simulation.run(Scope(program, program.entry))
    order = sorted(simulation.events, key=lambda event: (event.at, -event.seconds, event.kind != "while"))
    return order, simulation.ended


@dataclass
class _Simulation:
    """now: until when the device computes. free: until when links and copies are busy. pending: what ends when."""

    counter: totals.Counter
    rates: Rates
    events: list[Event] = field(default_factory=list)
    now: float = 0.0
    free: dict[str, float] = field(default_factory=lambda: {LINKS: 0.0, COPIES: 0.0})
    pending: dict[str, float] = field(default_factory=dict)

    @property
    def ended(self) -> float:
        """When everything has ended."""
        return max(self.now, *self.free.values())

    def run(self, scope: Scope) -> None:
        """Run a computation once."""
        chains = set[str]()
        for one in scope.computation.instructions.values():
            match one.operation:
                case "while":
                    self._loop(one, scope)
                case "conditional":
                    self._branch(one, scope)
                case "call" if one.called in scope.program.computations:
                    self.run(Scope(scope.program, one.called, scope, one.operands))
                case _:
                    self._step(one, scope, chains)

    def _step(self, one: Instruction, scope: Scope, chains: set[str]) -> None:
        if one.opcode.endswith(("-done", "-update")) or _is_end(one, scope):
            begun = next((name for name in one.operands if name in self.pending), None)
            if begun is not None:
                self._wait(begun, self.pending[begun] if one.opcode.endswith("-update") else self.pending.pop(begun))
            if one.opcode.endswith(("-done", "-update")):
                return
        metrics = self.counter.of(one, scope, chains)
        flops, size = metrics.get(totals.FLOPS, 0), metrics.get(totals.BYTES, 0)
        busy = max((flops or 0) / self.rates.flops, (size or 0) / self.rates.bandwidth)
        exchange = metrics.get(totals.SECONDS, 0) or 0
        about = (one.model_name, flops, size)
        if one.opcode != one.operation or _is_start(one, scope):  # it goes on beside others
            track, length = (LINKS, exchange) if exchange else (COPIES, busy)
            self.pending[one.name] = self._beside(track, one, length, about)
            return
        if exchange:
            end = self._beside(LINKS, one, exchange, about)
            self._compute(one, busy, about)
            self._wait(one.name, end)
            return
        self._compute(one, busy, about)

    def _beside(
        self, track: str, one: Instruction, seconds: float, about: tuple[str, float | None, float | None]
    ) -> float:
        at = max(self.now, self.free[track])
        self.free[track] = at + seconds
        if seconds:
            self.events.append(Event(track, one.name, one.operation, at, seconds, *about))
        return at + seconds

    def _compute(self, one: Instruction, seconds: float, about: _About) -> None:
        if seconds:
            self.events.append(Event(COMPUTE, one.name, one.operation, self.now, seconds, *about))
            self.now += seconds

    def _wait(self, name: str, until: float) -> None:
        if until > self.now:
            self.events.append(Event(COMPUTE, f"wait for {name}", "wait", self.now, until - self.now))
            self.now = until

    def _loop(self, one: Instruction, scope: Scope) -> None:
        turns = scope.turns(one)
        if turns == 0:
            return
        at = self.now
        self.run(scope.loop(one)[1])
        length = self.now - at
        if turns is not None and turns > 1:
            name = f"turns 2 to {turns} of {one.name}"
            self.events.append(Event(COMPUTE, name, "turns", self.now, length * (turns - 1), one.model_name))
            self.now += length * (turns - 1)
            self.free = {track: max(end, self.now) if end > at else end for track, end in self.free.items()}
        self.events.append(Event(COMPUTE, one.name, "while", at, self.now - at, one.model_name, turns=turns))

    def _branch(self, one: Instruction, scope: Scope) -> None:
        found = []
        for name, given in one.branches:
            if name in scope.program.computations:
                branch = _Simulation(self.counter, self.rates, [], self.now, dict(self.free))
                branch.run(Scope(scope.program, name, scope, (given,)))
                found.append(branch)
        if found:
            longest = max(found, key=lambda branch: branch.now)
            self.events += longest.events
            self.now, self.free = longest.now, longest.free


def _is_start(one: Instruction, scope: Scope) -> bool:
    return _target(one, scope) == "AsyncCollectiveStart"


def _is_end(one: Instruction, scope: Scope) -> bool:
    return _target(one, scope) == "AsyncCollectiveDone"


def _target(one: Instruction, scope: Scope) -> str:
    """The custom call that a fusion ends with: XLA:TPU begins and ends exchanges with such ones."""
    inside = scope.program.computations.get(one.called) if one.opcode == "fusion" else None
    if inside is None or inside.root.opcode != "custom-call":
        return ""
    found = operations.TARGET.search(inside.root.attributes)
    return found[1] if found else ""
