"""Do the actions of a build that the store does not have, several at a time, with workers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stagec.core.builds.specs import FOLLOWS_MACHINE
from stagec.core.messages.errors import StagecError, blaming
from stagec.core.messages.progress import Progress
from stagec.local import environment
from stagec.local.actions import OUT, Action, Build, Paths
from stagec.local.environment import Workspace, facts
from stagec.local.store import Digests, Made, Store

if TYPE_CHECKING:
    from concurrent import futures

    from stagec.local.pool import Pool
    from stagec.local.remote import Remote
    from stagec.worker.protocol import Response

_FORMAT = 1
"""Of keys."""
_KNOWN = {
    "/abi": "the ABI of Python",
    "/cpu": "the CPU of this machine",
    "/libraries": "LD_LIBRARY_PATH",
    "/packages": "the installed packages, or stagec",
    "/plugin": "the packages of the plugin",
    "/python": "the release of Python",
    "/words": "the command line of the action",
}
"""What is in keys besides files, as people call it. No path of a file in a workspace begins with a slash."""


@dataclass
class Outcome:
    """What a build did.

    made: the digest of each file that is made, by path. reads: the sources that were read. ran: names of actions that
    ran, with their commands, and why. kept: the number of those that the store had, `fetched` of them from a remote
    cache. failed: status and output of those that failed, each output once. said: what others printed.
    """

    made: dict[str, tuple[str, int]] = field(default_factory=dict)
    reads: set[str] = field(default_factory=set)
    ran: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    kept: int = 0
    fetched: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    said: dict[str, None] = field(default_factory=dict)


class Runner:
    """Does the actions of one build."""

    def __init__(
        self,
        build: Build,
        paths: Paths,
        workspace: Workspace,
        store: Store,
        digests: Digests,
        remote: Remote | None = None,
    ) -> None:
        self._build, self._paths, self._workspace, self._store, self._remote = build, paths, workspace, store, remote
        self._digests, self._since = digests, time.monotonic()
        self._facts = {
            platform: {**workspace.facts, "plugin": facts(plugin.split(os.pathsep), digests)["packages"]}
            for platform, plugin in workspace.plugins.items()
        }
        self._missing = set[str]()
        self._taken = dict[str, str]()
        self._name = workspace.name
        self._last = store.last(self._name)
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

    def run(self, pool: Pool, jobs: int, keep_going: bool, progress: Progress) -> Outcome:
        """Do them, `jobs` at a time. keep_going: whether to go on with what needs nothing that failed."""
        waiting = list(self._build.actions)
        with self._remote or contextlib.nullcontext():
            if any(self._ready(waiting)):
                self._run(waiting, pool, jobs, keep_going, progress)
        if self._remote and (said := self._remote.said):
            self.outcome.said[said] = None
        self._digests.save()
        self._store.remember(self._name, self._taken)
        return self.outcome

    def why(self, action: Action) -> list[str]:
        """Return what has changed since the last build of this workspace made what an action makes.

        Those are files, and other things that are in keys. Its inputs must be there.
        """
        taken = self._last.get(action.outputs[0], "")
        key = taken.partition(" ")[0]
        last = next((made for made in self._store.find(key) if made.of(key) == taken), None)
        if not last:
            return ["it was not built here before"]
        now = self._given(action)
        for path in last.reads:
            with contextlib.suppress(KeyError, StagecError):
                now[path] = self._digest(path)
        before = {**last.given, **last.reads}
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return [self._known(name) for name in changed]

    def _known(self, name: str) -> str:
        """Return what people call something in a key."""
        if name == self._paths.names:
            return "files were added or removed"
        if name in self._build.written:
            return f"{os.path.basename(name).removesuffix('.spec.json')} in the manifest"
        return _KNOWN.get(name, name.removeprefix(f"{OUT}/"))

    def _run(self, waiting: list[Action], pool: Pool, jobs: int, keep_going: bool, progress: Progress) -> None:
        from concurrent import futures  # a build in which nothing has changed need not wait for it

        running: dict[futures.Future[Response], Action] = {}
        pool.begin(self._workspace, [self._workspace.facts, *self._facts.values()], self._build.written)
        executor = futures.ThreadPoolExecutor(jobs)
        try:
            while True:
                goes_on = keep_going or not self.outcome.failed
                for _ in range(jobs - len(running) if goes_on else 0):
                    if action := self._next(waiting, pool, jobs):
                        self._place(self._seen(action), pool.root)
                        progress.total = len(self.outcome.ran) + len(running) + 1 + len(waiting)
                        progress.step(self._line([*running.values(), action], len(waiting), jobs))
                        words = action, self._seen(action), pool.worker(action)
                        running[executor.submit(pool.run, *words)] = action
                    elif not pool.prepare(waiting):
                        break
                if not running:
                    break
                ended, _ = futures.wait(running, return_when=futures.FIRST_COMPLETED)
                for future in ended:
                    self._take(running.pop(future), future.result(), pool)
        finally:
            if running:  # no thread waits for an action
                pool.close()
            executor.shutdown()

    def _ready(self, waiting: list[Action]) -> Iterator[Action]:
        """Yield the actions whose inputs are there and whose outputs are not; take out those whose outputs are kept."""
        for action in list(waiting):
            if self._is_ready(action):
                if action.outputs[0] not in self._missing and self._find(action):
                    waiting.remove(action)
                    self.outcome.kept += 1
                else:
                    self._missing.add(action.outputs[0])
                    yield action

    def _next(self, waiting: list[Action], pool: Pool, jobs: int) -> Action | None:
        """Take the next action to do: one that a worker is idle for, or else one that is worth a new worker."""
        ready = list(self._ready(waiting))
        chosen = next((action for action in ready if pool.is_idle(action)), None)
        if chosen is None:
            starts = (action for action in ready if pool.may_start(action, waiting, jobs))
            chosen = next(starts, None)
        if chosen:
            waiting.remove(chosen)
        return chosen

    def _is_ready(self, action: Action) -> bool:
        needed = [*action.inputs, *self._names(action)]
        return all(path in self.outcome.made for path in needed if path.startswith(f"{OUT}/"))

    def _names(self, action: Action) -> list[str]:
        """Return what an action that runs a model has besides sources: their names, and what its modules look for."""
        if not action.runs_model:
            return []
        return [self._paths.names, action.arguments[action.arguments.index("--imports") + 1]]

    def _sources(self, action: Action) -> list[str]:
        """Return the files of which an action that runs a model says what it did not read."""
        return [*self._workspace.sources, *self._names(action)] if action.runs_model else []

    def _seen(self, action: Action) -> list[str]:
        return [*action.inputs, *self._sources(action)]

    def _digest(self, path: str) -> str:
        """Return the digest of an input. Raises StagecError for a source that cannot be read."""
        if path.startswith(f"{OUT}/"):
            return self.outcome.made[path][0]
        with blaming(path):
            return self._digests.of(f"{self._workspace.root}/{path}")

    def _given(self, action: Action) -> dict[str, str]:
        """Return what an action's key has: digests of inputs by their paths, and the rest by its name."""
        facts = {f"/{name}": fact for name, fact in self._facts.get(action.platform, self._workspace.facts).items()}
        if not action.runs_model:  # as rules/toolchain.bzl has it
            del facts["/python"]
        words = json.dumps([_FORMAT, action.command, action.arguments])
        inputs = {path: self._digest(path) for path in action.inputs}
        if any(FOLLOWS_MACHINE in self._build.written.get(path, "") for path in inputs):
            facts["/cpu"] = environment.cpu()
        return {"/words": hashlib.sha256(words.encode()).hexdigest(), **facts, **inputs}

    def _key(self, action: Action) -> str:
        text = json.dumps(self._given(action), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _find(self, action: Action) -> bool:
        """Return whether the store has what an action would make; then note that as made."""
        key = self._key(action)
        for made in self._store.find(key):
            with contextlib.suppress(OSError, KeyError, StagecError):  # a source that is not there any more
                if all(self._digest(path) == digest for path, digest in made.reads.items()) and self._store.has(made):
                    self._note(action, key, made)
                    return True
        if self._remote and (there := self._remote.find(key, action.outputs, self._source_digests(action))):
            self._store.note(key, there._replace(given=self._given(action)))
            self._note(action, key, there)
            self.outcome.fetched += 1
            return True
        return False

    def _source_digests(self, action: Action) -> Callable[[str], str] | None:
        """Return what gives the digest of a source that an action may read, and raises KeyError for another file."""
        sources = {path: path for path in self._sources(action)}
        return (lambda path: self._digest(sources[path])) if action.runs_model else None

    def _note(self, action: Action, key: str, made: Made) -> None:
        self._taken[action.outputs[0]] = made.of(key)
        self.outcome.made.update(made.outputs)
        self.outcome.reads.update(path for path in made.reads if not path.startswith(f"{OUT}/"))

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

    def _take(self, action: Action, response: Response, pool: Pool) -> None:
        """Take what an action made, or what it said of its failure."""
        self.outcome.ran[action.command, action.name] = self.why(action)
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
        key = self._key(action)
        made = self._store.keep(key, pool.root, action.outputs, reads, self._given(action))
        self._note(action, key, made)
        if self._remote:
            self._remote.keep(key, made, action.runs_model)
