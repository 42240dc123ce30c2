"""The container of a bundle: its encoding, and everything that is not it.

Modules: `bundle/members.py`, `core/data/reading.py`.
"""

import hashlib
import io
import json
import os
import re
import shutil
import struct
import subprocess
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagec.bundle import archive, members
from stagec.bundle.archive import INDEX, Archive, encode_index
from stagec.bundle.members import Stored, encode, members_table
from stagec.core.messages.refusal import LoadError

DATA = {"a.xla": b"x" * 5000, "b.json": b"{}", "folder/c": b""}


def anything(found: Any) -> None:
    """A check of the index for archives that are not bundles."""


def packed(members: dict[str, bytes], **more: Any) -> bytes:
    index = {"format": archive.FORMAT, **more, "members": members_table(members)}
    return encode({"index.json": encode_index(index), **dict(sorted(members.items()))})


def refusal(data: bytes) -> tuple[str, str]:
    with pytest.raises(LoadError) as caught:
        Archive("x", data, anything).check_all()
    return caught.value.code, str(caught.value).removeprefix("x: ").removeprefix("not a bundle: ")


def test_members_are_page_aligned_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "x.aot"
    path.write_bytes(packed(DATA))
    found = Archive(path, check=anything)
    found.check_all()
    assert {name: found[name] for name in DATA} == DATA
    assert {name: bytes(found.map(name)) for name in DATA} == DATA
    with zipfile.ZipFile(path) as zipped, path.open("rb") as file:
        for entry in zipped.infolist():
            file.seek(entry.header_offset)
            name, extra = struct.unpack("<26xHH", file.read(30))
            assert (entry.header_offset + 30 + name + extra) % archive.PAGE == 0


@pytest.mark.skipif(not shutil.which("unzip"), reason="unzip is not installed")
def test_unzip_reads_it(zoo: Path) -> None:
    done = subprocess.run(["unzip", "-t", zoo], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "No errors detected" in done.stdout
    index = subprocess.run(["unzip", "-p", zoo, "index.json"], capture_output=True).stdout
    assert json.loads(index)["name"] == "zoo"


def test_python_reads_it(zoo: Path) -> None:
    with zipfile.ZipFile(zoo) as zipped:
        assert zipped.testzip() is None
        assert zipped.namelist()[0] == "index.json"
        assert {entry.date_time for entry in zipped.infolist()} == {(1980, 1, 1, 0, 0, 0)}


@pytest.mark.parametrize("name", ["", "/a", "../a", "a/../b", "a//b", "a/", ".a", "-a", "a b", "é", "a\\b", "a" * 256])
def test_names_that_no_member_has(name: str) -> None:
    with pytest.raises(ValueError, match="is not a name for a member"):
        encode({name: b""})


@pytest.mark.parametrize("names", [("init", "init/a"), ("a/b/c", "a+", "a", "a.b"), ("index.json/x",)])
def test_a_name_of_a_file_and_of_a_folder(names: tuple[str, ...]) -> None:
    """Both cannot be written: a bundle that verifies can be extracted."""
    with pytest.raises(ValueError, match="is a member, and the folder of"):
        packed(dict.fromkeys(names, b""))
    # What another program wrote.
    data = packed({name.replace("/", "_"): name.encode() for name in names})
    for name in names:
        data = data.replace(name.replace("/", "_").encode(), name.encode())
    code, text = refusal(data)
    assert (code, "is a member, and the folder of" in text) == ("not-a-bundle", True)


def test_limits_of_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(encode(DATA))
    monkeypatch.setattr(archive, "LARGEST_FILE", size - 1)
    with pytest.raises(ValueError, match=f"the members take more than the {size - 1:,} bytes of one bundle"):
        encode(DATA)
    monkeypatch.setattr(members, "MOST_MEMBERS", 2)
    with pytest.raises(ValueError, match="3 members are over the limit of 2"):
        encode(DATA)


def test_more_than_4_gib(tmp_path: Path) -> None:
    # As `encode` writes it, without the time that takes: the members' zeros are holes of the file.
    sizes = {"a": 2**32 - 1, "b": 1, "c": 2**32, "d": 0}
    digest = hashlib.sha256().hexdigest()
    listed = {name: {"sha256": digest[:-1] + name, "bytes": size} for name, size in sizes.items()}
    index = encode_index({"format": archive.FORMAT, "members": listed})
    entries = [("index.json", zlib.crc32(index), len(index))]
    placed, directory = archive.layout(entries + [(name, 0, size) for name, size in sizes.items()])
    path = tmp_path / "x.aot"

    def write(directory: bytes) -> None:
        with path.open("wb") as file:
            for entry in placed:
                file.seek(entry.at)
                file.write(archive.local_header(entry) + (index if entry.name == "index.json" else b""))
            file.seek(entry.start)
            file.write(directory)

    def headers(path: Path) -> None:
        found = Archive(path, check=anything)
        for name in sizes:
            Stored(found, name)  # looks at what is before the member

    write(directory)
    found = Archive(path, check=anything)
    assert {name: entry.size for name, entry in found._entries.items() if name in sizes} == sizes
    assert all(entry.start % archive.PAGE == 0 for entry in found._entries.values())
    with zipfile.ZipFile(path) as zipped:
        assert {entry.filename: entry.file_size for entry in zipped.infolist()} == {"index.json": len(index), **sizes}
        assert zipped.read("index.json") == index
        assert zipped.read("d") == b""
    for at in range(len(directory)):
        write(directory[:at] + bytes([directory[at] ^ 1]) + directory[at + 1 :])
        with pytest.raises(LoadError) as refusal:
            headers(path)
        assert refusal.value.code in ("not-a-bundle", "digest")


NOT_OURS = "the file is not as this version of stagec writes it"


def edited(at: int, new: bytes, data: bytes | None = None) -> bytes:
    data = packed(DATA) if data is None else data
    at = at if at >= 0 else len(data) + at
    return data[:at] + new + data[at + len(new) :]


def central(name: str, offset: int, new: bytes) -> bytes:
    """An archive whose central directory has other bytes at `offset` of the record of `name`."""
    data = packed(DATA)
    return edited(data.rindex(name.encode()) - 46 + offset, new)


def local(name: str, offset: int, new: bytes) -> bytes:
    data = packed(DATA)
    at = next(i for i in range(len(data)) if data[i : i + 4] == b"PK\3\4" and data[i + 30 :].startswith(name.encode()))
    return edited(at + offset, new)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "it does not end as a zip file does"),
        (packed(DATA)[:-1], "it does not end as a zip file does"),
        (packed(DATA) + b"\0", "it does not end as a zip file does"),
        (packed(DATA)[:-22], "it does not end as a zip file does"),
        (packed(DATA)[-22:], "the zip's directory is not where its end says"),
        (b"\0" + packed(DATA), "the zip's directory is not where its end says"),
        (edited(-22 + 10, b"\xff\xff"), "the zip's directory is not where its end says"),
        (edited(-22 + 10, b"\3\0"), NOT_OURS),
        (edited(-22 + 10, b"\5\0"), "the zip's directory is damaged"),
        (edited(-22 + 16, b"\0\0\0\0"), "the zip's directory is not where its end says"),
        (edited(-22 + 20, b"\1\0"), NOT_OURS),  # a comment
        (edited(-22 + 4, b"\1\0"), NOT_OURS),  # another disk
        (edited(0, b"PK\5\6"), NOT_OURS),
        (edited(4000, b"x"), NOT_OURS),  # the padding of the first header
        (edited(packed(DATA).index(b"x" * 5000) + 5000, b"x"), NOT_OURS),
        (central("a.xla", 8, b"\1\0"), "a.xla is encrypted"),
        (central("a.xla", 8, b"\0\x08"), NOT_OURS),  # a name in UTF-8, though it is ASCII
        (central("a.xla", 10, b"\x08\0"), "a.xla is compressed"),
        (central("a.xla", 12, b"\1\0"), NOT_OURS),  # time
        (central("a.xla", 16, b"\0\0\0\0"), NOT_OURS),  # CRC
        (central("a.xla", 20, b"\0\0\0\0"), NOT_OURS),  # compressed size
        (central("a.xla", 24, b"\xff\xff\xff\xff"), NOT_OURS),  # zip64 without its field
        (central("a.xla", 28, b"\4\0"), "the zip's directory is damaged"),
        (central("a.xla", 30, b"\4\0"), "the zip's directory is damaged"),  # an extra field
        (central("a.xla", 32, b"\4\0"), NOT_OURS),  # a comment
        (central("a.xla", 38, b"\0\0\xff\xa1"), NOT_OURS),  # a link
        (central("a.xla", 42, b"\0\0\0\0"), NOT_OURS),  # overlapping another
        (central("a.xla", 46, b"../xx"), "'../xx' is not a name for a member"),
        (local("a.xla", 6, b"\1\0"), NOT_OURS),
        (local("a.xla", 14, b"\0\0\0\0"), NOT_OURS),
        (local("a.xla", 30, b"A"), NOT_OURS),
    ],
)
def test_what_is_not_the_encoding(data: bytes, what: str) -> None:
    code, text = refusal(data)
    assert code == "not-a-bundle"
    assert text == what


def test_a_member_of_another_name() -> None:
    assert refusal(central("a.xla", 46, b"b.jso")) == (
        "digest",
        "the index does not list the members that the file has",
    )


def test_a_member_twice() -> None:
    assert refusal(edited(-23, b"a", packed({"a": b"1", "b": b"2"}))) == ("not-a-bundle", "a appears twice")


def test_a_member_that_changed_with_its_checksum() -> None:
    """The zip is whole, and the index is of another content."""
    members = {**DATA, "b.json": b"[]"}
    index = encode_index({"format": archive.FORMAT, "members": members_table(DATA)})
    code, text = refusal(encode({"index.json": index, **members}))
    assert (code, text.partition(":")[0]) == ("digest", "b.json is not what the index says")


def test_a_checksum_that_changed_alone() -> None:
    data, crc = packed(DATA), struct.pack("<I", zlib.crc32(b"{}"))
    assert data.count(crc) == 2
    assert refusal(data.replace(crc, b"1234")) == ("digest", "b.json does not have the CRC-32 that the zip lists")


@pytest.mark.parametrize(
    ("index", "code", "what"),
    [
        (b"\xff", "format", "index.json: 'utf-8' codec can't decode byte 0xff"),
        (b'{"format":1,"format":1}', "format", "index.json: the key 'format' appears twice"),
        (b'{"format":NaN}', "format", "index.json: the number NaN is not finite"),
        (b'{"format":1e999}', "format", "index.json: the number 1e999 is not finite"),
        (b'{"format":9223372036854775808}', "format", "index.json: the number 9223372036854775808... has more than 64"),
        (b"[" * 100_000, "format", "index.json: nested deeper than 200 levels"),
        (b"[" * 300 + b"]" * 300, "format", "index.json: nested deeper than 200 levels"),
        (b"[" * 202 + b"]" * 202, "format", "index.json: nested deeper than 200 levels"),
        (b'{"format":"\\ud800"}', "format", "index.json: 'utf-8' codec can't encode character"),
        (b"[]", "format", "index.json: expected an object"),
        (b'{"format":3}', "format", "index.json: its format is 3, and this stagec reads 1: build it again with stagec"),
        (b'{"format":true}', "format", "index.json: its format is true, and this stagec reads 1: build it again"),
        (b'{"members":{}}', "format", "index.json: its format is null, and this stagec reads 1: build it again"),
        (b'{"format":1}', "format", "index.json: expected an object, not null"),
        (b'{"format": 1,"members":{}}\n', "format", "index.json: it is not spelled as stagec writes it"),
        (b'{"format":1,"members":{"a":""}}\n', "format", "index.json: a: expected a SHA-256 in lower-case hex"),
        (b'{"format":1,"members":{"a":"%s"}}\n' % (b"0" * 64), "digest", "the index does not list the members"),
    ],
)
def test_an_index_that_is_refused(index: bytes, code: str, what: str) -> None:
    found = refusal(encode({"index.json": index}))
    assert found[0] == code
    assert found[1].startswith(what)


def of_a_member(text: str, change: Callable[[str], str]) -> str:
    """Return an index with another entry of its last member."""
    start = text.rindex(",") + 1
    return text[:start] + change(text[start:-3]) + text[-3:]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: of_a_member(text, str.upper),
        lambda text: of_a_member(text, lambda entry: re.sub('"[0-9a-f]{64}"', lambda found: found[0].upper(), entry)),
        lambda text: of_a_member(text, lambda entry: re.sub('[0-9a-f]"', '"', entry)),
        lambda text: of_a_member(text, lambda entry: re.sub('[0-9a-f]{2}"', '  "', entry)),
        lambda text: of_a_member(text, lambda entry: entry.replace('":', '": ')),
        lambda text: of_a_member(text, lambda entry: re.sub(':"', ':"0', entry)),
        lambda text: of_a_member(text, lambda entry: re.sub(':".*"', ":1", entry)),
        lambda text: of_a_member(text, lambda entry: f"{entry},{entry}"),
        lambda text: of_a_member(text, lambda entry: ""),
        lambda text: text.replace('"members":{', '"members":{},"members":{'),
        lambda text: text.replace('"members":{', '"members":{},"base":{"members":{').replace("\n", "}\n"),
        lambda text: text.replace('"members":{', '"members" :{'),
        lambda text: text.removesuffix("\n"),
        lambda text: f"{text}\n",
    ],
)
def test_a_table_of_members_is_refused(zoo: Path, change: Callable[[str], str]) -> None:
    archive = Archive(zoo)
    members = {name: archive[name] for name in archive.index["members"]}
    text = archive[INDEX].decode()
    assert change(text) != text
    with pytest.raises(LoadError) as refused:
        Archive("x", encode({INDEX: change(text).encode(), **members}))
    assert refused.value.code in ("format", "digest")


def test_an_index_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "LARGEST", 10)
    assert refusal(packed(DATA))[1].endswith(" bytes, over the limit of 10")


def test_the_order_of_members() -> None:
    index = encode_index({"format": archive.FORMAT, "members": members_table(DATA)})
    assert refusal(encode({"index.json": index, **dict(sorted(DATA.items(), reverse=True))}))[0] == "digest"
    assert refusal(encode({**DATA, "index.json": index})) == ("not-a-bundle", "its first member is not index.json")


def test_the_same_content_twice() -> None:
    code, text = refusal(packed({"a": b"same", "b": b"same"}))
    assert (code, text) == ("format", "index.json: a and b are the same, and stored twice")


def test_a_member_that_is_not_there() -> None:
    with pytest.raises(LoadError, match=r"x: there is no member 'c\.xla'"):
        Archive("x", packed(DATA), anything)["c.xla"]


def test_the_index_is_handed_out_as_it_is_in_the_file() -> None:
    data = packed(DATA)
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        assert Archive("x", data, anything)["index.json"] == file.read("index.json")


def test_a_file_that_is_cut_off_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "x.aot"
    path.write_bytes(packed(DATA))
    found = Archive(path, check=anything)
    os.truncate(path, 5000)
    for read in (found.__getitem__, found.map):
        with pytest.raises(LoadError, match="it was cut off while it was open") as caught:
            read("a.xla")
        assert caught.value.code == "digest"


def test_a_file_that_is_written_into_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "x.aot"
    path.write_bytes(packed(DATA))
    found = Archive(path, check=anything)
    with path.open("r+b") as file:
        file.seek(packed(DATA).index(b"x" * 5000))
        file.write(b"y")
    for read in (found.__getitem__, found.map):
        with pytest.raises(LoadError, match=r"a\.xla is not what the index says"):
            read("a.xla")


def test_a_member_that_is_larger_than_wanted(tmp_path: Path) -> None:
    """It is not read: the rest of it may be a hole of the file, larger than memory."""
    path = tmp_path / "x.aot"
    path.write_bytes(packed(DATA))
    found = Archive(path, check=anything)
    assert found.read("a.xla", 5000) == DATA["a.xla"]
    with pytest.raises(LoadError, match=r"a\.xla has 5,000 bytes, over the limit of 4,999") as caught:
        found.read("a.xla", 4999)
    assert caught.value.code == "format"


def test_a_file_that_is_replaced_while_it_is_open(tmp_path: Path) -> None:
    path, other = tmp_path / "x.aot", tmp_path / "y.aot"
    path.write_bytes(packed(DATA))
    other.write_bytes(packed({"a.xla": b"other"}))
    found = Archive(path, check=anything)
    other.replace(path)
    assert found["a.xla"] == DATA["a.xla"]
    assert Archive(path, check=anything)["a.xla"] == b"other"


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path, "it is a folder"), (tmp_path / "pipe", "it is not a regular file")):
        with pytest.raises(LoadError, match=f"not a bundle: {what}"):
            Archive(path)


def test_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "x.aot"
    path.write_bytes(packed(DATA))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        Archive(path, check=anything)["a.xla"]
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1


def test_what_is_before_a_member_is_checked_when_that_is_read(zoo: Path, tmp_path: Path) -> None:
    """A process reads few members. Who checks the whole gets it checked at once."""
    data, path = bytearray(zoo.read_bytes()), tmp_path / "x.aot"
    names = [name for name in Archive(zoo).index["members"] if name.endswith(".xla")]
    data[Archive(zoo)._entries[names[0]].start - 1] ^= 1
    path.write_bytes(data)
    opened = Archive(path)
    with pytest.raises(LoadError, match=NOT_OURS):
        opened.check_all()
    assert opened[names[1]] == Archive(zoo)[names[1]]
    for read in (opened.__getitem__, opened.map, opened.copy, opened.check):
        with pytest.raises(LoadError, match=NOT_OURS):
            read(names[0])
