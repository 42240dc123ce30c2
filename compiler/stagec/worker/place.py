"""The place and the isolation of an action: the common parts of both ways.

namespaces.py isolates where the system lets a process have namespaces, group.py elsewhere; isolation.py chooses.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

from stagec.worker import syscalls
from stagec.worker.root import BELOW, identity, import_roots, packages

LONGEST = 1 << 12
"""The most bytes of a message about a refusal by the system."""
MANY = 1 << 30
"""More descriptors than a process can have."""


class Place(NamedTuple):
    """Where an action does its work, as the worker says it to its process.

    working: its working directory with its inputs; None: the worker's, with all its files.
    written: folders and files that it may write.
    read: other paths that it may read; None: everything that it sees.
    group: the process group that it is in, and cannot leave; None: it has namespaces.
    """

    working: str | None
    written: Sequence[str]
    read: Sequence[str] | None = None
    group: int | None = None

    def enter(self, namespaces: Sequence[int]) -> None:
        """Move this process there. namespaces: descriptors of the namespaces to enter."""
        if self.group is None:
            os.setsid()
            for descriptor in namespaces:
                syscalls.setns(descriptor)
        else:
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setpgid(0, self.group)
            os.umask(0o022)  # it cannot change the mode of its files
        if self.working is None:
            return
        temporary = "/tmp"
        if self.group is not None:
            temporary = os.environ["TMPDIR"] = f"{self.working.removesuffix(BELOW)}tmp"
            if "tempfile" in sys.modules:  # what was imported may have asked
                import tempfile

                tempfile.tempdir = None
        # Libraries make folders there when they are imported: brainstate, matplotlib. It ends with the action.
        os.environ["HOME"] = temporary


class Isolation:
    """The isolation of the actions of this process, the worker.

    instead_of: the system's refusal of a better isolation.
    """

    instead_of: Sequence[str] = ()

    def __init__(self) -> None:
        """Make it of this process, for good. Raises OSError if the system does not let it."""
        self._states = {path: identity(path) for path in packages()}

    def renew(self) -> bool:
        """Show the packages that are there now if their folders changed; return whether they did.

        Bazel makes a repository again as a new folder. Processes of an earlier `start` go on with the old ones. Raises
        OSError if the system does not let it.
        """
        stale = any(identity(path) != state for path, state in self._states.items())
        if stale:
            self._states = {path: identity(path) for path in packages()}
        return stale

    def start(self, words: Sequence[str], in_place: bool) -> socket.socket:
        """Start a process of this interpreter that may fork into the places of actions.

        words: its arguments; a descriptor of a connection is added to them. in_place: whether it sees all files.
        Returns the other end of the connection. Raises OSError if the system does not let it.
        """
        ours, theirs = socket.socketpair()
        problem, says = os.pipe()
        interpreter = os.path.realpath(sys.executable)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(import_roots())}
        if not os.fork():
            with ending(says):
                self._confine_template([theirs.fileno(), says], in_place)
                theirs.set_inheritable(True)
                # Run again: where it has its own root, its program and libraries are files of that. Of those of the
                # machine, an action of their owner's could change the mode, through /proc/self/exe.
                os.execve(interpreter, [interpreter, *words, str(theirs.fileno())], environment)
        theirs.close()
        os.close(says)
        expect(os.read(problem, LONGEST))  # the new program has no such descriptor
        os.close(problem)
        return ours

    def by(self) -> str:
        """Describe the isolation of actions, and its limits."""
        raise NotImplementedError

    def _confine_template(self, kept: Sequence[int], in_place: bool) -> None:
        raise NotImplementedError

    def new_files(self) -> contextlib.AbstractContextManager[int]:
        """Make a folder for an action's writes during the block; yield its descriptor."""
        raise NotImplementedError

    def action(
        self, folder: str, inputs: Sequence[str], files: int | None, written: Sequence[str] = ()
    ) -> contextlib.AbstractContextManager[tuple[Place, list[int]]]:
        """Make the place of an action. When the block is left, all processes in it are dead.

        inputs: paths relative to `folder`. files: of `new_files`; None: it sees the files of the worker.
        written: folders that it may write to, where it does.
        Gives the place, and descriptors of its namespaces: that of processes first. Raises OSError if the system
        does not let it.
        """
        raise NotImplementedError


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
