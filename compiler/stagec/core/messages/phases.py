"""The time of an action's phases, and its memory: `--profile FILE` writes them.

They differ each time, so they are a separate output, which no action reads.
An instant belongs to one phase. `phase` names what is done inside a `with` statement; nothing is recorded outside
`start` and `report`.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

OTHER = "other"
"""The phase of instants in no other phase."""


@dataclass
class _Recorder:
    """Spans so far, (phase, start, seconds) with the start in seconds after `clock`, and the phase of the present."""

    started: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.monotonic)
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    phase: str = OTHER
    since: float = 0.0

    def enter(self, name: str) -> str:
        """Begin a phase; return the previous one."""
        before, now = self.phase, time.monotonic() - self.clock
        self.spans.append((before, self.since, now - self.since))
        self.phase, self.since = name, now
        return before


_current: contextvars.ContextVar[_Recorder | None] = contextvars.ContextVar("recorder", default=None)


def start() -> None:
    """Begin to record."""
    _current.set(_Recorder())


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the time inside a `with` statement as this phase, and not as the one around it."""
    recorder = _current.get()
    if recorder is None:
        yield
        return
    before = recorder.enter(name)
    try:
        yield
    finally:
        recorder.enter(before)


def passed(name: str, seconds: float) -> None:
    """Count the last `seconds` as this phase, whatever they were counted as: a phase may be known only afterwards."""
    recorder = _current.get()
    if recorder is None:
        return
    recorder.enter(recorder.phase)
    begin = max(0.0, recorder.since - seconds)
    kept = [(span_name, at, min(length, begin - at)) for span_name, at, length in recorder.spans if at < begin]
    recorder.spans = [*kept, (name, begin, recorder.since - begin)]


def report(command: str, artifact: str) -> str:
    """Stop the recording; return it as JSON.

    format, kind: 1, "profile". command, artifact: the command of stagec, and the name of its artifact.
    started: when, in seconds since 1970. seconds: from then to now. max_rss: the most bytes of memory that this process
    has had; it may have done other actions before.
    phases: [phase, start, seconds] in the order of time; a start is in seconds after `started`.
    """
    recorder = _current.get()
    if recorder is None:
        raise RuntimeError("nothing was recorded: call start before")
    recorder.enter(OTHER)
    _current.set(None)
    profile = {
        "format": 1,
        "kind": "profile",
        "command": command,
        "artifact": artifact,
        "started": round(recorder.started, 6),
        "seconds": round(recorder.since, 6),
        "max_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "phases": [[name, round(at, 6), round(length, 6)] for name, at, length in recorder.spans if length >= 1e-6],
    }
    return json.dumps(profile) + "\n"
