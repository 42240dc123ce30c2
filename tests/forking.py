"""Run commands of stagec in forks of a process that has imported what they need, as Bazel's workers do.

Most tests run many short commands, and importing takes more time than what they do: tests/building/test_limits.py and
tests/frontends/test_keys.py took 190 s with new processes, and 47 s with forks. Unlike a worker's, these forks see all
files, and Bazel's protocol has no part in them.
"""

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# What templates import that are not of one command of Bazel's workers.
SHARED = {
    "plan": ("stagec.manifest.planning",),  # it has no worker, but all tests of manifests run it
    "readers": (
        "stagec.loader",
        "stagec.audit.explanation",
        "stagec.audit.inspection",
        "stagec.building.compilation",
    ),
}


class Template:
    """A process that has imported what `stagec action COMMAND` needs, or one of SHARED, and forks for each call."""

    def __init__(self, command: str, python: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [*python, __file__, command], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, arguments: Sequence[str], cwd: Path, path: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command with these arguments (its name is the first) in a folder; return what it printed.

        path: where it looks for programs.
        """
        assert self._process.stdin
        assert self._process.stdout
        with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as said:
            files = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (printed, said)]
            self._process.stdin.write(json.dumps([arguments, str(cwd), files, path]) + "\n")
            self._process.stdin.flush()
            status = os.waitstatus_to_exitcode(int(self._process.stdout.readline()))
            return subprocess.CompletedProcess(arguments, status, _text(printed), _text(said))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def _serve(command: str) -> None:
    """Fork for each line of stdin until it is closed, and answer each with the fork's status."""
    from stagec.cli import main

    answers, requests = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    gc.disable()
    for module in SHARED.get(command, ()):
        importlib.import_module(module)
    if command not in SHARED:
        importlib.import_module(f"stagec.cli.actions.{command}").preload()
    gc.freeze()
    for line in requests:
        child = os.fork()
        if not child:
            _work(*json.loads(line), main)
        answers.write(f"{os.waitpid(child, 0)[1]}\n")
        answers.flush()


def _work(arguments: list[str], cwd: str, files: list[str], path: str, main: Any) -> None:
    status = 1
    try:
        gc.enable()
        for descriptor, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY), descriptor)
        os.chdir(cwd)
        if path:
            os.environ["PATH"] = path
        status = main(arguments)
    except SystemExit as error:  # argparse
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - it is printed, as Python would
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve(sys.argv[1])
