"""The workers of builds, and what they did."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from stagec.local import environment
from stagec.local.actions import OUT, Action
from stagec.local.environment import Workspace
from stagec.local.store import Store

if TYPE_CHECKING:
    from stagec.worker.client import Client
    from stagec.worker.protocol import Response

_Kind = tuple[str, str]
"""What a worker is for: a command, and the packages that it has."""


class Pool:
    """The workers of a build, and of those after it: of each kind, as many as there are actions of it at a time.

    store: of the builds. root: their execution root. It is made with the first worker, which need not wait for a plan.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._held = contextlib.ExitStack()
        self._root: Path | None = None
        self._workspace: Workspace | None = None  # of the build, once there is a plan
        self._facts: Sequence[Mapping[str, str]] = ()
        self._idle: defaultdict[_Kind, list[Client]] = defaultdict(list)
        self._all: list[Client] = []
        self._number = Counter[_Kind]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._held.close()

    @property
    def root(self) -> Path:
        """The execution root."""
        if self._root is None:
            self._root = self._held.enter_context(self.store.execution_root())
        return self._root

    def begin(self, workspace: Workspace, facts: Sequence[Mapping[str, str]], written: Mapping[str, str]) -> None:
        """Let the root show a workspace, and have the files that are written for a build.

        facts: of all packages. Workers that have others end.
        """
        if facts != self._facts:
            if self._facts:
                self.close()
            self._facts = facts
        self._workspace = workspace
        with os.scandir(self.root) as entries:  # of the build before
            for entry in list(entries):
                shutil.rmtree(entry) if entry.name == OUT else os.unlink(entry.path)
        for name in os.listdir(workspace.root):
            if name != OUT:
                (self.root / name).symlink_to(workspace.root / name)
        for name, text in written.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)

    def worker(self, action: Action) -> Client | None:
        """Return a worker for an action; None if it needs none."""
        if not action.in_worker:
            return None
        kind = self._kind(action)
        return self._idle[kind].pop() if self._has_idle(kind) else self._start(kind)

    def run(self, action: Action, inputs: Sequence[str], client: Client | None) -> Response:
        """Do an action, with the worker for it."""
        if client is None:
            return self._alone(action)
        outputs = [*action.outputs, *([action.unread] if action.runs_model else [])]
        response = client.run(action.arguments, inputs, outputs)
        self._idle[self._kind(action)].append(client)
        return response

    def is_idle(self, action: Action) -> bool:
        """Return whether an action can be done without a new worker."""
        return not action.in_worker or self._has_idle(self._kind(action))

    def _has_idle(self, kind: _Kind) -> bool:
        idle = self._idle[kind]
        for client in [client for client in idle if not client.is_alive]:  # not in `run`, which is in threads
            idle.remove(client)
            self._number[kind] -= 1
        return bool(idle)

    def may_start(self, action: Action, waiting: Sequence[Action], jobs: int) -> bool:
        """Return whether an action is worth a new worker.

        It is not if another kind has fewer workers and enough to do: of two cores, one exports and one compiles. Each
        worker less is 0.7 CPU seconds less.
        """
        kind = self._kind(action)
        others = Counter(self._kind(other) for other in waiting)
        return all(self._number[kind] <= self._number[other] for other, many in others.items() if many >= jobs)

    def prepare(self, waiting: Sequence[Action]) -> bool:
        """Start a worker for the next actions whose kind has none: it imports packages while others compute.

        Return whether there was one to start.
        """
        for action in waiting:
            kind = self._kind(action)
            if action.in_worker and not self._number[kind]:
                self._idle[kind].append(self._start(kind))
                return True
        return False

    def expect(self, packages: Sequence[str]) -> None:
        """Start the worker that any build needs first, which exports."""
        kind = "action export", os.pathsep.join(packages)
        if not self._number[kind]:
            self._idle[kind].append(self._start(kind))

    def _start(self, kind: _Kind) -> Client:
        from stagec.worker.client import Client  # a build in which nothing has changed need not wait for it

        command, packages = kind
        words = [*environment.command(), *command.split()]
        client = Client(words, self.root, environment.variables(packages.split(os.pathsep)))
        self._all.append(client)
        self._number[kind] += 1
        return client

    def close(self) -> None:
        """End all workers, in the middle of an action or not."""
        for client in self._all:
            client.close()
        for client in self._all:
            client.wait()
        self._idle.clear()
        self._all.clear()
        self._number.clear()

    def _kind(self, action: Action) -> _Kind:
        assert self._workspace
        plugin = self._workspace.plugins.get(action.platform)
        return action.command, os.pathsep.join([*self._workspace.packages, *([plugin] if plugin else [])])

    def _alone(self, action: Action) -> Response:
        import subprocess

        from stagec.worker.protocol import Response

        command, packages = self._kind(action)
        words = [*environment.command(), *command.split(), *action.arguments]
        variables = environment.variables(packages.split(os.pathsep))
        done = subprocess.run(words, cwd=self.root, env=variables, check=False, capture_output=True, text=True)
        return Response(done.returncode, done.stdout + done.stderr)
