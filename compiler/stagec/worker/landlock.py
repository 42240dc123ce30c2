"""Landlock: a process and its descendants open only the files that they are allowed, for good. It takes no privilege.

An action that has a root of its own does not have it: other files are not there, and mounts that it cannot change are
read-only (`test_namespaces_alone_keep_it`). Landlock took 0.5 ms there, and kept nothing more out. docs/security.md
lists what each version keeps out.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Iterable

from stagec.worker import syscalls

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULESET_VERSION, _RULE_PATH_BENEATH = 1, 1
_READ = 0b1101
"""To execute and read files, and to list folders (linux/landlock.h)."""
_WRITE = {
    1: 0b0001_1111_1111_0010,  # to write, remove and make files; to move them to other folders is always refused
    2: 0b0011_1111_1111_0010,  # and to move them
    3: 0b0111_1111_1111_0010,  # and to truncate them
    5: 0b1111_1111_1111_0010,  # and to ask devices for anything but reading and writing
}
"""Rights to remove, by the first version of Landlock that can."""
_OF_FILES = 0b1100_0000_0000_0111
"""Those of them that files have, and not folders alone."""
_SCOPES = {6: 0b11}
"""The same for connections to abstract sockets of others, and signals to them."""


def version() -> int:
    """Return the version of Landlock that the kernel has; 0 for none."""
    try:
        return syscalls.call("syscall", _CREATE_RULESET, None, 0, _RULESET_VERSION)
    except OSError:
        return 0


def restrict(written: Iterable[str], read: Iterable[str] | None = None, as_version: int | None = None) -> None:
    """Let this process open some files alone, as far as Landlock can keep others from it.

    written: folders and files that it may write. read: others that it may read; None: all.
    as_version: of Landlock; None: that of the kernel. Raises OSError if a path of `written` is not there.
    """
    since = version() if as_version is None else as_version
    if not since:
        return
    writes = max(bits for first, bits in _WRITE.items() if since >= first)
    reads = 0 if read is None else _READ
    scopes = max((bits for first, bits in _SCOPES.items() if since >= first), default=0)
    attributes = struct.pack("3Q", writes | reads, 0, scopes)[: 24 if since >= 6 else 8]
    rules = syscalls.call("syscall", _CREATE_RULESET, attributes, len(attributes), 0)
    for path in written:
        _add_rule(rules, path, writes | reads)
    for path in read or ():
        with contextlib.suppress(OSError):  # what is not there, nobody reads
            _add_rule(rules, path, reads)
    syscalls.call("syscall", _RESTRICT_SELF, rules, 0)
    os.close(rules)


def _add_rule(rules: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, descriptor)
        syscalls.call("syscall", _ADD_RULE, rules, _RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)
