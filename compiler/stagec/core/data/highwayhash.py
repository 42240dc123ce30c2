"""HighwayHash, 64 bits: the checksum of Riegeli files (https://github.com/google/highwayhash).

Plain Python, some 2 MB a second.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_64 = (1 << 64) - 1
_32 = (1 << 32) - 1
_MUL0 = (0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3)
_MUL1 = (0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377)


def hash64(key: Sequence[int], data: bytes) -> int:
    """Return the hash of `data`. key: four numbers of 64 bits."""
    v0 = [m ^ k for m, k in zip(_MUL0, key, strict=True)]
    v1 = [m ^ _swap(k) for m, k in zip(_MUL1, key, strict=True)]
    state = (v0, v1, list(_MUL0), list(_MUL1))
    whole = len(data) & ~31
    for lanes in struct.iter_unpack("<4Q", memoryview(data)[:whole]):
        _update(state, lanes)
    rest = data[whole:]
    if rest:
        size = len(rest)
        for i in range(4):
            v0[i] = (v0[i] + (size << 32) + size) & _64
            v1[i] = _rotate(v1[i] >> 32, size) << 32 | _rotate(v1[i] & _32, size)
        _update(state, struct.unpack("<4Q", _padded(rest)))
    for _ in range(4):
        _update(state, [_swap(v0[2]), _swap(v0[3]), _swap(v0[0]), _swap(v0[1])])
    return sum(part[0] for part in state) & _64


def _padded(rest: bytes) -> bytes:
    packet, last = bytearray(32), len(rest) & 3
    packet[: len(rest) - last] = rest[: len(rest) - last]
    if len(rest) & 16:
        packet[28:] = rest[-4:]
    elif last:
        tail = rest[-last:]
        packet[16:19] = bytes((tail[0], tail[last >> 1], tail[last - 1]))
    return bytes(packet)


def _update(state: tuple[list[int], list[int], list[int], list[int]], lanes: Sequence[int]) -> None:
    v0, v1, mul0, mul1 = state
    for i in range(4):
        a = (v1[i] + mul0[i] + lanes[i]) & _64
        mul0[i] ^= (a & _32) * (v0[i] >> 32)
        b = (v0[i] + mul1[i]) & _64
        mul1[i] ^= (b & _32) * (a >> 32)
        v0[i], v1[i] = b, a
    for source, target in ((v1, v0), (v0, v1)):
        for i in (0, 2):
            low, high = source[i], source[i + 1]
            target[i] = (
                target[i]
                + (((low & 0xFF000000) | (high & 0xFF00000000)) >> 24)
                + (((low & 0xFF0000000000) | (high & 0xFF000000000000)) >> 16)
                + (low & 0xFF0000)
                + ((low & 0xFF00) << 32)
                + ((high & 0xFF00000000000000) >> 8)
                + (low << 56)
            ) & _64
            target[i + 1] = (
                target[i + 1]
                + (((high & 0xFF000000) | (low & 0xFF00000000)) >> 24)
                + (high & 0xFF0000)
                + ((high & 0xFF0000000000) >> 16)
                + ((high & 0xFF00) << 24)
                + ((low & 0xFF000000000000) >> 8)
                + ((high & 0xFF) << 48)
                + (low & 0xFF00000000000000)
            ) & _64


def _swap(value: int) -> int:
    return value >> 32 | (value & _32) << 32


def _rotate(value: int, count: int) -> int:
    return (value << count | value >> (32 - count)) & _32
