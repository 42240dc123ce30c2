"""Who compiles in this process: any number of threads for the machine as it is, or one for another machine.

While a thread compiles for a target, all of XLA in this process is shown the target's CPU (patches/machine_code.py).
Other code that asks about the machine meanwhile would believe it: making a client, compiling for this machine, loading
an executable. Each of these waits. Running an executable asks for nothing, and does not wait.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Turns:
    """together: the number of threads that compile for this machine. alone: the one that does for another, or 0."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.together = 0
        self.alone = 0


_TURNS = _Turns()


@contextlib.contextmanager
def for_this_machine() -> Iterator[None]:
    """Wait until no other thread compiles for another machine, and let none begin inside the `with` statement."""
    with _TURNS.changed:
        _TURNS.changed.wait_for(lambda: _TURNS.alone in (0, threading.get_ident()))
        _TURNS.together += 1
    try:
        yield
    finally:
        with _TURNS.changed:
            _TURNS.together -= 1
            _TURNS.changed.notify_all()


@contextlib.contextmanager
def for_another_machine() -> Iterator[None]:
    """Wait until no other thread compiles, and let none begin inside the `with` statement.

    Raises RuntimeError if this thread compiles for another machine already: it would wait for itself.
    """
    me = threading.get_ident()
    if _TURNS.alone == me:
        raise RuntimeError("this thread compiles for another machine already")
    with _TURNS.changed:
        _TURNS.changed.wait_for(lambda: not _TURNS.alone and not _TURNS.together)
        _TURNS.alone = me
    try:
        yield
    finally:
        with _TURNS.changed:
            _TURNS.alone = 0
            _TURNS.changed.notify_all()
