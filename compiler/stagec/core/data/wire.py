"""Protocol buffers on the wire, without a schema library: split a message into records and put them together again.

jaxlib carries XLA's own protobuf classes in C++ and offers none in Python; a second set would clash with TensorFlow's
(jaxlib/xla_client.py says so). Sorting and editing records needs the encoding alone
(https://protobuf.dev/programming-guides/encoding/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple


class Record(NamedTuple):  # a request of Bazel's has a thousand
    """One field of a message: its number, its wire type (2 is length-delimited), and its payload as stored."""

    field: int
    wire_type: int
    payload: bytes

    def encode(self) -> bytes:
        """Return the record as it stands in a message."""
        tag = write_varint(self.field << 3 | self.wire_type)
        return tag + (write_varint(len(self.payload)) if self.wire_type == 2 else b"") + self.payload


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that starts at byte `at`, and the position after it. Raises ValueError past the end."""
    value = shift = 0
    while True:
        # 64 bits take ten bytes at most; without the limit, a file of 0x80 would be one number.
        if at >= len(data) or shift > 63:
            raise ValueError("truncated or overlong varint")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if byte < 0x80:
            return value, at


def write_varint(value: int) -> bytes:
    """Return `value` (not negative) as a varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def records(message: bytes) -> Iterator[Record]:
    """Yield the records of a message in the order in which they are stored. Raises ValueError when it is not one."""
    at = 0
    while at < len(message):
        tag, at = read_varint(message, at)
        wire_type = tag & 7
        match wire_type:
            case 0:
                end = read_varint(message, at)[1]
            case 1:
                end = at + 8
            case 5:
                end = at + 4
            case 2:
                size, at = read_varint(message, at)
                end = at + size
            case _:
                raise ValueError(f"wire type {wire_type}")
        if end > len(message):
            raise ValueError("truncated message")
        yield Record(tag >> 3, wire_type, message[at:end])
        at = end


def delimited(data: bytes) -> tuple[bytes, bytes]:
    """Return a message with its length before it, and what follows. Raises ValueError if it has no length."""
    size, at = read_varint(data, 0)
    return data[: at + size], data[at + size :]


def find(message: bytes, path: Sequence[int]) -> Iterator[bytes]:
    """Yield the payloads at a path of fields, from message to message; the message itself for an empty one."""
    if not path:
        yield message
        return
    for record in records(message):
        if record.field == path[0]:
            yield from find(record.payload, path[1:])


def edit(message: bytes, path: Sequence[int], change: Callable[[bytes], bytes]) -> bytes:
    """Return the message with `change` applied to each length-delimited payload at a path of fields, as for `find`."""
    if not path:
        return change(message)
    field, rest = path[0], path[1:]
    return b"".join(
        (Record(field, 2, edit(r.payload, rest, change)) if (r.field, r.wire_type) == (field, 2) else r).encode()
        for r in records(message)
    )


def without(message: bytes, path: Sequence[int]) -> bytes:
    """Return the message without the records at a path of fields."""
    *above, last = path
    return edit(message, above, lambda part: b"".join(r.encode() for r in records(part) if r.field != last))


def sort_repeated(message: bytes, fields: frozenset[int]) -> bytes:
    """Return the message with the records of each of `fields` sorted by their bytes; all others keep their place."""
    rows = [(r.field, r.encode()) for r in records(message)]
    queues = {field: iter(sorted(row for f, row in rows if f == field)) for field in fields}
    return b"".join(next(queues[field]) if field in queues else row for field, row in rows)
