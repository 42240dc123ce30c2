"""Riegeli files: what Google's implementation wrote is read, and what is written has its bytes.

Modules: `core/data/highwayhash.py`, `core/data/riegeli.py`.
"""

import pytest

from stagec.core.data import riegeli, wire

RECORDS = [b"one", b"", b"three " * 20, b"four"]

# The signature, and a chunk with RECORDS, plain and compressed, as Google's array_record package writes them.
SIGNATURE = bytes.fromhex(
    "83af70d10d884a3f0000000000000000400000000000000091bac23c9287e1a90000000000000000e19f13c0e9b1c373"
    "73000000000000000000000000000000"
)[24:]
PLAIN = (
    bytes.fromhex("8e8306112ba4367e8500000000000000f66ca1384ba2625372040000000000007f00000000000000")
    + bytes.fromhex("00040300 7804".replace(" ", ""))
    + b"".join(RECORDS)
)
COMPRESSED = bytes.fromhex(
    "a499f6df0a15a74720000000000000002c477a8a9387c91972040000000000007f00000000000000"
    "730704040c030078047f7f206f6e65746872656520fe0600c606000c666f7572"
)


def test_plain_and_compressed_chunks_are_read() -> None:
    file = riegeli._assemble([SIGNATURE, PLAIN, COMPRESSED])
    assert file.startswith(riegeli.SIGNATURE)
    assert list(riegeli.records(file)) == RECORDS * 2


def test_a_chunk_is_written_as_by_google() -> None:
    assert riegeli._plain(RECORDS) == PLAIN


def test_a_file_without_changes_keeps_its_bytes() -> None:
    file = riegeli._assemble([SIGNATURE, COMPRESSED, riegeli._plain([bytes(200_000)]), COMPRESSED])
    assert riegeli.edit(file, lambda _number, _record: None) == file


def test_only_the_chunk_of_a_changed_record_is_written_anew() -> None:
    file = riegeli._assemble([SIGNATURE, COMPRESSED, COMPRESSED])
    edited = riegeli.edit(file, lambda number, _record: b"new" if number == 5 else None)
    assert list(riegeli.records(edited)) == [*RECORDS, b"one", b"new", *RECORDS[2:]]
    assert COMPRESSED in edited
    assert edited.count(COMPRESSED) == 1


@pytest.mark.parametrize("size", [0, 1, 65_000, 65_512 - 40, 65_512, 65_536, 131_072, 400_000])
def test_records_of_every_size_come_back(size: int) -> None:
    contents = [b"before", bytes(i & 0xFF for i in range(size)), b"after"]
    file = riegeli._assemble([SIGNATURE, riegeli._plain(contents), COMPRESSED])
    assert list(riegeli.records(file)) == [*contents, *RECORDS]


@pytest.mark.parametrize(
    ("file", "what"),
    [
        (b"", "not a Riegeli file"),
        (b"\x7fELF" + bytes(100), "not a Riegeli file"),
        (riegeli._assemble([SIGNATURE, PLAIN])[:90], "truncated chunk"),
        (riegeli._assemble([SIGNATURE, PLAIN[:24] + b"t" + PLAIN[25:]]), "chunk of type 't'"),
        (riegeli._assemble([SIGNATURE, PLAIN[:40] + b"b" + PLAIN[41:]]), "compression b'b'"),
    ],
)
def test_what_is_refused(file: bytes, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        list(riegeli.records(file))


def test_a_copy_that_reaches_before_the_start_is_refused() -> None:
    stream = wire.write_varint(4) + bytes((0x01, 0x09))
    with pytest.raises(ValueError, match="not a Snappy stream"):
        riegeli._unsnappy(stream)
