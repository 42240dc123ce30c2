"""Sequences: requests that follow each other, and the state that a server keeps on the device between them.

Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_sequence.md.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from stagec.core.data import strict_json
from stagec.pjrt.arrays import DeviceArray
from stagec_serve.metrics import Metrics
from stagec_serve.model import Model
from stagec_serve.refusal import RequestError

PARAMETERS = ("sequence_id", "sequence_start", "sequence_end")
NEW = "new"
"""The `sequence_id` of a request that begins a sequence whose id the server makes: 128 random bits, a secret."""
IDLE = 60
"""The default seconds without a request before a sequence ends."""
_LONGEST = 200


class Step(NamedTuple):
    """Where in a sequence a request is.

    sequence: its number or string. start, end: whether it is the first, the last. made: whether the server made its id.
    """

    sequence: int | str
    start: bool
    end: bool
    made: bool = False


def step_of(parameters: Mapping[str, Any]) -> Step | None:
    """Read the parameters of a request; None: it is in no sequence. Raises RequestError ("request")."""
    given = parameters.get("sequence_id", 0)
    if type(given) not in (int, str) or len(str(given)) > _LONGEST:
        what = f"sequence_id is {strict_json.shown(repr(given))}; expected a whole number or a short string"
        raise RequestError("request", what)
    flags = [parameters.get(name, False) for name in PARAMETERS[1:]]
    for name, value in zip(PARAMETERS[1:], flags, strict=True):
        if type(value) is not bool:
            raise RequestError("request", f"{name} is {strict_json.shown(repr(value))}; expected true or false")
    if given in (0, ""):
        if any(flags):
            raise RequestError("request", "sequence_start and sequence_end need a sequence_id, which is not 0")
        return None
    if given == NEW:
        if not flags[0]:
            raise RequestError("request", f"sequence_id is {NEW}, which is for sequence_start alone: send the answer's")
        return Step(secrets.token_urlsafe(16), True, flags[1], made=True)
    return Step(given, *flags)


class Owner(Protocol):
    """The owner of a sequence's models; it stays loaded while the sequence lives."""

    def enter(self) -> None:
        """Count one more user."""

    def leave(self) -> None:
        """Count one less."""


@dataclass(eq=False)
class _Kept:
    """arrays: of one state of one sequence; None: no call has ended yet. timer: ends it, if no call uses it."""

    owner: Owner
    idle: float
    arrays: Sequence[Any] | None = None
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class Turn:
    """One request of a sequence; it owns the state until `end`.

    arrays: the kept arrays, by the name of the state; a successful call stores its results there.
    """

    sequences: Sequences
    step: Step
    owner: Owner
    arrays: dict[str, Sequence[Any]]

    def end(self, succeeded: bool) -> None:
        """Keep the state, as it is after a call that succeeded; else as it was, if no call has consumed it."""
        self.sequences.end(self, succeeded)


class Sequences:
    """The states of all sequences that live, by name of the state and of the sequence.

    The name of a state is the manifest's, so functions share it.
    """

    def __init__(self, most: int, idle: float, metrics: Metrics, own: bool = False) -> None:
        """most: sequences of a state at a time. idle: seconds, for states without their own number in the manifest.

        own: whether sequences begin with an id that the server makes, and with no other.
        """
        self._most, self._idle, self._metrics, self._own = most, idle, metrics, own
        self._kept: dict[tuple[str, int | str], _Kept] = {}
        self._counts: Counter[str] = Counter()

    def idle(self, model: Model) -> float:
        """Return the idle seconds before a sequence of a model ends."""
        return min((state.idle or self._idle for state in model.states.values()), default=self._idle)

    def owner(self, model: Model, step: Step | None) -> Owner | None:
        """Return who has the models of a sequence that a request goes on with; None: it begins one, or is in none."""
        if step is None or step.start:
            return None
        living = (self._kept.get((name, step.sequence)) for name in model.states)
        return next((kept.owner for kept in living if kept is not None), None)

    def begin(self, model: Model, step: Step, owner: Owner) -> Turn:
        """Return the turn of a request. owner: of the model.

        Raises RequestError ("conflict", "not-found", "busy").
        """
        shown = f"{model.name}: sequence {strict_json.shown(str(step.sequence))}"
        for name in model.states:
            kept = self._kept.get((name, step.sequence))
            if kept is not None and kept.timer is None:
                raise RequestError("conflict", f"{shown} has a request that is not answered yet: wait for it")
            if kept is None and not step.start:
                what = "does not exist: it has ended, or begins with sequence_start"
                raise RequestError("not-found", f"{shown} {what}")
            if kept is None and self._own and not step.made:
                what = f'cannot begin: this server makes ids: send "{NEW}" as its id'
                raise RequestError("unsupported", f"{shown} {what}")
            if kept is None and self._counts[name] >= self._most:
                what = f"{self._most} others have state already; try again later"
                raise RequestError("busy", f"{shown}: {what}")
        arrays: dict[str, Sequence[Any]] = {}
        for name, state in model.states.items():
            kept = self._kept.get((name, step.sequence))
            if kept is None:
                kept = self._kept[name, step.sequence] = _Kept(owner, state.idle or self._idle)
                self._count(name, 1)
                owner.enter()
            elif kept.timer is not None:
                kept.timer.cancel()
                kept.timer = None
            known = None if step.start else kept.arrays
            arrays[name] = model.initial(name) if known is None else known
        return Turn(self, step, owner, arrays)

    def end(self, turn: Turn, succeeded: bool) -> None:
        """See `Turn.end`."""
        loop = asyncio.get_running_loop()
        for name, arrays in turn.arrays.items():
            key = name, turn.step.sequence
            kept = self._kept[key]
            if succeeded:
                if turn.step.start and kept.arrays is not None:
                    self._metrics.ended(name, "restarted")
                if kept.owner is not turn.owner:
                    turn.owner.enter()
                    kept.owner.leave()
                    kept.owner = turn.owner
                kept.arrays = arrays
            consumed = any(isinstance(array, DeviceArray) and array.is_deleted() for array in kept.arrays or ())
            if kept.arrays is None or consumed:
                self._drop(key, "failed")
            elif succeeded and turn.step.end:
                self._drop(key, "end")
            else:
                kept.timer = loop.call_later(kept.idle, self._drop, key, "idle")

    def _drop(self, key: tuple[str, int | str], why: str) -> None:
        kept = self._kept.pop(key)
        self._count(key[0], -1)
        self._metrics.ended(key[0], why)
        kept.owner.leave()

    def _count(self, name: str, change: int) -> None:
        self._counts[name] += change
        self._metrics.sequences.labels(name).set(self._counts[name])
