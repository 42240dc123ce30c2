"""Let every hash table of XLA have the same seed, so that none has another order in every run.

Abseil seeds each table from the address of a variable of the thread and from the number of tables that the thread made
(absl/container/internal/raw_hash_set.h). XLA:CPU writes the arguments of hoisted loops in the order of such a table:
machine code, calls and buffers differ from run to run. While a module is compiled, the seed is a constant
(`machine_code`).
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator

from stagec.patches.machine_code import Code, Patch

SEED = 0xAD53
"""What every table gets."""

# A seed of 16 bits, one step from the last: add eax, -0x52ad; mov [rdx], ax. The first becomes mov eax, seed.
_STEP, _ADD_SIZE = b"\x05\x53\xad\xff\xff\x66\x89\x02", 5
# Abseil in libtpu 0.0.44 and later: one of 8 bits, of a counter and its address. mov edx, 0xad53; add rdx, [rax + ...];
# ...; xor ecx, edx, or with ecx and edx in each other's place. The last becomes mov cl, seed, or mov dl, seed.
_COUNTER = b"\x53\xad\x00\x00\x48\x03"
_COUNTED = re.compile(
    rb"\xba" + _COUNTER + rb"\x90.{4,40}?\x31\xd1|\xb9" + _COUNTER + rb"\x88.{4,40}?\x31\xca", re.DOTALL
)
_MOST = 64
_MOVES = {b"\x31\xd1": b"\xb1", b"\x31\xca": b"\xb2"}


def patches(code: Code, seed: int = SEED) -> list[Patch]:
    """Return the changes to `code`, a library with Abseil in it, that make the seed of every new table the same."""
    changes = []
    for address in sites(code):
        before = ctypes.string_at(address, _ADD_SIZE)
        if before == _STEP[:_ADD_SIZE]:
            changes.append(Patch(address, before, b"\xb8" + seed.to_bytes(4, "little")))
        else:
            changes.append(Patch(address, before[:2], _MOVES[before[:2]] + bytes((seed & 0xFF,))))
    return changes


@functools.cache
def sites(code: Code) -> tuple[int, ...]:
    """Return the addresses of the instructions that make a seed."""
    return tuple(code.find(_STEP)) or tuple(_counted(code))


def _counted(code: Code) -> Iterator[int]:
    for address in code.find(_COUNTER):
        match = _COUNTED.match(ctypes.string_at(address - 1, min(_MOST, code.address + code.size - address + 1)))
        if match:
            yield address - 1 + match.end() - 2
