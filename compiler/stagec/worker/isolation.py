"""What the process of a request sees: its inputs under their paths, in a folder of its own, and no network.

Bazel starts workers in the execution root, in which all files of the repository can be read. Here a request gets what
Bazel's sandbox gives an action: a folder with a link for every input. A file that is not declared is not there, for
`import` and `open` alike. As in the sandbox, absolute paths of the machine can still be read.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


@contextlib.contextmanager
def folder_of(inputs: Sequence[str]) -> Iterator[Path]:
    """Make a folder that has the inputs, paths relative to the working directory, and nothing else; remove it again.

    It lies beside the outputs of the build, if there are any: what is made in it can then be renamed.
    """
    root, outputs = Path.cwd(), Path("bazel-out").absolute()
    with tempfile.TemporaryDirectory(prefix="stagec-worker-", dir=outputs if outputs.is_dir() else None) as name:
        folder = Path(name, "root")  # a path may begin with .. where Bazel lays repositories out side by side
        made: set[Path] = set()
        for path in inputs:
            link = folder / path
            if link.parent not in made:
                link.parent.mkdir(parents=True, exist_ok=True)
                made.add(link.parent)
            link.symlink_to(root / path)
        folder.mkdir(exist_ok=True)
        yield folder


def enter(folder: Path) -> None:
    """Make the folder the working directory of this process, which ends with its parent and reaches no network."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(folder)
    with contextlib.suppress(OSError):  # some systems allow the first step and not the others
        _leave_network()


def undeclared(folder: Path, root: Path) -> set[str]:
    """Return a set that grows: the files of `root` that this process wants to open or import from `folder`, in vain."""
    found: set[str] = set()

    def look(path: Path) -> None:
        if path.is_relative_to(folder) and not os.path.lexists(path):
            relative = path.relative_to(folder)
            if (root / relative).is_file():
                found.add(str(relative))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str):
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
        made = folder / word
        if made.is_relative_to(folder) and made.is_file() and not made.is_symlink():
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(made, word)


def _leave_network() -> None:
    """Leave the network for one of our own that has this process alone, where the system lets us.

    It lets root, and others in a namespace in which they may do what root may; then the user has its number there too.
    """
    libc, user, group = ctypes.CDLL(None), os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWNET):
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
            return
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:  # "lo" is there, and down
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
