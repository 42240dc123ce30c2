"""Restrict a process and its descendants for good: capabilities, system calls, writing.

Namespaces decide what a process sees; this module decides what it may ask the kernel for. None of it takes a privilege.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import stat
import struct
from collections.abc import Iterable, Sequence

from stagec.worker import syscalls

_PR_CAPBSET_DROP, _PR_SET_SECUREBITS, _PR_SET_NO_NEW_PRIVS = 24, 28, 38
_PR_CAP_AMBIENT, _RAISE, _CLEAR_ALL = 47, 2, 4
_CAP_SETPCAP, _CAP_SYS_CHROOT, _CAP_SYS_ADMIN = 8, 18, 21
_NO_ROOT, _NOTHING_EVER = 0b1, 0b11100011
"""Securebits (capabilities(7)): root is nobody special; and no capability is kept or inherited, and this stays so."""


def keep_capabilities() -> None:
    """Give the next program of this process the capabilities to enter namespaces, and to `renounce`."""
    syscalls.prctl(_PR_SET_SECUREBITS, _NO_ROOT)
    kept = (_CAP_SETPCAP, _CAP_SYS_CHROOT, _CAP_SYS_ADMIN)
    syscalls.set_capabilities(sum(1 << capability for capability in kept))
    for capability in kept:
        syscalls.prctl(_PR_CAP_AMBIENT, _RAISE, capability)


def renounce() -> None:
    """Keep this process and its descendants from getting capabilities from programs. It keeps its own."""
    syscalls.prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if not syscalls.capabilities():  # so there is none to get
        return
    syscalls.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL)
    syscalls.prctl(_PR_SET_SECUREBITS, _NOTHING_EVER)
    with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
        last = int(file.read())
    for capability in range(last + 1):
        syscalls.prctl(_PR_CAPBSET_DROP, capability)


def confine(written: Iterable[str], read: Iterable[str] | None = None, in_group: bool = False) -> None:
    """Leave this process no capability, no system call that could undo its isolation, and few places to write to.

    Call `renounce` before, in this process or in an ancestor.
    written: folders below which it may write, if the kernel has Landlock; else only the mounts decide.
    read: other paths that it may read, if the kernel has Landlock; None: everything that it sees.
    in_group: whether it is in a process group that it must not leave, and `confine_group` came before.
    """
    _leave_no_core()
    syscalls.set_capabilities(0)
    if in_group or landlock() >= 3:  # mounts say it too, and the first version lets nobody move a file
        restrict(written, read)
    _filter_system_calls(_leaves_group() if in_group else program())


def confine_group(written: Iterable[str] | None) -> None:
    """Confine this process if it has no namespaces, except the process group. Each of its forks can enter one.

    written: folders and files that they all may write; None: those that its user may.
    """
    syscalls.prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _leave_no_core()
    syscalls.set_capabilities(0)
    if written is not None:
        restrict(written)
    _filter_system_calls(program(in_group=True))


def _leave_no_core() -> None:
    # A crash starts a program of the machine's, as root, that reads what this process has in memory. 1 stands for none;
    # with 0 it is started all the same (core(5)).
    if resource.getrlimit(resource.RLIMIT_CORE)[1]:
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))


_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
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


def landlock() -> int:
    """Return the version of Landlock that the kernel has; 0 for none."""
    try:
        return syscalls.call("syscall", _LANDLOCK_CREATE_RULESET, None, 0, _RULESET_VERSION)
    except OSError:
        return 0


def restrict(written: Iterable[str], read: Iterable[str] | None = None, version: int | None = None) -> None:
    """Let this process open the files of `confine` alone, as far as Landlock can keep others from it.

    version: of Landlock; None: that of the kernel. Raises OSError if a folder of `written` is not there.
    """
    version = landlock() if version is None else version
    if not version:
        return
    writes = max(bits for since, bits in _WRITE.items() if version >= since)
    reads = 0 if read is None else _READ
    scopes = max((bits for since, bits in _SCOPES.items() if version >= since), default=0)
    attributes = struct.pack("3Q", writes | reads, 0, scopes)[: 24 if version >= 6 else 8]
    rules = syscalls.call("syscall", _LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    for path in written:
        _add_rule(rules, path, writes | reads)
    for path in read or ():
        with contextlib.suppress(OSError):  # what is not there, nobody reads
            _add_rule(rules, path, reads)
    syscalls.call("syscall", _LANDLOCK_RESTRICT_SELF, rules, 0)
    os.close(rules)


def _add_rule(rules: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, descriptor)
        syscalls.call("syscall", _LANDLOCK_ADD_RULE, rules, _RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)


REFUSED = {
    "ptrace": 101,
    "syslog": 103,
    "uselib": 134,
    "modify_ldt": 154,
    "pivot_root": 155,
    "chroot": 161,
    "acct": 163,
    "mount": 165,
    "umount2": 166,
    "swapon": 167,
    "swapoff": 168,
    "reboot": 169,
    "init_module": 175,
    "delete_module": 176,
    "quotactl": 179,
    "kexec_load": 246,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "unshare": 272,
    "perf_event_open": 298,
    "fanotify_init": 300,
    "name_to_handle_at": 303,
    "open_by_handle_at": 304,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "kcmp": 312,
    "finit_module": 313,
    "kexec_file_load": 320,
    "bpf": 321,
    "userfaultfd": 323,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "open_tree_attr": 467,
}
"""System calls of x86-64 (asm/unistd_64.h) that fail: those that make or enter namespaces, mount, look into processes
or leave keys behind, and large parts of the kernel that no compiler needs."""
REFUSED_IN_GROUP = {
    "shmget": 29,
    "shmat": 30,
    "shmctl": 31,
    "semget": 64,
    "semop": 65,
    "semctl": 66,
    "msgget": 68,
    "msgsnd": 69,
    "msgrcv": 70,
    "msgctl": 71,
    "truncate": 76,
    "chmod": 90,
    "fchmod": 91,
    "chown": 92,
    "fchown": 93,
    "lchown": 94,
    "setsid": 112,
    "utime": 132,
    "setxattr": 188,
    "lsetxattr": 189,
    "fsetxattr": 190,
    "removexattr": 197,
    "lremovexattr": 198,
    "fremovexattr": 199,
    "semtimedop": 220,
    "utimes": 235,
    "mq_open": 240,
    "mq_unlink": 241,
    "migrate_pages": 256,
    "fchownat": 260,
    "futimesat": 261,
    "fchmodat": 268,
    "move_pages": 279,
    "utimensat": 280,
    "openat2": 437,
    "fchmodat2": 452,
    "setxattrat": 463,
    "removexattrat": 466,
    "file_setattr": 469,
}
"""System calls that fail besides where an action has no namespaces: those that change files in ways that Landlock does
not know, that leave something in memory that all processes share, or that make a session."""
_OPEN, _IOCTL, _SETPGID, _OPENAT, _PRLIMIT64 = 2, 16, 109, 257, 302
_IOCTL_REFUSED = [0x40086602, 0x40046602, 0x401C5820, 0x40806685]
"""FS_IOC_SETFLAGS, FS_IOC32_SETFLAGS, FS_IOC_FSSETXATTR, FS_IOC_ENABLE_VERITY: no file has to be open to write."""
_SOCKET, _CLONE, _CLONE3 = 41, 56, 435
_CLONE_REFUSED = 0x7E020080 | 0x8000
"""All flags of clone(2) that make namespaces; and CLONE_PARENT, which makes a child of the template's: nobody would
wait for it, and the PID namespace would never end."""
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK, _NETLINK_ROUTE = 1, 2, 10, 16, 0
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97

_SECCOMP, _SET_MODE_FILTER, _SPEC_ALLOW = 317, 1, 4
_ALLOW, _ERRNO = 0x7FFF0000, 0x50000
_AUDIT_ARCH_X86_64, _X32 = 0xC000003E, 0x40000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 24, 32
"""Where in struct seccomp_data (linux/seccomp.h)."""
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_Line = tuple[int, int, int, int]
"""An instruction of classic BPF (linux/filter.h): code, how many to skip if a test is true, and if not; a value."""


def has_filter() -> bool:
    """Return whether there is a filter of system calls for this machine: each architecture has other numbers."""
    return os.uname().machine == "x86_64"


def prepare() -> None:
    """Prepare `confine` for all forks of this process."""
    program()
    _leaves_group()


def _filter_system_calls(instructions: bytes) -> None:
    if not has_filter():
        return
    code = ctypes.create_string_buffer(instructions, len(instructions))
    filter_ = struct.pack("HxxxxxxQ", len(instructions) // 8, ctypes.addressof(code))
    # Without the flag, older kernels slow such a process down, against a leak within a process (seccomp(2)).
    try:
        syscalls.call("syscall", _SECCOMP, _SET_MODE_FILTER, _SPEC_ALLOW, filter_)
    except OSError as error:
        raise OSError(error.errno, f"seccomp: {os.strerror(error.errno or 0)}") from None


@functools.cache
def program(in_group: bool = False) -> bytes:
    """Return the filter of system calls, as instructions of classic BPF: calls that it does not name pass.

    in_group: whether it is for a process without namespaces.
    """
    lines = _fails_unless(_ARCHITECTURE, _EQUAL, [_AUDIT_ARCH_X86_64], _EPERM)
    lines += _fails_if(_NUMBER, _AT_LEAST, [_X32], _EPERM)
    lines += _fails_if(_NUMBER, _EQUAL, sorted(REFUSED.values()), _EPERM)
    lines += _fails_if(_NUMBER, _EQUAL, [_CLONE3], _ENOSYS)  # its flags are in memory; C libraries take clone then
    lines += _only_if(_NUMBER, _CLONE, _fails_if(_FIRST_ARGUMENT, _ANY_BIT, [_CLONE_REFUSED], _EPERM))
    if in_group:
        lines += _fails_if(_NUMBER, _EQUAL, [_SOCKET], _EAFNOSUPPORT)
        lines += _fails_if(_NUMBER, _EQUAL, sorted(REFUSED_IN_GROUP.values()), _EPERM)
        lines += _only_if(_NUMBER, _IOCTL, _fails_if(_SECOND_ARGUMENT, _EQUAL, _IOCTL_REFUSED, _EPERM))
        lines += _only_if(_NUMBER, _PRLIMIT64, _fails_unless(_FIRST_ARGUMENT, _EQUAL, [0], _EPERM))
        for number, flags in ((_OPEN, _SECOND_ARGUMENT), (_OPENAT, _THIRD_ARGUMENT)):
            lines += _only_if(_NUMBER, number, _truncates_what_it_reads(flags))
    else:
        families = [_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK]
        socket = _fails_unless(_FIRST_ARGUMENT, _EQUAL, families, _EAFNOSUPPORT)
        routes = _fails_unless(_THIRD_ARGUMENT, _EQUAL, [_NETLINK_ROUTE], _EAFNOSUPPORT)
        lines += _only_if(_NUMBER, _SOCKET, [*socket, *_only_if(_FIRST_ARGUMENT, _AF_NETLINK, routes)])
    return _assembled(lines)


@functools.cache
def _leaves_group() -> bytes:
    """Return the extra filter beside `program(in_group=True)`, which the process already has when it enters a group."""
    return _assembled(_fails_if(_NUMBER, _EQUAL, [_SETPGID], _EPERM))


def _assembled(lines: Sequence[_Line]) -> bytes:
    return b"".join(struct.pack("HBBI", *line) for line in [*lines, (_RETURN, 0, 0, _ALLOW)])


def _truncates_what_it_reads(flags: int) -> list[_Line]:
    """The call fails that cuts off a file and does not open it to write: the first versions of Landlock let it."""
    load, *fails = _fails_if(flags, _EQUAL, [os.O_TRUNC | os.O_RDONLY, os.O_TRUNC | os.O_ACCMODE], _EPERM)
    return [load, (_AND, 0, 0, os.O_TRUNC | os.O_ACCMODE), *fails]


def _fails_if(offset: int, test: int, values: Sequence[int], error: int) -> list[_Line]:
    """The call fails with this error if the test of the word at `offset` is true for one of the values."""
    last = len(values) - 1
    tests = [(test, last - at, int(at == last), value) for at, value in enumerate(values)]
    return [(_LOAD, 0, 0, offset), *tests, (_RETURN, 0, 0, _ERRNO | error)]


def _fails_unless(offset: int, test: int, values: Sequence[int], error: int) -> list[_Line]:
    """The call fails with this error if the test is true for none of the values."""
    tests = [(test, len(values) - at, 0, value) for at, value in enumerate(values)]
    return [(_LOAD, 0, 0, offset), *tests, (_RETURN, 0, 0, _ERRNO | error)]


def _only_if(offset: int, value: int, lines: Sequence[_Line]) -> list[_Line]:
    """The lines are passed over if the word at `offset` is another one."""
    return [(_LOAD, 0, 0, offset), (_EQUAL, 0, len(lines), value), *lines]
