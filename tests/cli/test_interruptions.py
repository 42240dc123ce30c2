"""Ctrl-C, a full disk, and a reader that goes away: no traceback, and no half of a file.

Modules: `__main__.py`, `cli/schema.py`.
"""

import fcntl
import os
import select
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tests.building import COMPILER, PYTHON, action_environment
from tests.registries import Hostile, needs_registry

COMMAND = [*PYTHON, str(COMPILER / "stagec" / "__main__.py")]


def start(*words: str | Path, stdout: int = subprocess.PIPE) -> "subprocess.Popen[str]":
    command = [*COMMAND, *map(str, words)]
    options = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(command, env=action_environment(), **options)  # type: ignore[call-overload,no-any-return]


def interrupt(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Send what Ctrl-C in a terminal does, to the command and to what it started."""
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    return process.returncode, error


@needs_registry
def test_a_pull_is_interrupted(tmp_path: Path) -> None:
    registry = Hostile()
    registry.silent = True
    try:
        process = start("pull", f"{registry.host}/x:1", tmp_path / "x", "--plain-http")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not children.read_text():
            time.sleep(0.05)
        assert interrupt(process) == (130, "")
    finally:
        registry.close()
    assert not (tmp_path / "x").exists()


def test_writing_is_interrupted(tmp_path: Path) -> None:
    """The command waits for somebody who reads the pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)  # less than a schema
    process = start("schema", "--output", pipe)
    assert select.select([reader], [], [], 60)[0]
    time.sleep(0.5)
    assert interrupt(process) == (130, "")
    os.close(reader)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize("words", [["schema"], ["--help"], ["targets"], ["schema", "--output", "/dev/stdout"]])
def test_stdout_is_full(words: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        process = start(*words, stdout=full.fileno())
        _, error = process.communicate()
    name = "/dev/stdout" if "--output" in words else f"stdout, or a temporary file in {tempfile.gettempdir()}"
    assert (process.returncode, error) == (2, f"{name}: cannot be written: No space left on device\n")


def test_nobody_reads_any_more() -> None:
    reads, writes = os.pipe()
    process = start("schema", stdout=writes)
    for descriptor in (reads, writes):
        os.close(descriptor)
    _, error = process.communicate()
    assert (process.returncode, error) == (141, "")
