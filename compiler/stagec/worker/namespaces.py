"""The namespaces of a worker, and of each of its actions.

    worker    a user namespace, in which it may make others; the files of the machine
    action    a PID namespace, whose end is the end of all that was started in it; a root of its own (root.py)

An action has no capability in any of them, so it cannot change mounts. It sees no process but its own, and has no
descriptor but those that it is given.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator, Sequence

from stagec.worker import filters, root, syscalls
from stagec.worker.jail import LONGEST, MANY, Jail, end_with, ending, expect, keep_open, start_template
from stagec.worker.root import packages

_KINDS = ("pid", "mnt")
"""The namespaces of an action, by the names of /proc/PID/ns."""
_PR_CAP_AMBIENT, _RAISE = 47, 2
_CAP_SYS_CHROOT, _CAP_SYS_ADMIN = 18, 21


class Namespaces:
    """The namespaces of this process (the worker) from here on."""

    def __init__(self) -> None:
        """Leave those of the machine. From here on this is a child of the process that was called.

        Raises OSError if the system does not let this process do so.
        """
        with _users_written_by_another():
            syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID)
        # The machine's unmounts take effect here; nothing goes the other way.
        syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_SLAVE)
        self._shown = packages()
        self._root = root.make(self._shown)
        _go_on_in_a_child()
        self._processes = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def see_packages(self) -> None:
        """Show the packages that are there now. Bazel makes a repository again as a new folder."""
        root.unmount(self._root)
        self._shown = packages()
        self._root = root.make(self._shown)

    def start(self, words: Sequence[str], in_place: bool) -> socket.socket:
        """Start a template, and return its connection (`start_template`). in_place: whether it sees all files."""

        def confine() -> None:
            if not in_place:
                root.enter(self._root, self._shown, syscalls.new_tmpfs())
            # To enter namespaces takes these two. An ordinary user's next program gets no others.
            syscalls.set_capabilities(1 << _CAP_SYS_CHROOT | 1 << _CAP_SYS_ADMIN)
            for capability in (_CAP_SYS_CHROOT, _CAP_SYS_ADMIN):
                syscalls.prctl(_PR_CAP_AMBIENT, _RAISE, capability)
            filters.install(filters.of_template(in_group=False))

        return start_template(words, confine)

    @contextlib.contextmanager
    def new_files(self) -> Iterator[int]:
        """Make a folder in memory for an action, and yield a descriptor of it."""
        descriptor = syscalls.new_tmpfs()
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def action(
        self, folder: str, inputs: Sequence[str], files: int | None, written: Sequence[str] = ()
    ) -> Iterator[tuple[Jail, list[int]]]:
        """Make the namespaces of an action. When the block is left, all processes in them are dead.

        inputs: paths relative to `folder`. files: of `new_files`; None: it sees the files of the worker.
        written: folders that it may write to, where it does.
        Gives the jail, and descriptors of its namespaces: that of processes first. Raises OSError if the system
        does not let it.
        """
        descriptors: list[int] = []
        ours, theirs = socket.socketpair()
        syscalls.unshare(syscalls.CLONE_NEWPID)
        # The kernel ends all processes of a PID namespace with its first one, also those that left their parents.
        first = os.fork()
        if not first:
            with ending(theirs.fileno()):
                self._be_first(theirs, folder, inputs, files)
        try:
            syscalls.setns(self._processes, syscalls.CLONE_NEWPID)
            theirs.close()
            message, descriptors, _, _ = socket.recv_fds(ours, LONGEST, len(_KINDS))
            if not descriptors:
                expect(message or b"a process died")
            yield Jail(None, written) if files is None else Jail(root.WORKING), descriptors
        finally:
            ours.close()
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
            for descriptor in descriptors:
                os.close(descriptor)

    def _be_first(self, connection: socket.socket, folder: str, inputs: Sequence[str], files: int | None) -> None:
        """Be the first process of a PID namespace: all others end with it. Report its namespaces, then only wait."""
        # The others must not look into it: it has capabilities, and its program is a file of the machine's.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        if files is not None:
            root.enter(self._root, self._shown, files, folder, inputs)
        keep_open(connection.fileno())
        os.dup2(0, 2)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans have no parent that waits
        kinds = _KINDS[:1] if files is None else _KINDS
        socket.send_fds(connection, [b"1"], [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in kinds])
        os.closerange(3, MANY)
        while True:
            signal.pause()


def _go_on_in_a_child() -> None:
    """Return in a child, the first of its PID namespace. This process ends with it, and it with this process."""
    child = os.fork()
    if child:
        end_with(child)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def _users_written_by_another() -> Iterator[None]:
    """Let the users and groups of the user namespace that the block makes be those of this one.

    All of them, where this process may say so, and else its own. Another process writes it down: that is a matter of
    this namespace.
    """
    go, goes = os.pipe()
    writer = os.fork()
    if not writer:
        with ending():
            os.close(goes)
            if os.read(go, 1):
                _write_users(f"/proc/{os.getppid()}")
    try:
        yield
        os.write(goes, b"1")
    finally:
        os.close(goes)
        os.close(go)
        _, status = os.waitpid(writer, 0)
    if status:
        raise PermissionError(1, "uid_map: Operation not permitted")


def _write_users(process: str) -> None:
    for kind, own in (("uid", os.geteuid()), ("gid", os.getegid())):
        with open(f"/proc/self/{kind}_map", encoding="ascii") as file:
            known = [line.split() for line in file]
        try:
            _write(f"{process}/{kind}_map", "".join(f"{first} {first} {count}\n" for first, _, count in known))
        except PermissionError:
            if kind == "gid":
                _write(f"{process}/setgroups", "deny")
            _write(f"{process}/{kind}_map", f"{own} {own} 1")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
