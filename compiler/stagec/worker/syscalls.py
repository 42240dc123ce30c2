"""System calls to isolate processes that Python has no function for. All raise OSError that names the call.

The numbers are those of every machine that Linux runs on but Alpha. Each call has a page in section 2 of the manual
(https://man7.org/linux/man-pages/dir_section_2.html).
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 1 << 17, 1 << 28, 1 << 29
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_SLAVE = 1, 2, 4, 8, 1 << 12, 1 << 14, 1 << 19
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36

_MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _OPENAT2, _MOUNT_SETATTR = 429, 430, 431, 432, 437, 442
_CLOEXEC, _FSCONFIG_CMD_CREATE, _MOVE_MOUNT_F_EMPTY_PATH, _MNT_DETACH = 1, 6, 4, 2
_AT_FDCWD, _AT_RECURSIVE, _MS_PRIVATE = -100, 0x8000, 1 << 18
_VERSION_3_OF_THIS_THREAD = struct.pack("Ii", 0x20080522, 0)
_RESOLVE_NO_XDEV, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 1, 4, 8


def unshare(namespaces: int) -> None:
    """Leave namespaces for new ones; of CLONE_NEWPID, the next child is the first process."""
    call("unshare", namespaces)


def setns(descriptor: int, kind: int = 0) -> None:
    """Enter the namespace of a descriptor of a file in /proc/PID/ns. One of processes is entered by the next child.

    kind: the required kind, such as CLONE_NEWPID; 0 for any.
    """
    call("setns", descriptor, kind)


def mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    """Mount `source` at `target`."""
    call("mount", os.fsencode(source), os.fsencode(target), kind.encode(), flags, None)


def new_tmpfs() -> int:
    """Return a descriptor of the root of a new tmpfs that is mounted nowhere (Linux 5.2)."""
    context = call("syscall", _FSOPEN, b"tmpfs", _CLOEXEC)
    try:
        call("syscall", _FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        return call("syscall", _FSMOUNT, context, _CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
    finally:
        os.close(context)


def move_mount(descriptor: int, target: str) -> None:
    """Mount the file system of `new_tmpfs` at `target`."""
    call("syscall", _MOVE_MOUNT, descriptor, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)


def change_mount(path: str, on: int = 0, off: int = 0, private: bool = False, below: bool = False) -> None:
    """Switch attributes of a mount on and off (Linux 5.12).

    private: whether it stops sharing mounts with other places. below: also for all mounts below it.
    """
    attributes = struct.pack("4Q", on, off, _MS_PRIVATE if private else 0, 0)
    flags = _AT_RECURSIVE if below else 0
    call("syscall", _MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), flags, attributes, len(attributes))


def make_root() -> None:
    """Make the working directory (a mount point) the root of this mount namespace."""
    call("pivot_root", b".", b".")
    unmount(".")  # the old root, which now lies on the new one
    os.chdir("/")


def unmount(path: str) -> None:
    """Unmount a path, and everything below it; processes that use it keep it."""
    call("umount2", os.fsencode(path), _MNT_DETACH)


def open_beneath(folder: int, path: str) -> int:
    """Open a file below a folder to read it; neither a link nor another mount may be on the way (Linux 5.6)."""
    resolve = _RESOLVE_NO_XDEV | _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH
    how = struct.pack("3Q", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, 0, resolve)
    return call("syscall", _OPENAT2, folder, os.fsencode(path), how, len(how))


def prctl(option: int, *arguments: int) -> None:
    """Change something of this process."""
    call("prctl", option, *(ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]))


def set_capabilities(capabilities: int) -> None:
    """Keep only these capabilities of this process, given as bits; programs can inherit them."""
    halves = [capabilities & 0xFFFFFFFF] * 3 + [capabilities >> 32] * 3  # effective, permitted, inheritable
    call("capset", _VERSION_3_OF_THIS_THREAD, struct.pack("6I", *halves))


def call(name: str, *arguments: int | bytes | ctypes.c_ulong | ctypes.Array[ctypes.c_char] | None) -> int:
    """Call a function of libc's that returns a negative number for an error."""
    result: int = getattr(_libc(), name)(*arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
