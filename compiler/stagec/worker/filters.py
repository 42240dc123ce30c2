"""Filters of system calls, for a process and all that it starts, for good. They take no privilege.

They hold in every jail, with namespaces and without: no socket, no memory of all processes, no new
namespace. So an action has no namespaces of network and IPC, which would keep out only what a filter keeps out; and a
model that has no socket in a container has none on a laptop.

To install the long filter takes 0.7 ms. It is the template's, and its forks inherit it; a fork adds what its template
itself has to call.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

from stagec.worker import syscalls


def _numbers(table: str) -> list[int]:
    return sorted(map(int, table.split()[1::2]))


_REFUSED = _numbers("""
    ptrace 101  syslog 103  uselib 134  modify_ldt 154  pivot_root 155  chroot 161  acct 163  mount 165  umount2 166
    swapon 167  swapoff 168  reboot 169  init_module 175  delete_module 176  quotactl 179  kexec_load 246
    add_key 248  request_key 249  keyctl 250  unshare 272  perf_event_open 298  fanotify_init 300
    name_to_handle_at 303  open_by_handle_at 304  process_vm_readv 310  process_vm_writev 311  kcmp 312
    finit_module 313  kexec_file_load 320  bpf 321  userfaultfd 323  io_uring_setup 425  io_uring_enter 426
    io_uring_register 427  open_tree 428  move_mount 429  fsopen 430  fsconfig 431  fsmount 432  fspick 433
    pidfd_getfd 438  process_madvise 440  mount_setattr 442  quotactl_fd 443  open_tree_attr 467
    shmget 29  shmat 30  shmctl 31  semget 64  semop 65  semctl 66  semtimedop 220  msgget 68  msgsnd 69  msgrcv 70
    msgctl 71  mq_open 240  mq_unlink 241
""")
"""System calls of x86-64 (asm/unistd_64.h) that fail: those that make namespaces, mount, look into processes, or leave
keys or memory behind, and large parts of the kernel that no compiler needs."""
_REFUSED_IN_GROUP = _numbers("""
    truncate 76  chmod 90  fchmod 91  chown 92  fchown 93  lchown 94  setsid 112  utime 132  setxattr 188
    lsetxattr 189  fsetxattr 190  removexattr 197  lremovexattr 198  fremovexattr 199  utimes 235  migrate_pages 256
    fchownat 260  futimesat 261  fchmodat 268  move_pages 279  utimensat 280  openat2 437  fchmodat2 452
    setxattrat 463  removexattrat 466  file_setattr 469
""")
"""Those that fail besides where an action has no namespaces: they change files in ways that Landlock does not know, or
leave the session. In namespaces, read-only mounts keep the machine's files, and an action may change its own so."""
_OPEN, _IOCTL, _SETPGID, _OPENAT, _PRLIMIT64, _SETNS = 2, 16, 109, 257, 302, 308
_IOCTL_REFUSED = [0x40086602, 0x40046602, 0x401C5820, 0x40806685]
"""FS_IOC_SETFLAGS, FS_IOC32_SETFLAGS, FS_IOC_FSSETXATTR, FS_IOC_ENABLE_VERITY: no file has to be open to write."""
_SOCKET, _SOCKETPAIR, _CLONE, _CLONE3 = 41, 53, 56, 435
_CLONE_REFUSED = 0x7E020080 | 0x8000
"""All flags of clone(2) that make namespaces; and CLONE_PARENT, which makes a child of the template's: nobody would
wait for it, and the PID namespace would never end."""
_SOCK_STREAM, _SOCK_SEQPACKET, _SOCK_TYPE = 1, 5, 0xF
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97

_PR_SET_NO_NEW_PRIVS, _SECCOMP, _SET_MODE_FILTER, _SPEC_ALLOW = 38, 317, 1, 4
_ALLOW, _ERRNO = 0x7FFF0000, 0x50000
_AUDIT_ARCH_X86_64, _X32 = 0xC000003E, 0x40000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 24, 32
"""Where in struct seccomp_data (linux/seccomp.h)."""
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_Line = tuple[int, int, int, int]
"""An instruction of classic BPF (linux/filter.h): code, how many to skip if a test is true, and if not; a value."""


def exists() -> bool:
    """Return whether there is a filter for this machine: each architecture has other numbers."""
    return os.uname().machine == "x86_64"


def install(instructions: bytes) -> None:
    """Filter the calls of this process from here on. No program that it starts gives it a capability any more.

    Without new privileges, root's programs get none either: nothing else has to take capabilities away (prctl(2)).
    """
    syscalls.prctl(_PR_SET_NO_NEW_PRIVS, 1)
    code = ctypes.create_string_buffer(instructions, len(instructions))
    filter_ = struct.pack("HxxxxxxQ", len(instructions) // 8, ctypes.addressof(code))
    # Without the flag, older kernels slow such a process down, against a leak within a process (seccomp(2)).
    try:
        syscalls.call("syscall", _SECCOMP, _SET_MODE_FILTER, _SPEC_ALLOW, filter_)
    except OSError as error:
        raise OSError(error.errno, f"seccomp: {os.strerror(error.errno or 0)}") from None


def of_template(in_group: bool) -> bytes:
    """Return the filter of a template and its forks, as instructions of classic BPF: calls that it does not name pass.

    in_group: whether it is for processes without namespaces.
    """
    lines = _fails_unless(_ARCHITECTURE, _EQUAL, [_AUDIT_ARCH_X86_64], _EPERM)
    lines += _fails_if(_NUMBER, _AT_LEAST, [_X32], _EPERM)
    lines += _fails_if(_NUMBER, _EQUAL, _REFUSED, _EPERM)
    lines += _fails_if(_NUMBER, _EQUAL, [_CLONE3], _ENOSYS)  # its flags are in memory; C libraries take clone then
    lines += _only_if(_NUMBER, _CLONE, _fails_if(_FIRST_ARGUMENT, _ANY_BIT, [_CLONE_REFUSED], _EPERM))
    lines += _fails_if(_NUMBER, _EQUAL, [_SOCKET], _EAFNOSUPPORT)
    # One of a pair of datagram sockets can send to any socket of the machine that has a path; a stream is connected.
    load, *fails = _fails_unless(_SECOND_ARGUMENT, _EQUAL, [_SOCK_STREAM, _SOCK_SEQPACKET], _EAFNOSUPPORT)
    lines += _only_if(_NUMBER, _SOCKETPAIR, [load, (_AND, 0, 0, _SOCK_TYPE), *fails])
    if in_group:
        lines += _fails_if(_NUMBER, _EQUAL, _REFUSED_IN_GROUP, _EPERM)
        lines += _only_if(_NUMBER, _IOCTL, _fails_if(_SECOND_ARGUMENT, _EQUAL, _IOCTL_REFUSED, _EPERM))
        lines += _only_if(_NUMBER, _PRLIMIT64, _fails_unless(_FIRST_ARGUMENT, _EQUAL, [0], _EPERM))
        for number, flags in ((_OPEN, _SECOND_ARGUMENT), (_OPENAT, _THIRD_ARGUMENT)):
            lines += _only_if(_NUMBER, number, _truncates_what_it_reads(flags))
    return assembled(lines)


def of_action(in_group: bool) -> bytes:
    """Return what is refused besides to a fork that has entered its jail: to enter another one."""
    return assembled(fails_if_called([_SETNS, *([_SETPGID] if in_group else [])], _EPERM))


def assembled(lines: Sequence[_Line]) -> bytes:
    """Return a filter of which these are the lines; calls on which none of them decides pass."""
    return b"".join(struct.pack("HBBI", *line) for line in [*lines, (_RETURN, 0, 0, _ALLOW)])


def fails_if_called(numbers: Sequence[int], error: int) -> list[_Line]:
    """Return the lines by which system calls of these numbers fail with an error."""
    return _fails_if(_NUMBER, _EQUAL, numbers, error)


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
