"""A process that imports once what several commands need, and forks for each of them."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from stagec.core.builds import actions
from stagec.core.messages.errors import mistake

OPTION = "--forks"
"""The first word of the process's command line; modules follow."""


class Forks:
    """The process: `with Forks("stagec.cli.actions.golden:preload") as forks: forks.run(["action", "golden", ...])`.

    It has the variables of actions, and the packages of this process. It imports no model and starts no XLA client, so
    each command begins as in a process of its own.
    """

    def __init__(self, *modules: str) -> None:
        """modules: what it imports, and a function that it calls then, if one is named."""
        self._modules = modules

    def __enter__(self) -> Self:
        variables = {**actions.ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [*actions.command(), OPTION, *self._modules],
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def run(self, words: Sequence[str | Path], variables: Mapping[str, str] | None = None) -> None:
        """Run a command of stagec. Raises StagecError with what it printed, if it fails.

        variables: of its environment, besides those that it has anyway.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead, and its answer empty
            print(json.dumps([list(map(str, words)), dict(variables or {})]), file=self._process.stdin, flush=True)
        status, printed = json.loads(self._process.stdout.readline() or '[1, ""]')
        if status:
            raise mistake(printed.strip() or f"stagec {' '.join(map(str, words[:2]))} ended with status {status}")


def serve(modules: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Be the process, until nobody writes to stdin; return its exit status. run: runs a command; returns a status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is imported may print
    for name in modules:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    for line in sys.stdin:
        words, variables = json.loads(line)
        with tempfile.TemporaryFile() as printed:
            child = os.fork()
            if not child:
                status = 1
                try:
                    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                    for descriptor in (1, 2):
                        os.dup2(printed.fileno(), descriptor)
                    os.environ.update(variables)
                    status = run(words)
                except BaseException:  # noqa: BLE001 - a model raises anything
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            _, how = os.waitpid(child, 0)
            printed.seek(0)
            answer = [os.waitstatus_to_exitcode(how), printed.read().decode("utf-8", "replace")]
        print(json.dumps(answer), file=answers, flush=True)
    return 0
