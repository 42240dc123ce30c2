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
    at, seconds: its start and its duration. model_name: JAX's name of the operation. flops, bytes: None where they are
    not known. turns: of a loop; None if that is not known, and for others.
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
    """Return the events of a device in the order of their starts, and the end of the last one.

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
    """Bytes that move beside the computation, while it leaves the memory free.

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
        """The end of everything, including events that nothing waits for."""
        return max(self.now + sum(copy.remaining for copy in self.copies), self.free)

    def run(self, scope: Scope) -> None:
        """Run a computation once."""
        chains = set[str]()
        for instruction in scope.computation.instructions.values():
            match instruction.operation:
                case "while":
                    self._loop(instruction, scope)
                case "conditional":
                    self._branch(instruction, scope)
                case "call" if instruction.called in scope.program.computations:
                    self.run(Scope(scope.program, instruction.called, scope, instruction.operands))
                case _:
                    self._step(instruction, scope, chains)

    def _step(self, instruction: Instruction, scope: Scope, chains: set[str]) -> None:
        if instruction.opcode.endswith(("-done", "-update")) or _is_end(instruction, scope):
            for begun in instruction.operands:
                self._wait(begun)
        if instruction.opcode.endswith(("-done", "-update")):
            return
        metrics = self.counter.metrics_of(instruction, scope, chains)
        flops, size = metrics.get(totals.FLOPS, 0), metrics.get(totals.BYTES, 0)
        if instruction.opcode != instruction.operation:  # its end writes
            ends = (user for user in scope.computation.users.get(instruction.name, ()) if user.opcode.endswith("-done"))
            size = (size or 0) + sum(
                self.counter.metrics_of(end, scope, set()).get(totals.BYTES, 0) or 0 for end in ends
            )
        computing, moving = (flops or 0) / self.rates.flops, (size or 0) / self.rates.bandwidth
        exchange = metrics.get(totals.SECONDS, 0) or 0
        event = Event(COMPUTE, instruction.name, instruction.operation, 0, 0, instruction.model_name, flops, size)
        beside = instruction.opcode != instruction.operation or _is_start(instruction, scope)
        if exchange:
            at = max(self.now, self.free)
            self.exchanged[instruction.name] = self.free = at + exchange
            self.events.append(event._replace(track=LINKS, at=at, seconds=exchange))
        if beside:
            self.copies.append(_Copy(instruction.name, moving, None if exchange else event._replace(track=COPIES)))
            return
        self._compute(event, max(computing, moving), moving)
        if exchange:
            self._wait(instruction.name)

    def _compute(self, event: Event, seconds: float, moving: float) -> None:
        """Compute for some seconds. The memory is busy for `moving` of them."""
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

    def _copied(self, copy: _Copy, at: float) -> None:
        begun = at if copy.begun is None else copy.begun
        if copy.event and at > begun:
            self.events.append(copy.event._replace(at=begun, seconds=at - begun))

    def _wait(self, name: str) -> None:
        """Wait for an exchange, or for a copy and those before it."""
        names = [copy.name for copy in self.copies if copy.event]
        until = self.exchanged.pop(name, 0.0)
        if name in names:
            last = next(i for i, copy in enumerate(self.copies) if copy.name == name and copy.event)
            until = self.now + sum(copy.remaining for copy in self.copies[: last + 1])
        if until > self.now:
            self.events.append(Event(COMPUTE, f"wait for {name}", "wait", self.now, until - self.now))
            self._pass(until - self.now, 0.0)
        while name in names and any(copy.name == name and copy.event for copy in self.copies):
            self._copied(self.copies.pop(0), self.now)  # the remainder of rounding

    def _loop(self, instruction: Instruction, scope: Scope) -> None:
        turns = scope.turns(instruction)
        if turns == 0:
            return
        at = self.now
        self.run(scope.loop(instruction)[1])
        length = self.now - at
        if turns is not None and turns > 1:
            name = f"turns 2 to {turns} of {instruction.name}"
            rest = length * (turns - 1)
            self.events.append(Event(COMPUTE, name, "turns", self.now, rest, instruction.model_name))
            self._pass(rest, rest)
            self.free = self.free + rest if self.free > at else self.free
        self.events.append(
            Event(COMPUTE, instruction.name, "while", at, self.now - at, instruction.model_name, turns=turns)
        )

    def _branch(self, instruction: Instruction, scope: Scope) -> None:
        branches = []
        for name, given in instruction.branches:
            if name in scope.program.computations:
                branch = _Simulation(self.counter, self.rates, [], self.now, self.free, {}, copy.deepcopy(self.copies))
                branch.run(Scope(scope.program, name, scope, (given,)))
                branches.append(branch)
        if branches:
            longest = max(branches, key=lambda branch: branch.now)
            self.events += longest.events
            self.now, self.free, self.copies = longest.now, longest.free, longest.copies


def _is_start(instruction: Instruction, scope: Scope) -> bool:
    return _target(instruction, scope) == "AsyncCollectiveStart"


def _is_end(instruction: Instruction, scope: Scope) -> bool:
    return _target(instruction, scope) == "AsyncCollectiveDone"


def _target(instruction: Instruction, scope: Scope) -> str:
    """The custom call that a fusion ends with: XLA:TPU begins and ends exchanges with such ones."""
    inside = scope.program.computations.get(instruction.called) if instruction.opcode == "fusion" else None
    if inside is None or inside.root.opcode != "custom-call":
        return ""
    match = operations.TARGET.search(inside.root.attributes)
    return match[1] if match else ""
