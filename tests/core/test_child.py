"""Calls in a child process: however it ends, the parent gets a value or a ValueError."""

import ctypes
import os
import resource
import sys
import time
from pathlib import Path

import pytest

from stagec.core.data import child


def echo(data: bytes, *more: object) -> object:
    print("native code prints what it likes")
    return [data.decode(), *more]


def refuse(data: bytes) -> object:
    raise ValueError(f"{len(data)} bytes are not what it expects")


def fail(data: bytes) -> object:
    raise RuntimeError(data.decode())


def crash(data: bytes) -> object:
    return ctypes.string_at(0)


def abort(data: bytes) -> object:
    os.write(2, b"F0000 Check failed: " + data)
    os.abort()


def wait(data: bytes) -> object:
    while True:
        time.sleep(1)


def devour(data: bytes) -> object:
    return len(bytearray(1 << 40))


def answer_without_end(data: bytes) -> object:
    return "x" * 2000


def limits(data: bytes) -> object:
    return [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_CORE)]


def test_a_value_comes_back() -> None:
    assert child.call(echo, b"data", 1, {"a": [None]}) == ["data", 1, {"a": [None]}]
    large = b"x" * 10_000_000
    assert child.call(echo, large) == [large.decode()]


def test_a_value_error_comes_back() -> None:
    with pytest.raises(ValueError, match=r"^4 bytes are not what it expects$"):
        child.call(refuse, b"data")


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (crash, "what reads it ended with SIGSEGV"),
        (abort, "what reads it ended with SIGABRT: F0000 Check failed: data"),
        (fail, "what reads it ended with status 1: RuntimeError: data"),
        (devour, "what reads it ended with status 1: MemoryError"),
        (answer_without_end, "what reads it ended with status 1: OSError: [Errno 27] File too large"),
        (wait, "reading it took over 1 seconds, and was ended"),
    ],
)
def test_another_end_is_told(function: object, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "SECONDS", 1 if function is wait else 20)
    monkeypatch.setattr(child, "LARGEST_ANSWER", 1000)
    with pytest.raises(ValueError) as refusal:  # noqa: PT011  (the text is compared)
        child.call(function, b"data")  # type: ignore[arg-type]
    assert str(refusal.value) == what


def test_it_has_limits() -> None:
    assert child.call(limits, b"") == [child.MEMORY, child.SECONDS, 0]


def test_nothing_is_imported_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of downloads may have a file of a module's name."""
    (tmp_path / "json.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    assert child.call(echo, b"data") == ["data"]


def test_without_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(ValueError, match="no process to read it in can be started: No such file or directory"):
        child.call(echo, b"data")
