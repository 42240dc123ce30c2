"""Write files whole: under a temporary name, then renamed, so that nobody reads half of one. Standard library only.

A path that a user names may lead through links, and to a pipe or a device, which is written into. Below a folder that
others may write to, no link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from stagec.core.data import paths

_LINKS = 40
"""Links of one path: as many as Linux follows."""


def named(path: str, parts: Iterable[bytes | memoryview]) -> None:
    """Write what a path leads to through its links: a regular file whole, anything else piece by piece.

    A file keeps its permissions; a new one is for everybody to read. Folders on the way are made.
    parts: the content. Raises OSError, and what `parts` raise: then no regular file was changed.
    """
    target = _target(path)
    mode = None if isinstance(target, int) else _mode(target)
    if isinstance(target, int) or (mode is not None and not stat.S_ISREG(mode)):
        # Without O_CREAT: if the path is gone by now, this makes no file.
        descriptor = os.dup(target) if isinstance(target, int) else os.open(target, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for part in parts:
                left = memoryview(part)
                left = left.cast("B") if left.nbytes else memoryview(b"")
                while left:  # without a buffer, which would be written when it is closed: a pipe may wait forever
                    left = left[os.write(descriptor, left) :]
        finally:
            os.close(descriptor)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with folder(target.parent) as parent:
        file(parent, target.name, parts, 0o644 if mode is None else stat.S_IMODE(mode) & 0o777)


def _target(path: str) -> Path | int:
    """Return where the links of a path end, or the number of an open descriptor for a name of one: /dev/stdout."""
    descriptors = os.path.realpath("/proc/self/fd")
    for _ in range(_LINKS):
        above, name = os.path.split(path)
        above = os.path.realpath(above or ".")
        if above == descriptors and name.isdecimal():
            return int(name)  # what it links to may have no name any more
        path = os.path.join(above, name)  # noqa: PTH118
        if not os.path.islink(path):  # noqa: PTH114
            return Path(path)
        path = os.path.join(above, os.readlink(path))  # noqa: PTH115, PTH118
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _mode(path: Path) -> int | None:
    """Return type and permissions of the file at a path; None if there is none."""
    try:
        return path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


@contextlib.contextmanager
def folder(path: str | Path, below: int | None = None) -> Iterator[int]:
    """Open a folder, as a descriptor. below: its parent folder; no link there is followed. Raises OSError."""
    follow = 0 if below is None else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | follow, dir_fd=below)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def made(top: int, name: str, make: bool = True) -> Iterator[int]:
    """Open the folder of the file at the relative path `name` below the folder `top`.

    make: whether to make missing folders. No link is followed. Raises OSError, whose `filename` is the folder at
    fault, below `top`; and for a name that leads out of `top`.
    """
    if fault := paths.fault(name):
        raise OSError(errno.EINVAL, f"it is not a path below the folder: {fault}")
    *parents, _ = name.split("/")
    with contextlib.ExitStack() as stack:
        here = top
        for number, parent in enumerate(parents, 1):
            try:
                with contextlib.suppress(FileExistsError):
                    if make:
                        os.mkdir(parent, dir_fd=here)  # a Path has no descriptor
                here = stack.enter_context(folder(parent, here))
            except OSError as error:
                raise OSError(error.errno, error.strerror, "/".join(parents[:number])) from error
        yield here


def reason(error: OSError, root: str | Path) -> str:
    """Return a sentence about a failure to write below `root`, because a link has no error of its own."""
    path = Path(root, error.filename) if isinstance(error.filename, str) else None
    if path is not None and path != Path(root) and path.is_symlink():
        return f"{path} is a link, which is not followed"
    return str(error.strerror)


def file(parent: int, name: str, parts: Iterable[bytes | memoryview], mode: int = 0o644) -> None:
    """Write a file in an open folder, and replace one of the same name. Raises OSError, and the errors of `parts`."""
    temporary = f".stagec.{os.urandom(8).hex()}"  # the name itself may be as long as a name can be
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, mode, dir_fd=parent)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.writelines(parts)
            opened.flush()
            if stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:  # an action without namespaces can change none
                os.fchmod(descriptor, mode)
        os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=parent)
        raise
