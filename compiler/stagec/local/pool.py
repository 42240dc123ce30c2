"""The workers of a build, and what they did."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from stagec.local import environment
from stagec.local.actions import Action
from stagec.local.environment import Workspace
from stagec.worker.client import Client
from stagec.worker.protocol import Response


class Done(NamedTuple):
    """How an action ended, and the seconds that it took."""

    response: Response
    seconds: float


class Pool:
    """The workers of a build: of each kind, as many as there are actions of that kind at a time.

    root: the execution root; None: there is none yet, and no worker.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.root: Path | None = None
        self._workspace = workspace
        self._idle: dict[tuple[str, str], list[Client]] = {}
        self._all: list[Client] = []
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
            for client in self._all:
                client.close()
        for client in self._all:
            client.wait()

    def run(self, action: Action, inputs: Sequence[str]) -> Done:
        """Do an action."""
        assert self.root
        started = time.monotonic()
        if action.command == "action imports":  # it reads text, and needs no worker
            response = self._alone(action)
        else:
            kind = self._kind(action)
            client = self._take(kind)
            if client is None:
                return Done(Response(1), 0.0)
            outputs = [*action.outputs, *([action.unread] if action.runs_model else [])]
            response = client.run(action.arguments, inputs, outputs)
            with self._lock:
                self._idle.setdefault(kind, []).append(client)
        return Done(response, time.monotonic() - started)

    def prepare(self, waiting: Sequence[Action]) -> None:
        """Start a worker for the next actions where there is none: it imports packages while others compute."""
        kinds = [self._kind(action) for action in waiting]
        kind = next((kind for kind in kinds if kind not in self._idle), None)
        if kind and (client := self._take(kind)):
            with self._lock:
                self._idle.setdefault(kind, []).append(client)

    def _kind(self, action: Action) -> tuple[str, str]:
        return action.command, action.platform if action.platform in self._workspace.plugins else "cpu"

    def _take(self, kind: tuple[str, str]) -> Client | None:
        """Return an idle worker of a kind, or a new one; None: the build ends."""
        command, platform = kind
        assert self.root
        with self._lock:
            if self._closed:
                return None
            idle = self._idle.setdefault(kind, [])
            if idle:
                return idle.pop()
            words = [*environment.command(), *command.split()]
            client = Client(words, self.root, self._variables(platform))
            self._all.append(client)
            return client

    def _variables(self, platform: str) -> dict[str, str]:
        plugin = self._workspace.plugins.get(platform)
        return environment.variables([*self._workspace.packages, *([plugin] if plugin else [])])

    def _alone(self, action: Action) -> Response:
        words = [*environment.command(), *action.command.split(), *action.arguments]
        done = subprocess.run(
            words, cwd=self.root, env=self._variables("cpu"), check=False, capture_output=True, text=True
        )
        return Response(done.returncode, done.stdout + done.stderr)
