"""Isolate actions without namespaces, as in most containers, with the means that every process has.

    action    a process group that it cannot leave: if it ends, all that was started in it ends; a folder on the disk,
              with links to its inputs; no other file that Landlock can keep from it; no socket

In most containers Bazel's own sandbox isolates nothing, so a fork that is confined in part is safer, and three times as
fast. Every kernel has the filter of system calls. So the filter has the two rules that must hold everywhere: no process
leaves its group, so one signal ends all of them, and no process opens a socket. docs/security.md lists the limits.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from stagec.worker import filters, landlock, syscalls
from stagec.worker.jail import MANY, Jail, ending, start_template
from stagec.worker.root import BELOW, DEVICES, MACHINE, packages

_NAMES = "see the names of files and processes"
_CAN = {0: "read and write your files, and end your processes", 1: f"{_NAMES}, and end yours", 6: _NAMES}
"""The remaining abilities of a model, by the first version of Landlock with this limit."""


class Group:
    """The folder of a worker, and the process group of its action."""

    def __init__(self) -> None:
        self._folder = f"{os.environ.get('TMPDIR', '/tmp')}/stagec-worker-{os.urandom(8).hex()}"
        self._group: int | None = None
        self._actions = 0
        os.mkdir(self._folder, 0o700)
        # When the process that Bazel knows is killed, this one has its work to undo.
        atexit.register(self._undo)
        signal.signal(signal.SIGTERM, self._end)
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGTERM)
        # Adopt processes that lose their parent: only then does this process know when all are dead.
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        os.setsid()  # a process can enter groups of its own session

    def by(self) -> str:
        """Describe the isolation of actions, and its limits."""
        version = landlock.version()
        by = f"Landlock {version} and a filter of system calls" if version else "only a filter of system calls"
        return f"they have {by}: a model can {_CAN[max(since for since in _CAN if version >= since)]}"

    def see_packages(self) -> None:
        """Show the packages that are there now: jails have none of their own."""

    def start(self, words: Sequence[str], in_place: bool) -> socket.socket:
        """Start a template, as `Namespaces.start` does."""

        def confine() -> None:
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            syscalls.set_capabilities(0)
            filters.install(filters.of_template(in_group=True))  # first: only then it may restrict itself
            if not in_place:  # to bundle, it writes into Bazel's output folder
                landlock.restrict([self._folder, *DEVICES])

        return start_template(words, confine)

    @contextlib.contextmanager
    def new_files(self) -> Iterator[int]:
        """Make a folder on the disk for an action, and yield a descriptor of it."""
        self._actions += 1
        folder = f"{self._folder}/{self._actions}"
        for path in (folder, f"{folder}/tmp", f"{folder}/work", f"{folder}/{BELOW}"):
            os.mkdir(path, 0o700)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
            remove(folder)

    @contextlib.contextmanager
    def action(
        self, folder: str, inputs: Sequence[str], files: int | None, written: Sequence[str] = ()
    ) -> Iterator[tuple[Jail, list[int]]]:
        """Make the process group of an action, as `Namespaces.action` does."""
        working, read = None, None
        if files is not None:
            own = f"{self._folder}/{self._actions}"
            working, written = f"{own}/{BELOW}", (own, *DEVICES)
            read = [*MACHINE, "/proc", *packages(), *link(folder, inputs, working)]
        group = os.fork()
        if not group:
            with ending():
                _lead()
        try:
            os.setpgid(group, group)
            self._group = group
            yield Jail(working, written, read, group), []
        finally:
            _end(group)
            self._group = None

    def _end(self, *_: Any) -> None:
        self._undo()
        os._exit(1)

    def _undo(self) -> None:
        """Clean up, whatever was interrupted."""
        if self._group is not None:
            _end(self._group)
        with contextlib.suppress(OSError):
            remove(self._folder)


def link(folder: str, inputs: Sequence[str], working: str) -> list[str]:
    """Make links in a new working directory to inputs, which are relative to `folder`; return their targets."""
    made, linked, targets = {""}, set[str](), []
    for name in sorted(inputs):
        parent = name.rpartition("/")[0]
        if parent not in made:
            above = parent
            while above not in made and above not in linked:
                above = above.rpartition("/")[0]
            if above in linked:  # it is seen there: a link here would be made in the input
                continue
            os.makedirs(f"{working}/{parent}", exist_ok=True)
            made.add(parent)
        if parent in linked:
            continue
        targets.append(f"{folder}/{name}")
        with contextlib.suppress(FileExistsError):
            os.symlink(targets[-1], f"{working}/{name}")
        linked.add(name)
    return targets


def _lead() -> None:
    """Be the process that a group is named after, and do nothing more.

    A group without a process is gone, and its number may be given to another one.
    """
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.closerange(0, MANY)
    while True:
        signal.pause()


def _end(group: int) -> None:
    """Kill all processes of a group, and wait until they are dead. None can be made while the kernel does it."""
    while True:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-group, 0)
        time.sleep(0.0002)  # for the template, whose child is the action


def remove(folder: str) -> None:
    """Remove a folder with any content. Nobody may write to it any more.

    Folders below it are moved to it first: of those that are nested deeply, no path is short enough.
    """
    waiting = [folder]
    while waiting:
        path = waiting.pop()
        os.chmod(path, 0o700)
        with os.scandir(path) as entries:
            for entry in list(entries):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                elif path == folder:
                    waiting.append(entry.path)
                else:
                    os.chmod(entry.path, 0o700)
                    waiting.append(f"{folder}/{os.urandom(8).hex()}")
                    os.rename(entry.path, waiting[-1])
        if path != folder:
            os.rmdir(path)
    os.rmdir(folder)
