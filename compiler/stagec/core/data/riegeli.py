"""Read and edit the records of a Riegeli file: XLA:GPU stores an executable in parts in this form.

A file is chunks of records, cut into blocks of 64 KiB that each begin with a header
(https://github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md). Chunks that XLA writes are
compressed with Snappy (https://github.com/google/snappy/blob/main/format_description.txt); here they are plain.
Riegeli's own library is C++ that Bazel builds; this module and `highwayhash` are all of it that is needed here.
"""

from __future__ import annotations

import bisect
import itertools
import struct
from collections.abc import Callable, Iterator

from stagec.core.data import highwayhash, wire

SIGNATURE = bytes.fromhex("83af70d10d884a3f")
"""The first bytes of every file."""
_BLOCK, _BLOCK_HEADER, _CHUNK_HEADER = 1 << 16, 24, 40
_KEY = struct.unpack("<4Q", b"Riegeli/records\n" * 2)
_SIMPLE = ord("r")


def records(file: bytes) -> Iterator[bytes]:
    """Yield the records in order. Raises ValueError if the bytes are not a Riegeli file, or have an unknown form."""
    for chunk in _chunks(file):
        yield from _records(chunk)


def edit(file: bytes, change: Callable[[int, bytes], bytes | None]) -> bytes:
    """Return the file with each record as `change`, given its number and bytes, returns it; None leaves it as it is.

    Changed chunks have one fixed form, whatever their form before. Raises ValueError as `records`.
    """
    edited, number = [], 0
    for chunk in _chunks(file):
        old = list(_records(chunk))
        new = [change(number + i, record) for i, record in enumerate(old)]
        changed = [record if other is None else other for record, other in zip(old, new, strict=True)]
        edited.append(chunk if all(other is None for other in new) else _plain(changed))
        number += len(old)
    return _assemble(edited)


def _chunks(file: bytes) -> Iterator[bytes]:
    if not file.startswith(SIGNATURE):
        raise ValueError("not a Riegeli file")
    joined = b"".join(file[at + _BLOCK_HEADER : at + _BLOCK] for at in range(0, len(file), _BLOCK))
    at = 0
    while at < len(joined):
        if at + _CHUNK_HEADER > len(joined):
            raise ValueError("truncated chunk")
        size, _, kind_and_count, _ = struct.unpack_from("<4Q", joined, at + 8)
        end = at + _CHUNK_HEADER + max(size, kind_and_count >> 8)
        if end > len(joined):
            raise ValueError("truncated chunk")
        yield joined[at:end]
        at = end


def _records(chunk: bytes) -> Iterator[bytes]:
    size, _, kind_and_count, _ = struct.unpack_from("<4Q", chunk, 8)
    kind = kind_and_count & 0xFF
    if kind == _SIMPLE:
        yield from _simple(chunk[_CHUNK_HEADER : _CHUNK_HEADER + size], kind_and_count >> 8)
    elif chr(kind) not in "sp":  # the signature, and padding
        raise ValueError(f"chunk of type {chr(kind)!r}")


def _plain(contents: list[bytes]) -> bytes:
    """Return a chunk that holds these records without compression."""
    sizes = b"".join(wire.write_varint(len(record)) for record in contents)
    values = b"".join(contents)
    data = b"\0" + wire.write_varint(len(sizes)) + sizes + values
    kind_and_count = _SIMPLE | len(contents) << 8
    header = struct.pack("<4Q", len(data), highwayhash.hash64(_KEY, data), kind_and_count, len(values))
    return struct.pack("<Q", highwayhash.hash64(_KEY, header)) + header + data.ljust(len(contents), b"\0")


def _assemble(chunks: list[bytes]) -> bytes:
    """Return the file: the chunks in a row, with a header before every block that names the interrupted chunk."""
    joined, ends = b"".join(chunks), list(itertools.accumulate(map(len, chunks)))
    room = _BLOCK - _BLOCK_HEADER

    def position(at: int) -> int:
        """Return the file offset of a byte of `joined`; a chunk that begins with a block begins with its header."""
        block, offset = divmod(at, room)
        return block * _BLOCK + (_BLOCK_HEADER + offset if offset else 0)

    out = []
    for at in range(0, len(joined), room):
        number = bisect.bisect_right(ends, at)
        begin = position(ends[number - 1] if number else 0)
        here = at // room * _BLOCK
        header = struct.pack("<2Q", here - begin, position(ends[number]) - here)
        out += [struct.pack("<Q", highwayhash.hash64(_KEY, header)), header, joined[at : at + room]]
    return b"".join(out)


def _simple(chunk: bytes, count: int) -> Iterator[bytes]:
    """Yield the records of a chunk that holds their sizes, then their bytes. count: says its header."""
    length, at = wire.read_varint(chunk, 1)
    parts = [chunk[at : at + length], chunk[at + length :]]
    match chunk[:1]:
        case b"\0":
            sizes, values = parts
        case b"s":
            # Before the Snappy stream stands the size that it states itself.
            sizes, values = (_unsnappy(part[wire.read_varint(part, 0)[1] :]) for part in parts)
        case other:
            raise ValueError(f"compression {other!r}")
    at = start = 0
    while at < len(sizes):
        count -= 1
        if count < 0:  # a byte of a compressed chunk may be twenty records
            raise ValueError("more records than the header of their chunk says")
        size, at = wire.read_varint(sizes, at)
        yield values[start : start + size]
        start += size


def _unsnappy(stream: bytes) -> bytes:
    size, at = wire.read_varint(stream, 0)
    out = bytearray()
    while at < len(stream):
        tag = stream[at]
        at += 1
        if tag & 3 == 0:
            length = tag >> 2
            if length >= 60:
                width = length - 59
                length = int.from_bytes(stream[at : at + width], "little")
                at += width
            out += stream[at : at + length + 1]
            at += length + 1
            continue
        if tag & 3 == 1:
            length, offset = (tag >> 2 & 7) + 4, (tag >> 5) << 8 | stream[at]
            at += 1
        else:
            width = 2 if tag & 3 == 2 else 4
            length, offset = (tag >> 2) + 1, int.from_bytes(stream[at : at + width], "little")
            at += width
        if not 0 < offset <= len(out):
            raise ValueError("not a Snappy stream")
        # A copy may overlap its own output: then it repeats. Of a far one only its own bytes are sliced.
        piece = bytes(out[len(out) - offset : len(out) - offset + length])
        out += (piece * (length // len(piece) + 1))[:length]
    if len(out) != size:
        raise ValueError("not a Snappy stream")
    return bytes(out)
