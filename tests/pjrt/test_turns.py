"""Who compiles in a process: several threads for this machine, or one for another."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from stagec.pjrt import turns

SOON = 0.2


def inside(turn: Callable[[], AbstractContextManager[None]], leave: threading.Event) -> threading.Event:
    """Start a thread that takes a turn until `leave`; return what it sets inside."""
    entered = threading.Event()

    def take() -> None:
        with turn():
            entered.set()
            leave.wait(10)

    threading.Thread(target=take, daemon=True).start()
    return entered


def test_several_threads_compile_for_this_machine() -> None:
    leave = threading.Event()
    first, second = (inside(turns.for_this_machine, leave) for _ in range(2))
    assert first.wait(10)
    assert second.wait(10)
    another = inside(turns.for_another_machine, leave)
    assert not another.wait(SOON)
    leave.set()
    assert another.wait(10)


def test_a_thread_compiles_for_another_machine_alone() -> None:
    leave = threading.Event()
    assert inside(turns.for_another_machine, leave).wait(10)
    others = [inside(turn, leave) for turn in (turns.for_this_machine, turns.for_another_machine)]
    assert not others[0].wait(SOON)
    assert not others[1].is_set()
    leave.set()
    assert all(other.wait(10) for other in others)


def test_a_turn_ends_with_an_error() -> None:
    for turn in (turns.for_another_machine, turns.for_this_machine, turns.for_another_machine):
        with pytest.raises(ValueError, match="no"), turn():
            raise ValueError("no")


def test_a_thread_does_not_wait_for_itself() -> None:
    with turns.for_another_machine(), turns.for_this_machine():
        pass
    with (
        turns.for_another_machine(),
        pytest.raises(RuntimeError, match="already"),
        turns.for_another_machine(),
    ):
        pass
