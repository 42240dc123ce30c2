"""The namespaces of a worker, and of each of its actions.

    worker    a user namespace, in which it may make others; the files of the machine; no network
    action    a PID namespace, whose end is the end of all that was started in it; the files of a Root

An action has no capability in any of them (confinement.py), so what is mounted stays as it is. It sees no process but
its own, and has no descriptor but those that it is given.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator, Sequence

from stagec.worker import confinement, syscalls
from stagec.worker.root import FOLDER, Root, import_roots, packages

WRITTEN = (FOLDER, "/dev")
"""Folders that an action may write below; of /dev, to what is there."""
_KINDS = ("mnt", "ipc")
"""Namespaces that an action has besides that of processes, under the names of /proc/PID/ns."""
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_MANY = 1 << 30
"""More descriptors than a process can have."""
_READY, _LONGEST = b"ready", 1 << 12
"""Messages: that all is well, or why not."""


class Isolation:
    """The namespaces of this process, the worker, which is in them from here on."""

    def __init__(self) -> None:
        """Leave those of the machine. From here on this is a child of the process that was called.

        Raises OSError where the system does not let this process do so.
        """
        new = syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS | syscalls.CLONE_NEWNET | syscalls.CLONE_NEWPID
        with _users_written_by_another():
            syscalls.unshare(new)
        # What the machine unmounts is unmounted here; nothing goes the other way.
        syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_SLAVE)
        _bring_up_loopback()
        self._root = Root(packages())
        _go_on_in_a_child()
        self._processes = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        gc.freeze()  # what is there is not looked at again, and stays in memory that all children share

    def renew(self) -> bool:
        """Show what is at the packages' paths now, if that is not what it was; return whether it was not.

        What `start` started before goes on with the old ones. Raises OSError where the system does not let it.
        """
        stale = self._root.is_stale()
        if stale:
            self._root.unmount()
            self._root = Root(packages())
        return stale

    def start(self, words: Sequence[str], in_place: bool) -> socket.socket:
        """Start a process of this interpreter that may enter the namespaces of actions.

        words: its arguments; a descriptor of a connection is added to them.
        in_place: whether it sees the files of the worker, and not those of the Root.
        Returns the other end of the connection. Raises OSError where the system does not let it.
        """
        ours, theirs = socket.socketpair()
        interpreter = os.path.realpath(sys.executable)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(import_roots())}
        if not os.fork():
            with _ending(theirs):
                if not in_place:
                    self._root.enter(syscalls.new_tmpfs())
                keep_open(theirs.fileno())
                theirs.set_inheritable(True)
                confinement.keep_capabilities()
                theirs.sendall(_READY)
                # Run again: its program and libraries are files of the Root. Of those of the machine, an action of
                # their owner's could change the mode, through /proc/self/exe.
                os.execve(interpreter, [interpreter, *words, str(theirs.fileno())], environment)
        theirs.close()
        _expect(ours.recv(_LONGEST))
        return ours

    @contextlib.contextmanager
    def action(self, folder: str, inputs: Sequence[str], files: int | None) -> Iterator[list[int]]:
        """Make the namespaces of an action. When the block is left, all processes in them are dead.

        inputs: paths relative to `folder`. files: a descriptor of what the action sees as FOLDER, from `new_files`;
            None: it sees the files of the worker.
        Yields descriptors of its PID namespace, and where it has its own files, of the others.
        Raises OSError where the system does not let it.
        """
        descriptors: list[int] = []
        ours, theirs = socket.socketpair()
        syscalls.unshare(syscalls.CLONE_NEWPID)
        first = os.fork()
        if not first:
            with _ending(theirs):
                self._be_first(theirs, folder, inputs, files)
        try:
            syscalls.setns(self._processes, syscalls.CLONE_NEWPID)
            theirs.close()
            message, descriptors, _, _ = socket.recv_fds(ours, _LONGEST, 1 + len(_KINDS))
            _expect(message)
            yield descriptors
        finally:
            ours.close()
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
            for descriptor in descriptors:
                os.close(descriptor)

    def _be_first(self, connection: socket.socket, folder: str, inputs: Sequence[str], files: int | None) -> None:
        """Be the first process of a PID namespace, with which all others end: say where it is, and do nothing more."""
        # The others must not look into it: it has capabilities, and its program is a file of the machine's.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        if files is not None:
            syscalls.unshare(syscalls.CLONE_NEWIPC)
            self._root.enter(files, folder, inputs)
        keep_open(connection.fileno())
        os.dup2(0, 2)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what others leave behind has no parent that waits
        kinds = ("pid", *(() if files is None else _KINDS))
        socket.send_fds(connection, [_READY], [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in kinds])
        os.closerange(3, _MANY)
        while True:
            signal.pause()


def problem() -> str | None:
    """Isolate an action that does nothing, and return what the system does not let; None where it does."""
    if not confinement.has_filter():
        return f"no filter of system calls for {os.uname().machine}"
    try:
        isolation = Isolation()
        isolation.start(["-c", "pass"], in_place=False)
        with new_files() as files, isolation.action("/", (), files):
            return None
    except OSError as error:
        return said(error)


def _go_on_in_a_child() -> None:
    """Return in a child, the first of its PID namespace. This process ends with it, and it with this process."""
    child = os.fork()
    if child:
        with _ending():
            os.closerange(0, 2)  # what the child says and hears is not for this one
            os.closerange(3, _MANY)
            _, how = os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(how) & 0xFF)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)


def _expect(message: bytes) -> None:
    if message != _READY:
        raise OSError(0, message.decode() or "a process died")


@contextlib.contextmanager
def new_files() -> Iterator[int]:
    """Make a folder in memory for an action, and yield a descriptor of it."""
    descriptor = syscalls.new_tmpfs()
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def enter(namespaces: Sequence[int]) -> None:
    """Have this process be in namespaces of an action."""
    for descriptor in namespaces:
        syscalls.setns(descriptor)


def said(error: OSError) -> str:
    """Return what an error says was not possible."""
    return ": ".join(part for part in (error.filename, error.strerror) if part)


@contextlib.contextmanager
def _ending(connection: socket.socket | None = None) -> Iterator[None]:
    """End this process, a fork, whatever happens in the block; say over the connection what the system did not let."""
    status = 1
    try:
        yield
        status = 0
    except OSError as error:
        if connection:
            connection.sendall(said(error).encode())
    finally:
        os._exit(status)


def keep_open(descriptor: int) -> None:
    """Close all descriptors but this one and stderr, which stdout becomes too; stdin is empty."""
    # Of the Root, if this process sees that: of the machine's device, root could change the mode.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, _MANY)


@contextlib.contextmanager
def _users_written_by_another() -> Iterator[None]:
    """Let the users and groups of the user namespace that the block makes be those of this one.

    All of them, where this process may say so, and else its own. Another process writes it down: that is a matter of
    this namespace.
    """
    go, goes = os.pipe()
    writer = os.fork()
    if not writer:
        with _ending():
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


def _bring_up_loopback() -> None:
    """Bring up the one device of a new network: "lo" is there, and down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
