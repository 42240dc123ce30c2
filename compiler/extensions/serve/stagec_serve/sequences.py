"""Sequences: requests that follow each other, and the state that a server keeps on the device between them.

Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_sequence.md.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stagec.core.data import strict_json
from stagec.pjrt.arrays import DeviceArray
from stagec_serve.metrics import Metrics
from stagec_serve.model import Model
from stagec_serve.refusal import RequestError

PARAMETERS = ("sequence_id", "sequence_start", "sequence_end")
NEW = "new"
"""The `sequence_id` of a request that begins a sequence whose id the server makes: 128 random bits, a secret."""
_LONGEST = 200


class Step(NamedTuple):
    """Where in a sequence a request is.

    sequence: its number or string. start, end: whether it is the first, the last. made: whether the server made its id.
    """

    sequence: int | str
    start: bool
    end: bool
    made: bool = False


def flag(parameters: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a parameter that is true or false. Raises RequestError ("request")."""
    value = parameters.get(name, default)
    if type(value) is not bool:
        raise RequestError("request", f"{name} is {strict_json.shown(repr(value))}; expected true or false")
    return value


def step_of(parameters: Mapping[str, Any]) -> Step | None:
    """Read the parameters of a request; None: it is in no sequence. Raises RequestError ("request")."""
    if parameters.keys().isdisjoint(PARAMETERS):
        return None
    given = parameters.get("sequence_id", 0)
    if type(given) not in (int, str) or len(str(given)) > _LONGEST:
        what = f"sequence_id is {strict_json.shown(repr(given))}; expected a whole number or a short string"
        raise RequestError("request", what)
    flags = [flag(parameters, name, False) for name in PARAMETERS[1:]]
    if given in (0, ""):
        if any(flags):
            raise RequestError("request", "sequence_start and sequence_end need a sequence_id, which is not 0")
        return None
    if given == NEW:
        if not flags[0]:
            raise RequestError("request", f"sequence_id is {NEW}, which is for sequence_start alone: send the answer's")
        return Step(secrets.token_urlsafe(16), True, flags[1], made=True)
    return Step(given, *flags)


@dataclass(eq=False)
class _Kept:
    """arrays: of one state of one sequence; None: no call has ended yet. timer: ends it, if no call uses it."""

    owner: Any
    idle: float
    arrays: Sequence[Any] | None = None
    timer: asyncio.TimerHandle | None = None


class Turn(NamedTuple):
    """One request of a sequence; it owns the state until `end`.

    arrays: the kept arrays, by the name of the state; a successful call stores its results there.
    end: keeps the state, as it is after a call that succeeded (True); else as it was, if no call has consumed it.
    """

    arrays: dict[str, Sequence[Any]]
    end: Callable[[bool], None]


class Sequences:
    """The states of all sequences that live, by name of the state and of the sequence.

    The name of a state is the manifest's, so functions share it.
    """

    def __init__(self, most: int, idle: float, metrics: Metrics, own: bool = False) -> None:
        """most: sequences of a state at a time. idle: seconds, for states without their own number in the manifest.

        own: whether sequences begin with an id that the server makes, and with no other.
        """
        self._most, self._idle, self._metrics, self._own = most, idle, metrics, own
        self._kept: defaultdict[str, dict[int | str, _Kept]] = defaultdict(dict)

    def idle(self, model: Model) -> float:
        """Return the idle seconds before a sequence of a model ends."""
        return min((state.idle or self._idle for state in model.states.values()), default=self._idle)

    def owner(self, model: Model, step: Step | None) -> Any:
        """Return who has the models of a sequence that a request goes on with; None: it begins one, or is in none."""
        if step is None or step.start:
            return None
        living = (self._kept[name].get(step.sequence) for name in model.states)
        return next((kept.owner for kept in living if kept is not None), None)

    def begin(self, model: Model, step: Step, owner: Any) -> Turn:
        """Return the turn of a request. owner: of the model, a `Repository`; it stays loaded while the sequence lives.

        Raises RequestError ("conflict", "not-found", "unsupported", "busy").
        """
        shown = f"{model.name}: sequence {strict_json.shown(str(step.sequence))}"
        for name in model.states:
            kept = self._kept[name].get(step.sequence)
            if kept is not None and kept.timer is None:
                raise RequestError("conflict", f"{shown} has a request that is not answered yet: wait for it")
            if kept is None and not step.start:
                what = "does not exist: it has ended, or begins with sequence_start"
                raise RequestError("not-found", f"{shown} {what}")
            if kept is None and self._own and not step.made:
                what = f'cannot begin: this server makes ids: send "{NEW}" as its id'
                raise RequestError("unsupported", f"{shown} {what}")
            if kept is None and len(self._kept[name]) >= self._most:
                what = f"{self._most} others have state already; try again later"
                raise RequestError("busy", f"{shown}: {what}")
        arrays: dict[str, Sequence[Any]] = {}
        for name, state in model.states.items():
            of = self._kept[name]
            kept = of.get(step.sequence)
            if kept is None:
                kept = of[step.sequence] = _Kept(owner, state.idle or self._idle)
                self._metrics.sequences.labels(name).set(len(of))
                owner.enter()
            elif kept.timer is not None:
                kept.timer.cancel()
                kept.timer = None
            known = None if step.start else kept.arrays
            arrays[name] = model.initial(name) if known is None else known
        return Turn(arrays, functools.partial(self._end, step, owner, arrays))

    def _end(self, step: Step, owner: Any, turned: Mapping[str, Sequence[Any]], succeeded: bool) -> None:
        for name, arrays in turned.items():
            kept = self._kept[name][step.sequence]
            if succeeded:
                if step.start and kept.arrays is not None:
                    self._metrics.ended(name, "restarted")
                owner.enter()
                kept.owner.leave()
                kept.owner, kept.arrays = owner, arrays
            consumed = any(isinstance(array, DeviceArray) and array.is_deleted() for array in kept.arrays or ())
            if kept.arrays is None or consumed:
                self._drop(name, step.sequence, "failed")
            elif succeeded and step.end:
                self._drop(name, step.sequence, "end")
            else:
                drop = functools.partial(self._drop, name, step.sequence, "idle")
                kept.timer = asyncio.get_running_loop().call_later(kept.idle, drop)

    def _drop(self, name: str, sequence: int | str, why: str) -> None:
        kept = self._kept[name].pop(sequence)
        self._metrics.sequences.labels(name).set(len(self._kept[name]))
        self._metrics.ended(name, why)
        kept.owner.leave()
