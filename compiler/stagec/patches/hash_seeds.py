"""Let every hash table of XLA have the same seed, so that none has another order in every run.

Abseil seeds each table from the address of a variable of the thread and from the number of tables that the thread made
(absl/container/internal/raw_hash_set.h). XLA:CPU writes the arguments of hoisted loops in the order of such a table:
machine code, calls and buffers differ from run to run. While a module is compiled, the seed is a constant
(`machine_code`). The other way is to switch hoisting off.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Iterator

from stagec.patches import places
from stagec.patches.machine_code import Code, Patch

SEED = 0xAD53
"""The seed of every table."""

# A seed of 16 bits, one step from the last: add eax, -0x52ad; mov [rdx], ax. The first becomes mov eax, seed.
_STEP, _ADD_SIZE = b"\x05\x53\xad\xff\xff\x66\x89\x02", 5
# Abseil in libtpu 0.0.44 and later: one of 8 bits, of a counter and its address. mov edx, 0xad53; add rdx, [rax + ...];
# ...; xor ecx, edx, or with ecx and edx in each other's place. The last becomes mov cl, seed, or mov dl, seed.
_COUNTER = b"\x53\xad\x00\x00\x48\x03"
_COUNTED = re.compile(
    rb"\xba" + _COUNTER + rb"\x90.{4,40}?\x31\xd1|\xb9" + _COUNTER + rb"\x88.{4,40}?\x31\xca", re.DOTALL
)
_MOST = 64
# The step on aarch64: mov wA, -0x52ad; ...; add wD, wB, wA. The last becomes mov wD, seed.
_AARCH64_STEP, _AARCH64_MOST = b"\x55\x8a\x12", 4
_MOVES = {b"\x31\xd1": b"\xb1", b"\x31\xca": b"\xb2"}


def patches(code: Code, seed: int = SEED) -> list[Patch]:
    """Return the changes to `code`, a library with Abseil in it, that make the seed of every new table the same."""
    changes = []
    for address in sites(code):
        before = ctypes.string_at(address, _ADD_SIZE)
        if code.architecture == "aarch64":
            instruction = 0x52800000 | seed << 5 | before[0] & 31
            changes.append(Patch(address, before[:4], instruction.to_bytes(4, "little")))
        elif before == _STEP[:_ADD_SIZE]:
            changes.append(Patch(address, before, b"\xb8" + seed.to_bytes(4, "little")))
        else:
            changes.append(Patch(address, before[:2], _MOVES[before[:2]] + bytes((seed & 0xFF,))))
    return changes


@functools.cache
def sites(code: Code) -> tuple[int, ...]:
    """Return the addresses of the instructions that make a seed."""
    if code.architecture == "aarch64":
        return tuple(_on_aarch64(code))
    if (known := places.of(code, "hash_seeds")) is not None:
        return tuple(at for at in known if ctypes.string_at(at, len(_STEP)) == _STEP)
    return tuple(code.find(_STEP)) or tuple(_counted(code))


def _on_aarch64(code: Code) -> Iterator[int]:
    for address in code.find(_AARCH64_STEP):
        start = address - 1
        text = ctypes.string_at(start, min(4 * (_AARCH64_MOST + 1), code.address + code.size - start))
        first, *others = (word for (word,) in struct.iter_unpack("<I", text[: len(text) & -4]))
        if first & ~31 != 0x128A5580 or start % 4:
            continue
        for number, word in enumerate(others, 1):
            if word & 0xFFFFFC00 == 0x0B000000 | (first & 31) << 16:
                yield start + 4 * number
                break


def _counted(code: Code) -> Iterator[int]:
    for address in code.find(_COUNTER):
        match = _COUNTED.match(ctypes.string_at(address - 1, min(_MOST, code.address + code.size - address + 1)))
        if match:
            yield address - 1 + match.end() - 2
