"""Let LLVM see the CPU that a target names, whatever this machine is.

XLA:CPU compiles for the machine that it runs on: LLVM asks the `cpuid` instruction. While a module is compiled, those
few instructions are jumps to code that gives the answers of `x86.Isa` (`machine_code`). Only LLVM's own detection of
the host is changed (llvm/lib/TargetParser/Host.cpp); libraries that choose kernels by cpuid go on to see the machine.
Whether it worked is not taken on trust: `cpu` compares the CPU and the features that XLA stored with the target's.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Iterator

from stagec.hardware.x86 import Isa
from stagec.patches.machine_code import Code, Patch, room_near

# Compilers keep rbx: `xchg rbx, r; cpuid; xchg rbx, r`. A jump fits in the place of the first two.
_CPUID, _XCHG_SIZE, _JUMP_SIZE = b"\x0f\xa2", 3, 5
_XGETBV = b"\x31\xc9\x0f\x01\xd0"  # xor ecx, ecx; xgetbv
_JNE = b"\x0f\x85"
# Leaves that LLVM asks for among others, and no other code in the library does: `mov eax, leaf`.
_RARE, _OTHERS = b"\xb8\x21\x00\x00\x80", (b"\xb8\x14\x00\x00\x00", b"\xb8\x19\x00\x00\x00")
_NEAR = 16384
_ROOM = 1 << 18


@functools.cache
def patches(code: Code, isa: Isa) -> tuple[Patch, ...]:
    """Return the changes to `code`, a library with LLVM in it, that let LLVM see a CPU that has `isa` and nothing else.

    Raises PatchError when there is no room for them.
    """
    at = room_near(code, _ROOM)
    result: list[Patch] = []
    for address in sites(code):
        before = ctypes.string_at(address, _JUMP_SIZE)
        answer = _answer(isa, address, before, at)
        jump = b"\xe9" + struct.pack("<i", at - address - _JUMP_SIZE)
        result += [Patch(at, bytes(len(answer)), answer), Patch(address, before, jump)]
        at += len(answer)
    return tuple(result)


@functools.cache
def sites(code: Code) -> tuple[int, ...]:
    """Return the addresses of the instructions with which LLVM detects the host; none where it does not."""
    host = next(hosts(code), None)  # `known_builds.examined` searches to the end, which takes four times as long
    if host is None:
        return ()
    addresses = []
    for at in code.find(_CPUID, host, _NEAR):
        before = ctypes.string_at(at - _XCHG_SIZE, _XCHG_SIZE)
        after = ctypes.string_at(at + len(_CPUID), _XCHG_SIZE)
        if before == after and before[0] in (0x48, 0x49, 0x4C) and before[1] == 0x87:
            addresses.append(at - _XCHG_SIZE)
    return (*addresses, *code.find(_XGETBV, host, _NEAR))


def hosts(code: Code) -> Iterator[int]:
    """Yield an address in each place where LLVM detects the host; a build that is known has one."""
    return (at for at in code.find(_RARE) if all(any(code.find(other, at, _NEAR)) for other in _OTHERS))


def _answer(isa: Isa, address: int, before: bytes, at: int) -> bytes:
    """Return code, to lie `at`, for what the instructions `before` at `address` do; it jumps behind them."""
    code = bytearray()

    def leave(**registers: int) -> bytes:
        opcodes = {"eax": 0xB8, "ebx": 0xBB, "ecx": 0xB9, "edx": 0xBA}  # mov r32, imm32
        loads = b"".join(struct.pack("<BI", opcodes[name], value) for name, value in registers.items())
        back = address + _JUMP_SIZE - (at + len(code) + len(loads) + _JUMP_SIZE)
        return loads + b"\xe9" + struct.pack("<i", back)

    if before == _XGETBV:
        return leave(eax=isa.xcr0, ecx=0, edx=0)
    code += before[:_XCHG_SIZE]
    names = ("eax", "ebx", "ecx", "edx")
    for (leaf, subleaf), values in isa.answers.items():
        tests = [b"\x3d" + struct.pack("<I", leaf)]  # cmp eax, leaf
        if subleaf is not None:
            tests.append(b"\x81\xf9" + struct.pack("<I", subleaf))  # cmp ecx, subleaf
        registers = dict(zip(names, values, strict=True))
        rest = len(leave(**registers))
        for number, test in enumerate(tests):
            over = rest + sum(len(other) + len(_JNE) + 4 for other in tests[number + 1 :])
            code += test + _JNE + struct.pack("<i", over)
        code += leave(**registers)
    return bytes(code + leave(**dict.fromkeys(names, 0)))
