"""Let a whole process see another CPU, as on another machine: for a build that must not follow the machine.

Linux makes `cpuid` a fault where the processor can (arch_prctl, ARCH_CPUID: Intel since 2012, and most virtual machines
on KVM). A handler answers instead, for every library that is loaded later. The C library has asked before. Code that
the process runs must not need more than the CPU that it sees, and that no more than the machine has.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import struct

from stagec.hardware.x86 import Isa
from stagec.patches import cpuid
from stagec.patches.machine_code import PatchError

_ARCH_PRCTL, _ARCH_CPUID = 158, 0x1012
_SIGSEGV, _FLAGS = 11, 0x4 | 0x40000000 | 0x08000000  # SA_SIGINFO, SA_NODEFER, SA_ONSTACK
# Where the kernel keeps registers in the third argument of a handler, `ucontext_t`.
_RBX, _RDX, _RAX, _RCX, _RIP = 128, 136, 144, 152, 168


def possible() -> bool:
    """Return whether this machine can show another CPU. It is for x86-64 alone."""
    return os.uname().machine == "x86_64" and _ask(faults=True) and _ask(faults=False)


def show(isa: Isa) -> None:
    """Let this process, and the threads that it starts from here on, see a CPU that has `isa` and nothing else.

    Call it before numpy or jaxlib is imported: both look when they are loaded. Nothing undoes it but another program.
    Raises PatchError where the machine cannot.
    """
    if not possible():
        raise PatchError("this machine can show a process no other CPU")
    code = _handler(isa)
    page = mmap.mmap(-1, -(-len(code) // mmap.PAGESIZE) * mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(page)), mmap.PROT_READ | mmap.PROT_EXEC):
        raise PatchError("this system lets no process run code that it wrote")
    # The handler outlives this call: if Python freed the page, the next `cpuid` would end the process.
    _KEPT.append(page)
    action = struct.pack("<Q128xi4xQ", address, _FLAGS, 0)  # struct sigaction
    if libc.sigaction(_SIGSEGV, action, None) or not _ask(faults=True):
        raise PatchError("this system lets no process handle a fault")
    faulthandler.enable = lambda *_, **__: None  # its handler would take the place of ours


_KEPT: list[mmap.mmap] = []


def _ask(faults: bool) -> bool:
    """Have `cpuid` fault, or not; return whether the kernel could."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(_ARCH_CPUID), ctypes.c_long(not faults)) == 0)


def _handler(isa: Isa) -> bytes:
    """Return the code of a handler of SIGSEGV. A fault of anything else kills the process, as without it."""
    # No Python runs here: a fault may come while the interpreter is in any state, and in threads that Python does not
    # know. The handler writes the answers into the saved registers, and skips the two bytes of `cpuid`.
    answered = (
        b"\x53\x49\x89\xd1"  # push rbx; mov r9, rdx
        + _moved(b"\x41\x8b\x81", _RAX)  # mov eax, [r9 + ...]
        + _moved(b"\x41\x8b\x89", _RCX)
        + cpuid.answers(isa)
        + _moved(b"\x49\x89\x81", _RAX)  # mov [r9 + ...], rax
        + _moved(b"\x49\x89\x99", _RBX)
        + _moved(b"\x49\x89\x89", _RCX)
        + _moved(b"\x49\x89\x91", _RDX)
        + _moved(b"\x49\x83\x81", _RIP)  # add qword [r9 + ...], 2
        + b"\x02\x5b\xc3"  # pop rbx; ret
    )
    # rt_sigaction(SIGSEGV, {SIG_DFL}, NULL, 8): lea rsi, [rip + 21]; mov eax, 13; mov edi, 11; xor edx, edx;
    # mov r10d, 8; syscall; ret. Then the instruction runs again.
    default = bytes.fromhex("488d3515000000 b80d000000 bf0b000000 31d2 41ba08000000 0f05c3") + bytes(32)
    beyond = b"\x0f\x85" + struct.pack("<i", len(answered))
    asked = (
        _moved(b"\x4c\x8b\x82", _RIP)  # mov r8, [rdx + ...]
        + b"\x66\x41\x81\x38\x0f\xa2"  # cmp word [r8], 0xa20f
    )
    # A fault of `cpuid` comes from the kernel (SI_KERNEL in si_code): else rip may not be readable.
    skipped = len(asked) + len(beyond) + len(answered)
    return b"\x81\x7e\x08\x80\x00\x00\x00\x0f\x85" + struct.pack("<i", skipped) + asked + beyond + answered + default


def _moved(opcode: bytes, offset: int) -> bytes:
    return opcode + struct.pack("<i", offset)
