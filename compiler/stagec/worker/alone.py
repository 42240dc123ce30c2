"""An action that Bazel runs in a process of its own, because it keeps no workers here.

A fork does the work, so that this process can report, like a worker, how the fork died and the undeclared files that it
looked for. Only a Bazel sandbox hides such a file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from stagec.worker import syscalls, work
from stagec.worker.action import Ended


def run(command: Callable[[], int]) -> int:
    """Run a command in a fork; return the exit status. The arguments are those of this process."""
    started, said = time.monotonic(), os.memfd_create("said")
    with _home():
        child = os.fork()
        if not child:
            try:
                missed = set[str]()
                os.write(said, work.report(lambda: _act(missed, command), missed))
            finally:  # whatever the model did to stdout
                os._exit(0)
        _, how, usage = os.wait4(child, 0)
    word = os.pread(said, os.fstat(said).st_size, 0)
    ended = Ended(how, usage.ru_maxrss * 1024, b"", word, _declared_folders(sys.argv))
    sys.stderr.write(ended.output)
    if ended.status is None:
        sys.stderr.write(ended.death(time.monotonic() - started))
        return 1
    return ended.status


@contextlib.contextmanager
def _home() -> Iterator[None]:
    """Let a model have a home of its own, which is removed: libraries make folders there when they are imported."""
    if "STAGEC_PYTHON_VERSION" not in os.environ:  # it runs no model
        yield
        return
    import tempfile

    with tempfile.TemporaryDirectory(prefix="stagec-home-", ignore_cleanup_errors=True) as home:
        os.environ["HOME"] = home
        yield


def _act(missed: set[str], command: Callable[[], int]) -> int:
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)  # some engines end the first process alone
    work.note_missed(missed, os.getcwd(), elsewhere=False)
    work.tell_crashes()
    return command()


def _declared_folders(arguments: Sequence[str]) -> list[str]:
    """Return the folders of the files that a sandbox shows as links: those of repositories.

    arguments: of this process; the last is the file with the action's own, which name its inputs.
    """
    paths = [arguments[0]]
    with contextlib.suppress(OSError, ValueError), open(arguments[-1].removeprefix("@"), encoding="utf-8") as file:
        paths += file.read().splitlines()
    folders = set()
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            target = os.readlink(path)
            if target.endswith(f"/{path}"):
                folders.add(target.removesuffix(f"/{path}"))
    return sorted(folders)
