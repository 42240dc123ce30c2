"""Make XLA see as many cores as a target declares, whatever this machine has.

XLA:CPU splits an operation that is bound by memory into no more parts than the square root of the cores that the
process may run on (xla/service/cpu/parallel_task_assignment.cc), which it asks the system for. While a module is
compiled, the library's `sched_getaffinity` is code that names the first cores, as many as the target's `parallelism`.
"""

from __future__ import annotations

import ctypes
import functools
import struct

from stagec.patches.machine_code import Code, Patch, room_near

_MOST = 1000  # XLA asks with room for 1,024
# for (x3 = 0; x3 < x1; x3++) x2[x3] = x3 < 128 ? answer[x3] : 0; return 0; answer:
_AARCH64 = bytes.fromhex(
    "a4010010 030080d2 7f0001eb 02010054 05008052 7f0002f1 42000054"  # adr, mov, cmp, b.hs, mov, cmp, b.hs
    "85686338 45682338 63040091 f8ffff17 00008052 c0035fd6"  # ldrb, strb, add, b, mov, ret
)


def patches(code: Code, cores: int) -> list[Patch]:
    """Return the changes that make the library `code` see the declared number of cores.

    Raises PatchError when there is no room for them, or its file cannot be read.
    """
    whole, rest = divmod(min(cores, _MOST), 8)
    answer = b"".join(
        (
            b"\x48\x89\xd7\x48\x89\xf1\x31\xc0\xf3\xaa",  # mov rdi, rdx; mov rcx, rsi; xor eax, eax; rep stosb
            b"\x48\x89\xd7\xb9" + struct.pack("<I", whole) + b"\xb0\xff\xf3\xaa",  # mov rdi, rdx; ...; rep stosb
            b"\xc6\x07" + bytes(((1 << rest) - 1,)),  # mov byte [rdi], bits
            b"\x31\xc0\xc3",  # xor eax, eax; ret
        )
    )
    if code.architecture == "aarch64":
        answer = _AARCH64 + ((1 << min(cores, _MOST)) - 1).to_bytes(128, "little")
    # The library calls through this slot, so other libraries of the process go on to see the machine.
    at = room_near(code, 4096)
    jumps = [Patch(slot, ctypes.string_at(slot, 8), struct.pack("<Q", at)) for slot in sites(code)]
    return [Patch(at, bytes(len(answer)), answer), *jumps]


@functools.cache
def sites(code: Code) -> tuple[int, ...]:
    """Return the address at which the library keeps that of `sched_getaffinity`. Raises PatchError as `patches`."""
    slot = code.imported("sched_getaffinity")
    return () if slot is None else (slot,)
