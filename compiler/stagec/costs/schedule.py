"""When a device would run the instructions of an optimized program, by its peak rates: an estimate, and no measurement.

XLA's text has instructions in the order in which a device starts them. Each takes as long as its operations or its
bytes need at the peak, the longer of both. What is started and finished later, exchanges and copies, goes on meanwhile;
its end waits for it. Exchanges follow each other on the links; copies have what is left of the memory's time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

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
class _Copy:
    """Bytes that are moved beside what is computed, while that leaves the memory free.

    remaining: seconds that it still takes alone. begun: None before it is its turn. event: without times; None for the
    part of an exchange, which has one on the links.
    """

    name: str
    remaining: float
    event: Event | None
    begun: float | None = None


@dataclass
class _Simulation:
    """now: until when the device computes. free: until when the links are busy. exchanged: which exchange ends when.

    copies: what is still to be moved, in the order of the starts.
    """

    counter: totals.Counter
    rates: Rates
    events: list[Event] = field(default_factory=list)
    now: float = 0.0
    free: float = 0.0
    exchanged: dict[str, float] = field(default_factory=dict)
    copies: list[_Copy] = field(default_factory=list)

    @property
    def ended(self) -> float:
        """When everything has ended, also what nothing waits for."""
        return max(self.now + sum(one.remaining for one in self.copies), self.free)

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
            for begun in one.operands:
                self._wait(begun)
        if one.opcode.endswith(("-done", "-update")):
            return
        metrics = self.counter.of(one, scope, chains)
        flops, size = metrics.get(totals.FLOPS, 0), metrics.get(totals.BYTES, 0)
        if one.opcode != one.operation:  # its end writes
            ends = (user for user in scope.computation.users.get(one.name, ()) if user.opcode.endswith("-done"))
            size = (size or 0) + sum(self.counter.of(end, scope, set()).get(totals.BYTES, 0) or 0 for end in ends)
        computing, moving = (flops or 0) / self.rates.flops, (size or 0) / self.rates.bandwidth
        exchange = metrics.get(totals.SECONDS, 0) or 0
        event = Event(COMPUTE, one.name, one.operation, 0, 0, one.model_name, flops, size)
        beside = one.opcode != one.operation or _is_start(one, scope)
        if exchange:
            at = max(self.now, self.free)
            self.exchanged[one.name] = self.free = at + exchange
            self.events.append(event._replace(track=LINKS, at=at, seconds=exchange))
        if beside:
            self.copies.append(_Copy(one.name, moving, None if exchange else event._replace(track=COPIES)))
            return
        self._compute(event, max(computing, moving), moving)
        if exchange:
            self._wait(one.name)

    def _compute(self, event: Event, seconds: float, moving: float) -> None:
        """Compute for some seconds, of which the memory is busy for `moving`."""
        if seconds:
            self.events.append(event._replace(at=self.now, seconds=seconds))
            self._pass(seconds, moving)

    def _pass(self, seconds: float, moving: float) -> None:
        """Let time pass, and copies go on in what is left of the memory's."""
        at, end = self.now, self.now + seconds
        rate = (seconds - moving) / seconds if seconds else 0.0
        while self.copies and rate > 0 and at < end:
            first = self.copies[0]
            first.begun = at if first.begun is None else first.begun
            if first.remaining > (end - at) * rate:
                first.remaining -= (end - at) * rate
                break
            at += first.remaining / rate
            self._copied(self.copies.pop(0), at)
        self.now = end

    def _copied(self, one: _Copy, at: float) -> None:
        begun = at if one.begun is None else one.begun
        if one.event and at > begun:
            self.events.append(one.event._replace(at=begun, seconds=at - begun))

    def _wait(self, name: str) -> None:
        """Wait for an exchange, or for a copy and those before it."""
        names = [one.name for one in self.copies if one.event]
        until = self.exchanged.pop(name, 0.0)
        if name in names:
            last = next(i for i, one in enumerate(self.copies) if one.name == name and one.event)
            until = self.now + sum(one.remaining for one in self.copies[: last + 1])
        if until > self.now:
            self.events.append(Event(COMPUTE, f"wait for {name}", "wait", self.now, until - self.now))
            self._pass(until - self.now, 0.0)
        while name in names and any(one.name == name and one.event for one in self.copies):
            self._copied(self.copies.pop(0), self.now)  # what rounding has left of it

    def _loop(self, one: Instruction, scope: Scope) -> None:
        turns = scope.turns(one)
        if turns == 0:
            return
        at = self.now
        self.run(scope.loop(one)[1])
        length = self.now - at
        if turns is not None and turns > 1:
            name = f"turns 2 to {turns} of {one.name}"
            rest = length * (turns - 1)
            self.events.append(Event(COMPUTE, name, "turns", self.now, rest, one.model_name))
            self._pass(rest, rest)
            self.free = self.free + rest if self.free > at else self.free
        self.events.append(Event(COMPUTE, one.name, "while", at, self.now - at, one.model_name, turns=turns))

    def _branch(self, one: Instruction, scope: Scope) -> None:
        found = []
        for name, given in one.branches:
            if name in scope.program.computations:
                branch = _Simulation(self.counter, self.rates, [], self.now, self.free, {}, copy.deepcopy(self.copies))
                branch.run(Scope(scope.program, name, scope, (given,)))
                found.append(branch)
        if found:
            longest = max(found, key=lambda branch: branch.now)
            self.events += longest.events
            self.now, self.free, self.copies = longest.now, longest.free, longest.copies


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
