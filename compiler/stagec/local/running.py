"""Do the actions of a build that the store does not have, several at a time, with workers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stagec.core.messages.errors import StagecError, blaming
from stagec.core.messages.progress import Progress
from stagec.local.actions import OUT, Action, Build, Paths
from stagec.local.environment import Workspace, facts
from stagec.local.store import Digests, Made, Store

if TYPE_CHECKING:
    from concurrent import futures

    from stagec.local.pool import Done, Pool

_FORMAT = 1
"""Of keys. 1: the first one."""


@dataclass
class Outcome:
    """What a build did.

    made: the digest of each file that is made, by path. reads: the sources that were read. ran: names of actions that
    ran, with their commands. kept: the number of those that the store had. failed: status and output of those that
    failed, each output once. said: what others printed.
    """

    made: dict[str, tuple[str, int]] = field(default_factory=dict)
    reads: set[str] = field(default_factory=set)
    ran: list[tuple[str, str]] = field(default_factory=list)
    kept: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    said: dict[str, None] = field(default_factory=dict)


class Runner:
    """Does the actions of one build."""

    def __init__(self, build: Build, paths: Paths, workspace: Workspace, store: Store, digests: Digests) -> None:
        self._build, self._paths, self._workspace, self._store = build, paths, workspace, store
        self._digests, self._since = digests, time.monotonic()
        self._facts = {
            platform: {**workspace.facts, "plugin": facts([plugin], digests)["packages"]}
            for platform, plugin in workspace.plugins.items()
        }
        self.outcome = Outcome()
        self.outcome.made = {
            path: (hashlib.sha256(text.encode()).hexdigest(), len(text.encode()))
            for path, text in build.written.items()
        }

    def undone(self) -> Iterator[tuple[Action, bool]]:
        """Yield the actions that the store does not have, each with whether its inputs are known: it runs for sure."""
        for action in self._build.actions:
            if not self._is_ready(action):
                yield action, False
            elif not self._find(action):
                yield action, True

    def run(self, jobs: int, keep_going: bool, progress: Progress) -> Outcome:
        """Do them, `jobs` at a time. keep_going: whether to go on with what needs nothing that failed."""
        waiting = list(self._build.actions)
        if action := self._next(waiting):
            self._run([action, *waiting], jobs, keep_going, progress)
        self._digests.save()
        return self.outcome

    def _run(self, waiting: list[Action], jobs: int, keep_going: bool, progress: Progress) -> None:
        from concurrent import futures  # a build in which nothing has changed need not wait for it

        from stagec.local.pool import Pool

        running: dict[futures.Future[Done], Action] = {}
        pool = Pool(self._workspace)
        with contextlib.ExitStack() as stack:
            executor = stack.enter_context(futures.ThreadPoolExecutor(jobs))
            stack.enter_context(pool)  # it is left first, so that no thread waits for an action
            while True:
                goes_on = keep_going or not self.outcome.failed
                while goes_on and len(running) < jobs and (action := self._next(waiting)):
                    if pool.root is None:
                        pool.root = self._fill(stack.enter_context(self._store.execution_root()))
                    self._place(self._seen(action), pool.root)
                    progress.total = len(self.outcome.ran) + len(running) + 1 + len(waiting)
                    progress.step(self._line([*running.values(), action], len(waiting), jobs))
                    running[executor.submit(pool.run, action, self._seen(action))] = action
                if not running:
                    break
                if len(running) < jobs and goes_on:
                    pool.prepare(waiting)
                ended, _ = futures.wait(running, return_when=futures.FIRST_COMPLETED)
                for future in ended:
                    self._take(running.pop(future), future.result(), pool)

    def _next(self, waiting: list[Action]) -> Action | None:
        """Take the first action whose inputs are there and whose outputs are not; note those whose outputs are kept."""
        for action in list(waiting):
            if self._is_ready(action):
                waiting.remove(action)
                if not self._find(action):
                    return action
                self.outcome.kept += 1
        return None

    def _is_ready(self, action: Action) -> bool:
        return all(path in self.outcome.made for path in self._seen(action) if path.startswith(f"{OUT}/"))

    def _sources(self, action: Action) -> list[str]:
        """Return the files of which an action that runs a model says what it did not read."""
        if not action.runs_model:
            return []
        looked = action.arguments[action.arguments.index("--imports") + 1]
        return [*self._workspace.sources, self._paths.names, looked]

    def _seen(self, action: Action) -> list[str]:
        return [*action.inputs, *self._sources(action)]

    def _digest(self, path: str) -> str:
        """Return the digest of an input. Raises StagecError for a source that cannot be read."""
        if path.startswith(f"{OUT}/"):
            return self.outcome.made[path][0]
        with blaming(path):
            return self._digests.of(f"{self._workspace.root}/{path}")

    def _key(self, action: Action) -> str:
        facts = dict(self._facts.get(action.platform, self._workspace.facts))
        if not action.runs_model:  # as rules/toolchain.bzl has it
            del facts["python"]
        inputs = {path: self._digest(path) for path in action.inputs}
        text = json.dumps([_FORMAT, action.command, action.arguments, facts, inputs], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _find(self, action: Action) -> bool:
        """Return whether the store has what an action would make; then note that as made."""
        for made in self._store.find(self._key(action)):
            with contextlib.suppress(OSError, KeyError, StagecError):  # a source that is not there any more
                if all(self._digest(path) == digest for path, digest in made.reads.items()) and self._store.has(made):
                    self._note(made)
                    return True
        return False

    def _note(self, made: Made) -> None:
        self.outcome.made.update(made.outputs)
        self.outcome.reads.update(path for path in made.reads if not path.startswith(f"{OUT}/"))

    def _fill(self, root: Path) -> Path:
        """Let an execution root show the workspace, and have the files that are written for it; return it."""
        for entry in os.listdir(self._workspace.root):
            (root / entry).symlink_to(self._workspace.root / entry)
        for name, text in self._build.written.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return root

    def _place(self, inputs: Sequence[str], root: Path) -> None:
        for path in inputs:
            if path in self.outcome.made and path not in self._build.written:
                self._store.place(self.outcome.made[path][0], root / path)

    def _line(self, running: Sequence[Action], waiting: int, jobs: int) -> str:
        """Return what the line of progress says: what runs, and the seconds left, once something has ended."""
        text = ", ".join(f"{action.command.split()[-1]} {action.name}" for action in running)
        if not self.outcome.ran:
            return text
        each = (time.monotonic() - self._since) / len(self.outcome.ran)
        return f"{text}  about {each * (waiting + len(running)) + 1:.0f} s left"

    def _take(self, action: Action, done: Done, pool: Pool) -> None:
        """Take what an action made, or what it said of its failure."""
        assert pool.root
        response, seconds = done
        self.outcome.ran.append((action.command, action.name))
        # A model ran: a link is not a file that the action wrote, whatever it leads to.
        missing = [
            path for path in action.outputs if (pool.root / path).is_symlink() or not (pool.root / path).is_file()
        ]
        output, status = response.output, response.exit_code
        if not status and missing:
            output, status = f"{output}stagec: {action.name} did not write {', '.join(missing)}\n", 1
        reads: dict[str, str] = {}
        if not status:
            sources = self._sources(action)
            if action.runs_model:
                unread = set((pool.root / action.unread).read_text().splitlines())
                reads = {path: self._digest(path) for path in sources if path not in unread}
            read = [f"{self._workspace.root}/{path}" for path in (*action.inputs, *reads) if not path.startswith(OUT)]
            if changed := self._digests.changed(read):
                names = ", ".join(os.path.relpath(path, self._workspace.root) for path in changed)
                output, status = f"{output}{names} changed while {action.name} was made: build again\n", 2
        if status:
            self.outcome.failed.setdefault(output, status)
            return
        if output:
            self.outcome.said[output] = None
        self._note(self._store.keep(self._key(action), pool.root, action.outputs, reads, seconds))
