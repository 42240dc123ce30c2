"""Progress is shown on a terminal, and nowhere else: commands run with a pseudo-terminal as stderr."""

import contextlib
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.building import COMPILER, ROOT, action_environment, checked

WORK = """
import time
from stagec.core.messages.progress import Progress

with Progress("reproduce", 2) as progress:
    progress.step("models.scale")
    time.sleep({0})
    progress.step("models.scale.cpu")
    time.sleep({1})
print("done")
"""


def on_a_terminal(*command: str, env: dict[str, str] | None = None) -> tuple[str, str]:
    """Run a command whose stderr is a terminal; return what it printed, and what the terminal got."""
    ours, theirs = pty.openpty()
    environment = {**action_environment(), "TERM": "xterm", **(env or {})}
    shown = bytearray()

    def read() -> None:
        # A terminal that nobody reads takes some kilobytes, and then lets the command wait.
        with contextlib.suppress(OSError):  # Linux says so that the command has closed it
            while piece := os.read(ours, 65536):
                shown.extend(piece)

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True) as process:
        os.close(theirs)
        reader = threading.Thread(target=read)
        reader.start()
        printed = process.communicate()[0]
    reader.join()
    os.close(ours)
    assert process.returncode == 0, shown.decode()
    return printed, shown.decode()


def test_a_step_is_shown_with_its_number_and_seconds_and_the_line_goes_away() -> None:
    printed, shown = on_a_terminal(sys.executable, "-c", WORK.format(0.7, 1.2))
    lines = shown.split("\r\x1b[2K")
    assert printed == "done\n"
    assert lines[:2] == ["", "reproduce 1 of 2  models.scale  0:00"]
    assert "reproduce 2 of 2  models.scale.cpu  0:01" in lines
    assert lines[-1] == ""


def test_what_is_over_soon_shows_nothing() -> None:
    assert on_a_terminal(sys.executable, "-c", WORK.format(0, 0)) == ("done\n", "")


def test_a_terminal_that_cannot_move_its_cursor_shows_nothing() -> None:
    assert on_a_terminal(sys.executable, "-c", WORK.format(0.7, 0), env={"TERM": "dumb"}) == ("done\n", "")


def test_a_pipe_gets_nothing() -> None:
    command = [sys.executable, "-c", WORK.format(0.7, 0)]
    done = subprocess.run(command, env={**action_environment(), "TERM": "xterm"}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("done\n", "")


@pytest.mark.pinned
def test_reproduce_shows_each_build(zoo: Path, tmp_path: Path) -> None:
    name, exported = "zoo.loop", tmp_path / "zoo.loop.exported"
    shutil.copytree(ROOT / "tests" / "zoo", tmp_path / "tests" / "zoo")
    with (tmp_path / "tests" / "zoo" / "zoo.py").open("a") as model:
        # More than the second after which the next line appears.
        model.write("\nimport hashlib\n\nhashlib.scrypt(b'', salt=b'', n=2**14, r=8, p=20)\n")
    # Built here: Bazel builds the zoo with other packages than the tests have.
    spec = zoo.with_name(f"{name}.spec")
    outputs = ["--output", exported, "--description", f"{exported}.json"]
    checked("action", "export", "--spec", spec, *outputs, "--import-root", tmp_path)
    words = [name, str(spec), str(exported), f"{exported}.json"]
    start = [sys.executable, "-B", str(COMPILER / "stagec" / "__main__.py")]
    printed, shown = on_a_terminal(*start, "reproduce", "--export", ":".join(words), "--import-root", str(tmp_path))
    # Some CPUs cannot be shown to a build as others: then there is another line.
    assert printed.splitlines()[0] == "1 artifacts built twice again, 0 differences"
    assert [n for n in (1, 2) if not re.search(rf"reproduce {n} of 2  zoo\.loop  \d:\d\d", shown)] == []
