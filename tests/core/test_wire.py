"""The protobuf wire format, checked against messages written out by hand."""

import pytest
from hypothesis import given, strategies as st

from stagec.core.data import wire

# field 1 varint 150; field 2 "testing"; field 3 fixed32; field 4 fixed64 (the first two from protobuf's own guide)
MESSAGE = b"\x08\x96\x01" + b"\x12\x07testing" + b"\x1d\1\2\3\4" + b"\x21\1\2\3\4\5\6\7\x08"


def test_records_split_and_join() -> None:
    records = list(wire.records(MESSAGE))
    assert [(r.field, r.wire_type, r.payload) for r in records] == [
        (1, 0, b"\x96\x01"),
        (2, 2, b"testing"),
        (3, 5, b"\1\2\3\4"),
        (4, 1, b"\1\2\3\4\5\6\7\x08"),
    ]
    assert b"".join(r.encode() for r in records) == MESSAGE


@given(st.integers(0, 2**63 - 1))
def test_varints(value: int) -> None:
    assert wire.read_varint(wire.write_varint(value), 0) == (value, len(wire.write_varint(value)))


def test_sorting_moves_only_the_fields_named() -> None:
    def text(field: int, value: bytes) -> bytes:
        return wire.Record(field, 2, value).encode()

    message = text(7, b"b") + text(1, b"z") + text(8, b"y") + text(7, b"a") + text(8, b"x") + text(1, b"a")
    expected = text(7, b"a") + text(1, b"z") + text(8, b"x") + text(7, b"b") + text(8, b"y") + text(1, b"a")
    assert wire.sort_repeated(message, frozenset({7, 8})) == expected


def test_a_payload_that_changes_has_its_own_length() -> None:
    message = b"\x12\x02hi\x08\x01"
    edited = b"\x12\xc8\x01" + b"hi" * 100 + b"\x08\x01"
    assert wire.edit(message, (2,), lambda text: text * 100) == edited
    outer = wire.Record(5, 2, message).encode() + b"\x08\x01"
    assert wire.edit(outer, (5, 2), lambda text: text * 100) == wire.Record(5, 2, edited).encode() + b"\x08\x01"
    assert wire.edit(outer, (), lambda text: text * 2) == outer * 2


def test_records_at_a_path_are_left_out() -> None:
    number, text = wire.Record(1, 0, b"\x05").encode(), wire.Record(2, 2, b"a").encode()
    assert wire.without(number + text + number, (1,)) == text
    assert wire.without(number + text, (3,)) == number + text
    outer = wire.Record(5, 2, number + text).encode() + number
    assert wire.without(outer, (5, 1)) == wire.Record(5, 2, text).encode() + number
    assert wire.without(outer, (5,)) == number


def test_payloads_at_a_path() -> None:
    inner = wire.Record(2, 2, b"a").encode() + wire.Record(3, 2, b"b").encode() + wire.Record(2, 2, b"c").encode()
    message = wire.Record(5, 2, inner).encode() + wire.Record(2, 2, b"d").encode() + wire.Record(5, 2, b"").encode()
    assert list(wire.find(message, (5, 2))) == [b"a", b"c"]
    assert list(wire.find(message, (2,))) == [b"d"]
    assert list(wire.find(message, (9, 2))) == []


@pytest.mark.parametrize("message", [b"\x12\x09short", b"\x0b", b"\x08", b"\x1d\1", b"\x08" + b"\xff" * 11])
def test_damaged_messages(message: bytes) -> None:
    with pytest.raises(ValueError, match=r"truncated|wire type"):
        list(wire.records(message))
