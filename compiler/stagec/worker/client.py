"""The other side of a worker: have it do actions, as Bazel does."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from stagec.worker.protocol import Request, Response

_LOG = 4096
"""The most bytes of a dead worker's log to show."""


class Client:
    """A worker of one command.

    It is a process of a session of its own: Ctrl-C is for the caller, who closes it. It ends with the caller too.
    """

    def __init__(self, command: Sequence[str], root: Path, environment: Mapping[str, str]) -> None:
        """Start it. command: the words that run the command of stagec. root: the execution root."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `wait` closes it
        self._process = subprocess.Popen(
            [*command, "--persistent_worker"],
            cwd=root,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )

    @property
    def is_alive(self) -> bool:
        """Whether it can do another action."""
        return self._process.poll() is None

    def run(self, arguments: Sequence[str], inputs: Sequence[str], outputs: Sequence[str]) -> Response:
        """Have it do an action. All paths are relative to the execution root; only `outputs` are taken from it."""
        declared = [word for path in outputs for word in ("--declared", path)]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(Request((*arguments, *declared), tuple(inputs)).encode())
            self._process.stdin.flush()
            return Response.read(self._process.stdout)
        except (EOFError, OSError):
            self._process.wait()
            self._log.seek(0)
            said = self._log.read()[-_LOG:].decode("utf-8", "replace")
            return Response(1, f"{said}stagec: the worker ended with status {self._process.returncode}\n")

    def close(self) -> None:
        """End it, in the middle of an action or not."""
        assert self._process.stdin
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def wait(self) -> None:
        """Wait for its end, after `close`."""
        assert self._process.stdout
        self._process.wait()
        self._process.stdout.close()
        self._log.close()
