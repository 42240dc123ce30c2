"""The fields of protobuf messages, as a library that was compiled with them has them.

Such a library holds the descriptor of every .proto file that it was compiled from, a FileDescriptorProto
(https://github.com/protocolbuffers/protobuf/blob/main/src/google/protobuf/descriptor.proto), in a separate section.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stagec.core.data import elf, wire

SECTION = "protodesc_cold"
"""Name of the section."""

_FILE_NAME = re.compile(rb"[\w./-]+\.proto")
_NAME, _PACKAGE, _MESSAGES = 1, 2, 4  # of FileDescriptorProto
_MOST = 14  # its largest field
_MESSAGE_NAME, _FIELDS, _NESTED = 1, 2, 3  # of DescriptorProto
_FIELD_NAME, _NUMBER, _TYPE_NAME = 1, 3, 6  # of FieldDescriptorProto


@dataclass(frozen=True)
class Field:
    """A field of a message: its number, and the full name of the message or enum that it holds; "" for a scalar."""

    number: int
    type_name: str


Messages = Mapping[str, Mapping[str, Field]]
"""Full name of a message -> name of a field -> field."""


def read(file: elf.File) -> Messages:
    """Return the messages that the library was compiled with; empty when it has no descriptors."""
    return {name: fields for descriptor in _files(file.section(SECTION)) for name, fields in _messages(descriptor)}


def _files(section: bytes) -> Iterator[bytes]:
    """Yield the descriptors: they lie one after another, each begins with its name, and none says how long it is."""
    at = 0
    while at < len(section):
        try:
            end = _end(section, at)
        except ValueError:
            end = at
        if end > at:
            yield section[at:end]
        at = max(end, at + 1)


def _end(section: bytes, start: int) -> int:
    """Return the end of the descriptor that starts there; `start` if there is none."""
    end = start
    while end < len(section):
        tag, at = wire.read_varint(section, end)
        field, wire_type = tag >> 3, tag & 7
        # A second name begins the next descriptor. Other bytes are padding of the linker.
        if not _NAME <= field <= _MOST or wire_type not in (0, 2) or (field == _NAME) != (end == start):
            break
        size, at = wire.read_varint(section, at)
        if field == _NAME and not _FILE_NAME.fullmatch(section[at : at + size]):
            break
        end = at + (size if wire_type == 2 else 0)
    return end


def _messages(descriptor: bytes) -> Iterator[tuple[str, Mapping[str, Field]]]:
    package = ""
    for record in wire.records(descriptor):
        if record.field == _PACKAGE:
            package = record.payload.decode()
        elif record.field == _MESSAGES:
            yield from _message(record.payload, package)


def _message(descriptor: bytes, name: str) -> Iterator[tuple[str, Mapping[str, Field]]]:
    fields: dict[str, Field] = {}
    for record in wire.records(descriptor):
        if record.field == _MESSAGE_NAME:
            name = f"{name}.{record.payload.decode()}"
        elif record.field == _FIELDS:
            parts = {part.field: part.payload for part in wire.records(record.payload)}
            number, _ = wire.read_varint(parts[_NUMBER], 0)
            fields[parts[_FIELD_NAME].decode()] = Field(number, parts.get(_TYPE_NAME, b"").decode().lstrip("."))
        elif record.field == _NESTED:
            yield from _message(record.payload, name)
    yield name, fields
