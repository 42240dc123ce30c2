"""A clock and random numbers that are the same in each build, for the code of a model.

Where a model reads a clock, it is the start of 2020 and some microseconds. Where it draws random numbers without a
seed of its own, they come from a fixed one. Both go on as usual: a second reading is later, a second number is another
one. JAX, and code that waits for threads and processes, has the real clock. Native code that asks the system itself is
not seen here, nor is another process.
"""

from __future__ import annotations

import calendar
import contextlib
import datetime
import functools
import hashlib
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from stagec.frontends.common import patched

START = calendar.timegm((2020, 1, 1, 0, 0, 0)) * 10**9
"""When a model is traced, in ns of Unix time."""
_TICK = 1000
"""The ns that pass with each reading, so that a loop that waits for a time ends."""
_SEED = 20200101
_Function: TypeAlias = Callable[..., Any]
_HAVE_THE_REAL_CLOCK = frozenset(
    {"asyncio", "concurrent", "jax", "jaxlib", "logging", "multiprocessing", "queue", "selectors", "socket", "stagec"}
    | {"subprocess", "threading"}
)
"""Packages that measure, or that wait for something outside a model's clock."""


_State: TypeAlias = tuple[int, int, Any, Any]
"""What determines the next reading and random number: clock and drawn blocks, and the states of Python and NumPy."""


class _World:
    """The clock and the entropy of a process that traces. clock: in ns. drawn: blocks of entropy so far."""

    def __init__(self) -> None:
        self.depth = 0
        self.clock, self.drawn = START, 0

    def read(self) -> int:
        self.clock += _TICK
        return self.clock

    def entropy(self, size: int) -> bytes:
        blocks = b""
        while len(blocks) < size:
            blocks += hashlib.sha256(b"stagec %d" % self.drawn).digest()
            self.drawn += 1
        return blocks[:size]


_WORLD = _World()
_STATES: dict[str, _State] = {}


@contextlib.contextmanager
def clock_and_chance() -> Iterator[None]:
    """Have a model read the same clock and draw the same random numbers in each process, inside `with`.

    Local time is UTC. Afterwards everything is restored. It affects all threads: trace in only one.
    """
    if _WORLD.depth:
        yield
        return
    import numpy.random  # its global generator would otherwise be seeded in some processes and not in others

    before, zone = _state(), os.environ.get("TZ")
    with contextlib.ExitStack() as changes:
        for patches, instead in _CHANGES:
            for patch in patches:
                changes.enter_context(patch.by(instead))
        changes.callback(_restore, before)
        changes.callback(_zone, zone)
        _zone("UTC")
        _WORLD.clock, _WORLD.drawn = START, 0
        random.seed(_SEED)
        numpy.random.seed(_SEED)
        _WORLD.depth += 1
        try:
            yield
        finally:
            _WORLD.depth -= 1


def again(what: str) -> None:
    """Reset the clock and random numbers to their state at the first call with this `what`.

    So a function that is traced twice is the same twice. Outside `clock_and_chance` it does nothing.
    """
    if not _WORLD.depth:
        return
    if what in _STATES:
        _restore(_STATES[what])
    else:
        _STATES[what] = _state()


def _state() -> _State:
    import numpy.random

    return _WORLD.clock, _WORLD.drawn, random.getstate(), numpy.random.get_state(legacy=False)


def _restore(state: _State) -> None:
    import numpy.random

    _WORLD.clock, _WORLD.drawn, of_python, of_numpy = state
    random.setstate(of_python)
    numpy.random.set_state(of_numpy)


def _zone(name: str | None) -> None:
    if name is None:
        os.environ.pop("TZ", None)
    else:
        os.environ["TZ"] = name
    time.tzset()


def _is_real() -> bool:
    """Whether the module that reads the clock has the real one."""
    return patched.caller().partition(".")[0] in _HAVE_THE_REAL_CLOCK


def _seconds() -> float:
    return _WORLD.read() / 10**9


def _read(before: _Function, *clock: int) -> Any:
    return before(*clock) if _is_real() else _seconds()


def _read_ns(before: _Function, *clock: int) -> Any:
    return before(*clock) if _is_real() else _WORLD.read()


def _convert(before: _Function, seconds: float | None = None) -> Any:
    return before(_seconds() if seconds is None and not _is_real() else seconds)


def _format(before: _Function, *given: Any) -> Any:  # the time is the last of one or two arguments, and may be missing
    whole = given and not isinstance(given[-1], str)
    return before(*given) if whole or _is_real() else before(*given, time.gmtime(_seconds()))


def _now(before: _Function, cls: Any, tz: Any = None) -> Any:
    return before(cls, tz) if _is_real() else cls.fromtimestamp(_seconds(), tz)


def _utcnow(before: _Function, cls: Any) -> Any:
    return before(cls) if _is_real() else cls.fromtimestamp(_seconds(), datetime.UTC).replace(tzinfo=None)


def _today(before: _Function, cls: Any) -> Any:
    return before(cls) if _is_real() else cls.fromtimestamp(_seconds())


def _sleep(before: _Function, seconds: float) -> None:
    before(seconds)
    _WORLD.clock += round(float(seconds) * 10**9)


def _seed(before: _Function, a: Any = None, version: int = 2) -> None:
    before(_WORLD.entropy(32) if a is None else a, version)


def _seed_of_class(before: _Function, generator: Any, a: Any = None, version: int = 2) -> None:
    _seed(functools.partial(before, generator), a, version)


_CHANGES: tuple[tuple[Sequence[patched.Patch], _Function], ...] = (
    (patched.CLOCKS, _read),
    (patched.CLOCKS_IN_NS, _read_ns),
    (patched.CONVERTED_TIMES, _convert),
    (patched.FORMATTED_TIMES, _format),
    ((patched.NOW,), _now),
    ((patched.UTCNOW,), _utcnow),
    ((patched.TODAY,), _today),
    ((patched.SLEEP,), _sleep),
    (patched.ENTROPY, lambda before, size, flags=0: _WORLD.entropy(size)),
    ((patched.SEED,), _seed),
    ((patched.SEED_OF_CLASS,), _seed_of_class),
    ((patched.UUID1,), lambda before, node=None, clock_seq=None: uuid.UUID(bytes=_WORLD.entropy(16), version=1)),
    ((patched.NODE,), lambda before: 0x020000000000),  # an address that no maker gives
)
