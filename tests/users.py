"""Who tests are run as, root and an ordinary user, and what the system lets them do.

Benchmarks use it too, in an environment without pytest, which takes `unittest.SkipTest` as its own.
"""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stagec.worker import filters
from tests.building import COMPILER

USERS = ("root", "ordinary user")
_ORDINARY = 54321
_NOT_NEEDED = shutil.ignore_patterns("site-packages", "test", "idlelib", "*.a")


@dataclass(frozen=True)
class User:
    """Who runs something. number: None for the user of the tests. python: an interpreter that the user can run."""

    number: int | None
    python: str

    def can(self, *command: str | Path) -> bool:
        """Whether a command of this user's succeeds. Raises OSError where it cannot be started."""
        groups = None if self.number is None else ()
        done = subprocess.run(command, user=self.number, group=self.number, extra_groups=groups, cwd="/")
        return done.returncode == 0


_REFUSE = """
import ctypes, os, struct, sys
code = bytes.fromhex(sys.argv[1])
kept = ctypes.create_string_buffer(code, len(code))
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)
if libc.syscall(317, 1, 4, struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(kept))):
    sys.exit("this kernel has no filter of system calls")
os.execvp(sys.argv[2], sys.argv[2:])
"""
WAYS = {"namespaces": "", "Landlock": "272=1", "filter": "272=1 444=38"}
"""What isolates actions, and the calls that the kernel refuses where it is that (`refusing`)."""


def where(way: str, user: User | None = None) -> list[str]:
    """Return what comes before a command of a user that runs where actions are isolated in one of WAYS."""
    return refusing(user, *WAYS[way].split()) if WAYS[way] else []


def refusing(user: User | None, *calls: str) -> list[str]:
    """Return what comes before a command of a user that runs where the kernel refuses system calls.

    calls: CALL=ERROR, the number of a call and what it gives.
    """
    lines = []
    for word in calls:
        call, error = map(int, word.split("="))
        lines += filters.fails_if_called([call], error)
    python = user.python if user else sys.executable
    return [python, "-B", "-S", "-c", _REFUSE, filters.assembled(lines).hex()]


@functools.cache
def isolation(user: User | None = None, compiler: Path = COMPILER) -> tuple[str, str | None]:
    """Return what isolates actions on this system, one of WAYS or "", and what the system does not let.

    user: who runs it; None: the user of the tests. compiler: stagec's sources, which the user can read.
    """
    user = user or User(None, sys.executable)
    done = subprocess.run(
        [user.python, "-B", "-c", "from stagec.worker import isolation; isolation.tell()"],
        user=user.number,
        group=user.number,
        extra_groups=None if user.number is None else (),
        env={"PYTHONPATH": str(compiler), "PYTHONSAFEPATH": "1"},
        cwd="/",
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return "", done.stderr
    return next((way for way in ("Landlock", "filter") if way in done.stdout), "namespaces"), done.stdout or None


def needs_isolation(user: User | None = None, compiler: Path = COMPILER, way: str = "") -> None:
    """Skip the test where the system does not let a worker isolate its actions. Arguments: of `isolation`.

    way: one of WAYS in which it has to.
    """
    if user and not user.can("test", "-r", compiler / "stagec" / "__main__.py"):
        raise unittest.SkipTest("this user cannot read the tests' own files")
    best, problem = isolation(user, compiler)
    if not best or (way and [*WAYS].index(best) > [*WAYS].index(way)):
        raise unittest.SkipTest(f"this system does not let a worker isolate its actions so: {problem}")


@contextmanager
def as_user(name: str) -> Iterator[User]:
    """Be ready to run something as one of USERS. Skips the test where it cannot be that user."""
    root = os.geteuid() == 0
    if name == "root" and not root:
        raise unittest.SkipTest("the tests are not run as root")
    if name == "root" or not root:
        yield User(None, sys.executable)
        return
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        user = User(_ORDINARY, sys.executable)
        try:
            user.can("/bin/true")
        except OSError as error:  # a sandbox knows one user
            raise unittest.SkipTest(f"this process cannot run anything as another user: {error}") from None
        if not _runs_python(user):  # it may be root's own
            user = User(_ORDINARY, _interpreter(Path(folder, "python")))
            if not _runs_python(user):
                raise unittest.SkipTest("another user cannot run this Python")
        yield user


def link_tree(source: Path, target: Path) -> None:
    """Make a folder with the files of another, for users who cannot go there. Do not change files in it."""
    shutil.copytree(source, target, symlinks=True, copy_function=_link)


def _runs_python(user: User) -> bool:
    try:
        return user.can(user.python, "-c", "")
    except OSError:
        return False


def _interpreter(folder: Path) -> str:
    """The interpreter of the tests and its library, in another folder; returns its path."""
    for name in ("bin", "lib"):
        source = Path(sys.base_prefix, name)
        shutil.copytree(source, folder / name, symlinks=True, ignore=_NOT_NEEDED, copy_function=_link)
    return str(folder / "bin" / Path(sys.executable).resolve().name)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # on another disk
        shutil.copy2(source, target)
