"""What the process of a request sees: its inputs under their paths, in a folder of its own, and no network.

Bazel starts workers in the execution root, in which all files of the repository can be read. Here a request gets what
Bazel's sandbox gives an action: a folder with a link for every input. A file that is not declared is not there, for
`import` and `open` alike. As in the sandbox, absolute paths of the machine can still be read, and written are that
folder, and what the machine has for temporary files; so what a link leads to stays as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWNET = 0x20000, 0x10000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_WRITTEN = ("/tmp", "/var/tmp", "/dev", "/proc")  # as in Bazel's sandbox
_PREFIX = "stagec-worker-"
_NEW = 60
"""Seconds in which a folder may not be locked yet."""
_PR_SET_PDEATHSIG = 1
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


@contextlib.contextmanager
def folder_of(inputs: Sequence[str]) -> Iterator[Path]:
    """Make a folder that has the inputs, paths relative to the working directory, and nothing else; remove it again.

    It lies beside the outputs of the build, if there are any: what is made in it can then be renamed.
    """
    root, outputs = Path.cwd(), Path("bazel-out").absolute()
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, dir=outputs if outputs.is_dir() else None) as name,
        _locked(name) as free,
    ):
        assert free
        folder = Path(name, "root")  # a path may begin with .. where Bazel lays repositories out side by side
        made: set[str] = set()
        for path in inputs:  # a bundle has thousands
            parent = path.rpartition("/")[0]
            if parent not in made:
                Path(folder, parent).mkdir(parents=True, exist_ok=True)
                made.add(parent)
            Path(f"{folder}/{path}").symlink_to(f"{root}/{path}")
        folder.mkdir(exist_ok=True)
        yield folder


def remove_folders_of_the_dead() -> None:
    """Remove the folders that workers left beside the outputs of the build when they were killed in their work."""
    for path in Path("bazel-out").absolute().glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another worker removes it
            if time.time() - path.stat().st_mtime > _NEW:
                with _locked(path) as free:
                    if free:
                        shutil.rmtree(path)


@contextlib.contextmanager
def _locked(folder: str | Path) -> Iterator[bool]:
    """Lock a folder while its worker, or a child, lives: False where another has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


def enter(folder: Path, inputs: Sequence[str]) -> None:
    """Make the folder the working directory of this process.

    It ends with its parent; where the system lets us, it reaches no network and writes to no input; the latter not in a
    chroot whose / is no mount.
    """
    root = Path.cwd()
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):  # some systems allow the first step and not the others
        _leave_namespaces()
        _only_loopback()
        _only_written(folder.parent, root, {Path(path).parts[0] for path in inputs})
    os.chdir(folder)


def undeclared(folder: Path, root: Path) -> set[str]:
    """Return a set that grows: the files of `root` that this process wants to open or import from `folder`, in vain."""
    found: set[str] = set()

    def look(path: Path) -> None:
        if path.is_relative_to(folder) and not os.path.lexists(path):
            relative = path.relative_to(folder)
            if (root / relative).is_file():
                found.add(str(relative))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and not os.path.lexists(arguments[0]):
            look(Path(os.path.normpath(Path.cwd() / arguments[0])))
        elif event == "import":
            for entry in sys.path:
                if entry.startswith(str(folder)):
                    module = Path(entry, *arguments[0].split("."))
                    look(module.with_suffix(".py"))
                    look(module / "__init__.py")

    sys.addaudithook(hook)
    return found


def end(child: int) -> None:
    """Kill a child and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)


def hand_over(folder: Path, arguments: Sequence[str]) -> None:
    """Move the files that were made, and that the arguments name, to the same paths below the working directory."""
    for word in arguments:
        if not os.path.lexists(f"{folder}/{word}"):  # most words are no file's name
            continue
        made = folder / word
        if made.is_relative_to(folder) and made.is_file() and not made.is_symlink():
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(made, word)


def _leave_namespaces() -> None:
    """Leave the network and the mounts of the machine for some of our own. Raises OSError where the system forbids it.

    It lets root, and others in a namespace in which they may do what root may; then the user has its number there too.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        _call("unshare", _CLONE_NEWNET | _CLONE_NEWNS)
    except OSError:
        _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _only_loopback() -> None:
    """Bring up the one device of the new network: "lo" is there, and down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def _only_written(folder: Path, root: Path, entries: set[str]) -> None:
    """Make all mounts read-only but `folder`, those of the system, and what is temporary and no part of the build.

    entries: of `root`, each of which may be a link to where inputs are: those may be in a folder for temporary files.
    """
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    _set_read_only(Path("/"), True)
    try:
        for path in filter(Path.is_dir, map(Path, _WRITTEN)):
            with contextlib.suppress(OSError):  # it was read-only before
                _bind(path, False)
        for path in {root, *(Path(os.path.realpath(root / entry)) for entry in entries)}:
            if path.is_dir():
                _bind(path, True)
    finally:
        _bind(folder, False)


def _bind(path: Path, read_only: bool) -> None:
    """Make a mount of its own of a path."""
    _call("mount", os.fsencode(path), os.fsencode(path), None, _MS_BIND | _MS_REC, None)
    _set_read_only(path, read_only)


def _set_read_only(path: Path, read_only: bool) -> None:
    """Let nothing be written below the mount at a path, or let it. As mount_setattr(2), of Linux 5.12."""
    attributes = struct.pack("4Q", *((_MOUNT_ATTR_RDONLY, 0) if read_only else (0, _MOUNT_ATTR_RDONLY)), 0, 0)
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), _AT_RECURSIVE, attributes, len(attributes))


def _call(name: str, *arguments: int | bytes | None) -> None:
    """Call a function of libc's. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), name)
