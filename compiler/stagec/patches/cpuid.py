"""Make LLVM see the CPU that a target names, whatever this machine is; or all of a library.

XLA:CPU compiles for the machine that it runs on: LLVM asks the `cpuid` instruction. While a module is compiled, those
few instructions are jumps to code that gives the answers of `x86.Isa` (`machine_code`). Only LLVM's own detection of
the host is changed (llvm/lib/TargetParser/Host.cpp); libraries that choose kernels by cpuid go on to see the machine.
Whether it worked is not taken on trust: `cpu` compares the CPU and the features that XLA stored with the target's.

Where a model computes while it is traced, the kernels count too: YNNPACK chooses them by cpuid, and Eigen sums in
blocks as large as the caches that cpuid tells. Then all such instructions of the library are changed.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Iterator, Sequence

from stagec.hardware.x86 import Isa
from stagec.patches import places
from stagec.patches.machine_code import Code, Patch, room_near

# Compilers keep rbx: `xchg rbx, r; cpuid; xchg rbx, r`. A jump fits in place of the first two.
_CPUID, _XCHG_SIZE, _JUMP_SIZE = b"\x0f\xa2", 3, 5
_WIDE = (0x48, 0x49, 0x4C)  # prefixes of instructions with registers of 64 bits
_XGETBV = b"\x31\xc9\x0f\x01\xd0"  # xor ecx, ecx; xgetbv
_IS_EAX, _IS_ECX, _JNE = b"\x3d", b"\x81\xf9", b"\x0f\x85"
# Leaves that LLVM asks for among others, and no other code in the library does: `mov eax, leaf`.
_RARE, _OTHERS = b"\xb8\x21\x00\x00\x80", (b"\xb8\x14\x00\x00\x00", b"\xb8\x19\x00\x00\x00")
_NEAR = 16384
_ROOM = 1 << 18


@functools.cache
def patches(code: Code, isa: Isa, everywhere: bool = False) -> tuple[Patch, ...]:
    """Return the changes to `code`, a library with LLVM in it, that let LLVM see a CPU that has `isa` and nothing else.

    everywhere: whether the rest of the library sees it too.
    Raises PatchError when there is no room for them.
    """
    at = room_near(code, _ROOM)
    result: list[Patch] = []
    for address in dict.fromkeys([*sites(code), *(every_site(code) if everywhere else ())]):
        before = ctypes.string_at(address, _JUMP_SIZE)
        answer = _answer(isa, address, before, at)
        jump = _jump(at - address - _JUMP_SIZE)
        result += [Patch(at, bytes(len(answer)), answer), Patch(address, before, jump)]
        at += len(answer)
    return tuple(result)


@functools.cache
def sites(code: Code) -> tuple[int, ...]:
    """Return the addresses of the instructions that detect the host for LLVM; none if it does not."""
    if (known := places.of(code, "cpuid")) is not None:
        return tuple(at for at in known if _is_exchanged(at) or ctypes.string_at(at, len(_XGETBV)) == _XGETBV)
    host = next(hosts(code), None)  # `known_builds.examined` searches to the end, which takes four times as long
    if host is None:
        return ()
    sought = (at - _XCHG_SIZE for at in code.find(_CPUID, host, _NEAR))
    # XCR0 says which registers the system saves. Without AVX-512 there, LLVM would drop it from a target that has it.
    return (*filter(_is_exchanged, sought), *code.find(_XGETBV, host, _NEAR))


def _is_exchanged(address: int) -> bool:
    """Whether instructions are `xchg rbx, r; cpuid; xchg rbx, r`.

    Only this form has room for a jump of five bytes, and no jump leads into the middle of it: both exchanges are in one
    piece of assembly, which a header of the compiler has.
    """
    before, asked, after = _around(address)
    return asked == _CPUID and before == after and before[0] in _WIDE and before[1] == 0x87


def _around(address: int) -> tuple[bytes, bytes, bytes]:
    code = ctypes.string_at(address, 2 * _XCHG_SIZE + len(_CPUID))
    return code[:_XCHG_SIZE], code[_XCHG_SIZE:-_XCHG_SIZE], code[-_XCHG_SIZE:]


@functools.cache
def every_site(code: Code) -> tuple[int, ...]:
    """Return the addresses of all `cpuid` instructions of the library that keep rbx, as those of headers do.

    Others are in libraries that do not ask while a model is traced: OpenSSL, and oneDNN if nothing uses it.
    """
    known = places.of(code, "every_cpuid")
    return tuple(filter(_keeps_rbx, (at - _XCHG_SIZE for at in code.find(_CPUID)) if known is None else known))


def _keeps_rbx(address: int) -> bool:
    before, asked, after = _around(address)
    kept = before == after and before[1] == 0x87  # xchg; cpuid; xchg
    copied = before[1] == 0x89 and after[1] == 0x87  # mov; cpuid; xchg
    return asked == _CPUID and (kept or copied) and before[0] in _WIDE and after[0] in _WIDE


def hosts(code: Code) -> Iterator[int]:
    """Yield an address at each site where LLVM detects the host; a known build has one."""
    return (at for at in code.find(_RARE) if all(any(code.find(other, at, _NEAR)) for other in _OTHERS))


def _answer(isa: Isa, address: int, before: bytes, at: int) -> bytes:
    """Return code, to lie `at`, for what the instructions `before` at `address` do; it jumps behind them."""
    code = _load((isa.xcr0, None, 0, 0)) if before == _XGETBV else before[:_XCHG_SIZE] + answers(isa)
    return code + _jump(address + _JUMP_SIZE - (at + len(code) + _JUMP_SIZE))


@functools.cache  # the same at all sites
def answers(isa: Isa) -> bytes:
    """Return code that does what `cpuid` does on a CPU with `isa`, and goes on behind its last byte."""
    code = _load((0, 0, 0, 0))
    # A leaf that is not in the table answers zeros, as a CPU does that lacks it: nothing of the machine shows through.
    for (leaf, subleaf), values in reversed(list(isa.answers.items())):
        answer = _load(values) + _jump(len(code))
        if subleaf is not None:
            answer = _where(_IS_ECX, subleaf, answer)
        code = _where(_IS_EAX, leaf, answer) + code
    return code


def _where(test: bytes, value: int, code: bytes) -> bytes:
    """Return code that is skipped if a register has another value. test: the instruction that compares it."""
    return test + struct.pack("<I", value) + _JNE + struct.pack("<i", len(code)) + code


def _load(values: Sequence[int | None]) -> bytes:
    """Return code that puts values into eax, ebx, ecx and edx; None leaves one as it is."""
    opcodes = (0xB8, 0xBB, 0xB9, 0xBA)  # mov r32, imm32
    pairs = zip(opcodes, values, strict=True)
    return b"".join(struct.pack("<BI", opcode, value) for opcode, value in pairs if value is not None)


def _jump(distance: int) -> bytes:
    return b"\xe9" + struct.pack("<i", distance)
