"""The jail of an action, and how processes get there: what both ways to isolate have in common.

namespaces.py isolates where the system lets a process have namespaces, group.py elsewhere; isolation.py chooses.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, NoReturn

from stagec.worker import filters, landlock, syscalls
from stagec.worker.root import BELOW, import_roots

LONGEST = 1 << 12
"""The most bytes of a message about a refusal by the system."""
MANY = 1 << 30
"""More descriptors than a process can have."""


class Jail(NamedTuple):
    """Where an action does its work, as the worker says it to its process.

    working: its working directory with its inputs; None: the worker's, with all its files.
    written: folders and files that it may write, if the kernel has Landlock; (): the mounts decide.
    read: other paths that it may read then; None: everything that it sees.
    group: the process group that it is in, and cannot leave; None: it has namespaces.
    """

    working: str | None
    written: Sequence[str] = ()
    read: Sequence[str] | None = None
    group: int | None = None

    def enter(self, namespaces: Sequence[int], kept: int) -> None:
        """Move this process, a fork of a template, there, where it has no capability, and whence it cannot go.

        namespaces: descriptors of the namespaces to enter. kept: the one descriptor that stays open.
        """
        if self.group is None:
            os.setsid()
            for descriptor in namespaces:
                syscalls.setns(descriptor)
        else:
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setpgid(0, self.group)
            os.umask(0o022)  # it cannot change the mode of its files
        keep_open(kept)
        if self.working is not None:
            temporary = "/tmp"
            if self.group is not None:
                temporary = os.environ["TMPDIR"] = f"{self.working.removesuffix(BELOW)}tmp"
                if "tempfile" in sys.modules:  # what was imported may have asked
                    import tempfile

                    tempfile.tempdir = None
            # Libraries make folders there when they are imported: brainstate, matplotlib. It ends with the action.
            os.environ["HOME"] = temporary
            os.chdir(self.working)
        syscalls.set_capabilities(0)
        if self.written:
            landlock.restrict(self.written, self.read)
        filters.install(filters.of_action(self.group is not None))


def start_template(words: Sequence[str], confine: Callable[[], None]) -> socket.socket:
    """Start a process of this interpreter that may fork into the jails of actions.

    words: its arguments; a descriptor of a connection is added to them. confine: restricts it, before it runs again.
    Returns the other end of the connection. Raises OSError if the system does not let it.
    """
    ours, theirs = socket.socketpair()
    problem, says = os.pipe()
    interpreter = os.path.realpath(sys.executable)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(import_roots())}
    if not os.fork():
        with ending(says):
            # A crash starts a program of the machine's, as root, that reads what a process has in memory. 1 stands for
            # none; with 0 it is started all the same (core(5)).
            if resource.getrlimit(resource.RLIMIT_CORE)[1]:
                resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
            confine()
            keep_open(theirs.fileno(), says)
            theirs.set_inheritable(True)
            # Run again: where it has its own root, its program and libraries are files of that. Of those of the
            # machine, an action of their owner's could change the mode, through /proc/self/exe.
            os.execve(interpreter, [interpreter, *words, str(theirs.fileno())], environment)
    theirs.close()
    os.close(says)
    expect(os.read(problem, LONGEST))  # the new program has no such descriptor
    os.close(problem)
    return ours


@contextlib.contextmanager
def ending(says: int | None = None) -> Iterator[None]:
    """End this process, a fork, whatever happens in the block; write to `says` what the system did not let."""
    status = 1
    try:
        yield
        status = 0
    except OSError as error:
        if says is not None:
            os.write(says, said(error).encode())
    finally:
        os._exit(status)


def end_with(child: int) -> NoReturn:
    """End this process when a child of it has ended, in the same way."""
    with ending():
        os.closerange(0, 2)  # the child's input and output do not belong to this process
        os.closerange(3, MANY)
        _, how = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(how) & 0xFF)


def expect(text: bytes) -> None:
    """Raise OSError for the message of `ending`."""
    if text:
        raise OSError(0, text.decode())


def said(error: OSError) -> str:
    """Return the failed action in an error."""
    return ": ".join(part for part in (error.filename, error.strerror) if part)


def keep_open(*kept: int) -> None:
    """Close all descriptors but these and stderr, which stdout becomes too; stdin is empty."""
    # Of the Root, if this process sees that: of the machine's device, root could change the mode.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    start = 3
    for descriptor in sorted(kept):
        os.closerange(start, descriptor)
        start = descriptor + 1
    os.closerange(start, MANY)
