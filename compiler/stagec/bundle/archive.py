"""The container of a bundle: a stored zip of page-aligned members, whose `index.json` has the digest of every other.

docs/bundle-format.md describes it. A bundle has one encoding (`encode`): besides names, sizes, checksums and data, a
zip here stores only constants. So a reader writes it again and compares. Standard library only.

`pread` reads a member when a caller asks for it. The caller gets exactly the bytes that were checked, whatever happens
to the file. A truncated file causes a refusal and not a SIGBUS.
"""

from __future__ import annotations

import hashlib
import itertools
import stat
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from stagec.bundle import index
from stagec.bundle.functions import Functions
from stagec.bundle.index import FUNCTIONS, LARGEST
from stagec.bundle.sources import File, Memory, Source, in_pieces, sha256_of
from stagec.core.builds.version import VERSION
from stagec.core.data import strict_json
from stagec.core.messages.refusal import LoadError
from stagec.core.trees import json_shapes

FORMAT = 1
"""Version of the format of archives: of bundles, and of the other kinds."""

INDEX = "index.json"
_Bytes = TypeVar("_Bytes", bytes, memoryview)
PAGE = 4096
"""The data of every member starts at a multiple of it, so that it can be mapped: the page of x86-64."""
LARGEST_FILE = 2**48
"""Bytes of a bundle (256 TiB): more than any file system holds, and far from the end of 64 bits."""
MOST_MEMBERS = 2**16 - 2
"""The number of a zip's members has 16 bits, and the last value means zip64."""
LONGEST_NAME = 255
"""Characters of a name: the limit of file systems, so that every member can become a file of its name."""
_FIRST = {*"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_"}
_LATER = {*_FIRST, *".+-"}
"""Characters of the parts of a name: the first of each, and those after it.

A name is a relative path whose parts do not start with a dot or a dash: never outside the folder it is put in."""

# The records of a zip (APPNOTE.TXT of PKWARE, 4.3.7, 4.3.12, 4.3.16), with the constants that ours have.
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_MEMBER = struct.Struct("<4s4xHH4xI4xIHH14x")
"""Fields of a record of the directory: signature, flags, method, CRC-32, size, lengths of name and extra field."""
_END = struct.Struct("<4sHHHHIIH")
_VERSION, _VERSION_ZIP64, _UNIX = 20, 45, 3 << 8
_MIDNIGHT, _NEW_YEAR_1980 = 0, 1 << 5 | 1
_REGULAR_FILE = (stat.S_IFREG | 0o644) << 16
# The extra field with which Android's tools align what is mapped: ALIGNMENT_ZIP_EXTRA_DATA_FIELD_HEADER_ID of apksig.
_ALIGNMENT = struct.Struct("<HHH")
_ALIGNMENT_ID = 0xD935
# Zip64 (4.5.3, 4.3.14, 4.3.15): where a size or an offset is too large for its field, that holds _ELSEWHERE.
_ELSEWHERE = 2**32 - 1
_ZIP64_ID = 1
_ZIP64_END = struct.Struct("<4sQHHIIQQQQ")
_ZIP64_LOCATOR = struct.Struct("<4sIQI")
_ANOTHER_FILE = "the file is not as this version of stagec writes it"
_LARGEST_RECORD = _CENTRAL.size + LONGEST_NAME + 4 + 3 * 8


class Entry(NamedTuple):
    """A member: its name, CRC-32 and size, where its local header is, and where its data starts."""

    name: str
    crc: int
    size: int
    at: int = 0
    start: int = 0


def layout(members: Iterable[tuple[str, int, int]]) -> tuple[list[Entry], bytes]:
    """Return the members with their places, and the records after the last member's data.

    members: name, CRC-32 and size of each. Raises ValueError when the file would be larger than LARGEST_FILE.
    """
    placed: list[Entry] = []
    directory: list[bytes] = []
    offset, pack = 0, _CENTRAL.pack
    around = _LOCAL.size + _ALIGNMENT.size
    for name, crc, size in members:
        length = len(name)
        start = offset + around + length
        written, at, version, extra = size, offset, _VERSION, b""
        if size >= _ELSEWHERE or offset >= _ELSEWHERE:  # of few
            (written, _), large_sizes = _narrow(size, size)
            (at,), large_offset = _narrow(offset)
            version, extra = _VERSION_ZIP64, _zip64(large_sizes + large_offset)
            start += len(_zip64(large_sizes))
        start += -start % PAGE
        record = pack(
            b"PK\1\2", _UNIX | version, version, 0, 0, _MIDNIGHT, _NEW_YEAR_1980, crc, written, written, length,
            len(extra), 0, 0, 0, _REGULAR_FILE, at,
        )  # fmt: skip
        directory += record, name.encode("ascii"), extra
        placed.append(Entry(name, crc, size, offset, start))
        offset = start + size
    records = b"".join(directory)
    (at,), large_start = _narrow(offset)
    end = _END.pack(b"PK\5\6", 0, 0, len(placed), len(placed), len(records), at, 0)
    if large_start:
        counts = _UNIX | _VERSION_ZIP64, _VERSION_ZIP64, 0, 0, len(placed), len(placed), len(records), offset
        locator = _ZIP64_LOCATOR.pack(b"PK\6\7", 0, offset + len(records), 1)
        end = _ZIP64_END.pack(b"PK\6\6", _ZIP64_END.size - 12, *counts) + locator + end
    if offset + len(records) + len(end) > LARGEST_FILE:
        raise ValueError(f"the members take more than the {LARGEST_FILE:,} bytes of one bundle")
    return placed, records + end


def local_header(entry: Entry) -> bytes:
    """Return the bytes before the data of a placed member."""
    name = entry.name.encode("ascii")
    sizes, large_sizes = _narrow(entry.size, entry.size)
    version, extra = (_VERSION_ZIP64 if large_sizes else _VERSION), _zip64(large_sizes)
    padding = entry.start - entry.at - _LOCAL.size - len(name) - len(extra) - _ALIGNMENT.size
    extra += _ALIGNMENT.pack(_ALIGNMENT_ID, 2 + padding, PAGE) + bytes(padding)
    stamp = _MIDNIGHT, _NEW_YEAR_1980, entry.crc, *sizes, len(name)
    return _LOCAL.pack(b"PK\3\4", version, 0, 0, *stamp, len(extra)) + name + extra


def _narrow(*values: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the values of 32-bit fields, and the values that zip64 stores elsewhere: all of `values` or none."""
    large = max(values) >= _ELSEWHERE
    return ((_ELSEWHERE,) * len(values), values) if large else (values, ())


def _zip64(values: Sequence[int]) -> bytes:
    """Return the extra field with large values; nothing if there are none."""
    return struct.pack(f"<HH{len(values)}Q", _ZIP64_ID, 8 * len(values), *values) if values else b""


def encode_index(index: Mapping[str, Any]) -> bytes:
    """Return the bytes of an index in its only encoding. The sizes of members are in the directory of the file alone.

    A size follows from a digest, and reading one string for each of thousands of members takes a third of the time.
    """
    return strict_json.line({**index, "members": {name: entry["sha256"] for name, entry in index["members"].items()}})


def read_index(data: bytes, check: Callable[[Any], None], path: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Read an index. check: raises ValueError for one of another kind. path: of its file, for messages.

    sizes: of the members of the file. Raises LoadError ("format", "digest").
    """
    try:
        index = strict_json.parse(data, LARGEST)
        if not isinstance(index, dict):
            raise ValueError("expected an object")
        strict_json.check_format(index, FORMAT, _build_again(index))
        _MEMBERS(index.get("members"))
        # The sizes come from the directory of the file, so each member must be there before they are put in.
        if not index["members"].keys() <= sizes.keys():
            raise LoadError("digest", f"{path}: the index does not list the members that the file has")
        index["members"] = {name: {"sha256": sha, "bytes": sizes[name]} for name, sha in index["members"].items()}
        check(index)
        # One spelling: else two files with one meaning would have two digests, and readers that take the first or the
        # last of two equal keys would disagree.
        if encode_index(index) != data:
            raise ValueError("it is not spelled as stagec writes it")
    except ValueError as error:
        raise LoadError("format", f"{path}: {INDEX}: {error}") from error
    return index


_MEMBERS = json_shapes.shape({...: json_shapes.sha256})
"""Shape of the key "members" of the index of every kind of archive."""


class Archive:
    """A bundle file whose structure and index were checked; a member is checked whenever it is read.

    path: of its file. index: the content of `index.json`; encoded_index: its bytes.

    The file stays open as long as this object is there. Threads may read members at the same time.
    """

    def __init__(
        self,
        path: str | Path,
        data: bytes | None = None,
        check: Callable[[Any], None] = index.check,
        vouch: Callable[[bytes, Callable[[], str]], None] | None = None,
    ) -> None:
        """Read and check the file at `path`, without the data of members.

        data: the bytes, if they are known already; messages then call them `path`.
        check: raises ValueError for an index of another kind; by default, for an index that is not a bundle's. vouch:
        gets the index before anything parses it, and a function that returns the SHA-256 (hex) of the file with
            it. It raises LoadError if nobody vouches for the index. None: nobody is asked.
        Raises LoadError, naming the file and the fault: "not-found", "not-a-bundle", "format", "digest", and the errors
        of `vouch`.
        """
        self.path = str(path)
        self._source: Source = File(self.path) if data is None else Memory(data)
        self._entries = {entry.name: entry for entry in self._decode()}
        self.encoded_index = self._read_index(vouch)
        sizes = {name: entry.size for name, entry in self._entries.items() if name != INDEX}
        self.index = read_index(self.encoded_index, check, self.path, sizes)
        self._check_members([*sizes])
        if "functions" in self.index:
            self.index = {**self.index, "functions": self.functions(self.index, FUNCTIONS)}

    def __getitem__(self, name: str) -> bytes:
        """Return the bytes of the member `name`, after comparing them with size and digest in the index.

        The index itself was checked when the file was opened, and has one encoding.
        Raises LoadError when the bundle has no such member, or its bytes differ.
        """
        if name == INDEX:
            return self.encoded_index
        return self._checked(name, self._source.read)

    def functions(self, index: Mapping[str, Any], member: str) -> Functions:
        """Return the functions that `index` lists, whose lines `member` has. Raises LoadError."""
        entry, _ = self._entry(member)
        # Not by way of this object, which has them: a circle and its open file stay until Python looks for garbage.
        read, first = self._source.read, entry.start
        return Functions(index, lambda start, size: read(first + start, size), self.path)

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a member like `[name]`, but check first that it has at most `most` bytes.

        Raises LoadError ("format") for more.
        """
        size = self._entry(name)[0].size
        if size > most:
            raise LoadError("format", f"{self.path}: {name} has {size:,} bytes, over the limit of {most:,}")
        return self[name]

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of the member `name` piece by piece: it may be larger than memory.

        The check follows the last piece: if it raises LoadError, the caller must discard everything made of the pieces.
        """
        entry, listed = self._entry(name)
        state, crc = hashlib.sha256(), 0
        for piece in in_pieces(self._source, entry.start, entry.size):
            state.update(piece)
            crc = zlib.crc32(piece, crc)
            yield piece
        self._compare(entry, listed, state.hexdigest(), crc)

    def sha256(self) -> str:
        """Return the SHA-256 (hex) of the whole file."""
        return sha256_of(self._source)

    def copy(self, name: str) -> memoryview:
        """Return the bytes of the member `name`, checked like those of `[name]`, at a page of memory: for weights."""
        return self._checked(name, self._source.copy)

    def map(self, name: str) -> memoryview:
        """Return the bytes of the member `name`, checked like those of `[name]`, but mapped and not copied.

        For weights. When memory is short, the kernel reads the pages from the file again: nobody may write into the
        file while it is mapped (replacing it by renaming is fine, and what stagec itself does).
        """
        return self._checked(name, self._source.map)

    def check(self, name: str) -> None:
        """Check the member `name`, however large it is. Raises LoadError when it is not what the index says."""
        for _ in self.pieces(name):
            pass

    def check_all(self) -> None:
        """Check every member and every function. Raises LoadError, naming the first that is not what the index says."""
        for name in self.index["members"]:
            self.check(name)
        for _ in self.index.get("functions", {}).values():
            pass

    def _entry(self, name: str) -> tuple[Entry, Mapping[str, Any]]:
        listed = self.index["members"].get(name)
        if listed is None:
            raise LoadError("format", f"{self.path}: there is no member {name!r}")
        entry = self._entries[name]
        self._check_header(entry)
        return entry, listed

    def _checked(self, name: str, read: Callable[[int, int], _Bytes]) -> _Bytes:
        """Read a member in one of the ways of the source, and compare it."""
        entry, listed = self._entry(name)
        data = read(entry.start, entry.size)
        self._compare(entry, listed, hashlib.sha256(data).hexdigest(), zlib.crc32(data))
        return data

    def _compare(self, entry: Entry, listed: Mapping[str, Any], sha256: str, crc: int) -> None:
        if sha256 != listed["sha256"]:
            what = f"{entry.name} is not what the index says: its sha256 is {sha256}"
            raise LoadError("digest", f"{self.path}: {what}")
        if crc != entry.crc:
            raise LoadError("digest", f"{self.path}: {entry.name} does not have the CRC-32 that the zip lists")

    def _decode(self) -> list[Entry]:
        """Return the members in their order, after comparing everything between their data with `encode`'s."""
        read, size = self._source.read, self._source.size
        if size > LARGEST_FILE:
            raise self._not_a_bundle(f"its {size:,} bytes are over the limit of {LARGEST_FILE:,}")
        end = read(max(0, size - _END.size), min(size, _END.size)).ljust(_END.size, b"\0")
        signature, _, _, _, count, length, start, _ = _END.unpack(end)
        if signature != b"PK\5\6":
            raise self._not_a_bundle("it does not end as a zip file does")
        after = _END.size
        if start == _ELSEWHERE:
            after += _ZIP64_END.size + _ZIP64_LOCATOR.size
            start = size - after - length  # compared with what the records say, below
        if count > MOST_MEMBERS or length > count * _LARGEST_RECORD or start < 0 or start + length + after != size:
            raise self._not_a_bundle("the zip's directory is not where its end says")
        directory = read(start, size - start)
        members = self._read_directory(directory, count)
        try:
            placed, expected = layout(members)
        except ValueError as error:
            raise self._not_a_bundle(str(error)) from None
        if directory != expected:
            raise self._not_a_bundle(_ANOTHER_FILE)
        for entry in placed[:1]:  # the others when they are read
            self._check_header(entry)
        return placed

    def _check_header(self, entry: Entry) -> None:
        if self._source.read(entry.at, entry.start - entry.at) != local_header(entry):
            raise self._not_a_bundle(_ANOTHER_FILE)

    def _read_directory(self, directory: bytes, count: int) -> list[tuple[str, int, int]]:
        """Return name, CRC-32 and size of each member."""
        at, unpack = 0, _MEMBER.unpack_from
        members: list[tuple[str, int, int]] = []
        other: list[str] = []
        for _ in range(count):
            if at + _MEMBER.size > len(directory):
                raise self._not_a_bundle("the zip's directory is damaged")
            signature, flags, method, crc, size, length, extra = unpack(directory, at)
            if signature != b"PK\1\2":
                raise self._not_a_bundle("the zip's directory is damaged")
            at += _MEMBER.size
            name = directory[at : at + length].decode("latin-1")
            if flags & 1 or method:
                other.append(f"{name} is {'encrypted' if flags & 1 else 'compressed'}")
            if size == _ELSEWHERE:  # the first number of the extra field; what else is in it is compared later
                size = int.from_bytes(directory[at + length + 4 :][:8], "little")
            at += length + extra
            members.append((name, crc, size))
        try:
            check_names([name for name, _, _ in members])
        except ValueError as error:
            raise self._not_a_bundle(str(error)) from None
        if other:
            raise self._not_a_bundle(other[0])
        return members

    def _read_index(self, vouch: Callable[[bytes, Callable[[], str]], None] | None) -> bytes:
        entry = next(iter(self._entries.values()), None)
        if entry is None or entry.name != INDEX:
            raise self._not_a_bundle(f"its first member is not {INDEX}")
        if entry.size > LARGEST:
            raise self._not_a_bundle(f"{INDEX} has {entry.size:,} bytes, over the limit of {LARGEST:,}")
        data = self._source.read(entry.start, entry.size)
        if zlib.crc32(data) != entry.crc:
            raise LoadError("digest", f"{self.path}: {INDEX} does not have the CRC-32 that the zip lists")
        # The signature comes first: until enough keys vouch for these bytes, nobody parses them. Only the envelope is
        # parsed before, within limits of its own.
        if vouch is not None:
            before = self._source.read(0, entry.start)  # with the index that was read: the file may be another by now
            vouch(data, lambda: sha256_of(self._source, entry.start + entry.size, before + data))
        return data

    def _check_members(self, here: Sequence[str]) -> None:
        """Compare the index's list of members with those of the file: the same, in the same order, each once."""
        listed = self.index["members"]
        if list(listed) != here or here != sorted(here):
            raise LoadError("digest", f"{self.path}: the index does not list the members that the file has")
        digests: dict[str, str] = {}
        for name, entry in listed.items():
            # A bundle is a function of its parts: the same bytes once, under one name.
            other = digests.setdefault(entry["sha256"], name)
            if other != name:
                raise LoadError("format", f"{self.path}: {INDEX}: {other} and {name} are the same, and stored twice")

    def _not_a_bundle(self, what: str) -> LoadError:
        return LoadError("not-a-bundle", f"{self.path}: not a bundle: {what}")


def _build_again(index: dict[str, Any]) -> str:
    """Return what to do with an archive of another format, with the version that wrote it if it names one."""
    versions = index.get("versions")
    version = versions.get("stagec") if isinstance(versions, dict) else None
    if not isinstance(version, str) or version == VERSION:
        return f"build it again with stagec {VERSION}"
    return f"build it again with stagec {VERSION}, or read it with stagec {strict_json.shown(version)}, which wrote it"


def check_names(names: Sequence[str]) -> None:
    """Raise ValueError if they cannot be those of all members of a bundle."""
    if not _are_names(names):
        name = next(name for name in names if not _are_names([name]))
        raise ValueError(f"{name[:LONGEST_NAME]!r} is not a name for a member")
    if len({*names}) < len(names):
        raise ValueError(f"{Counter(names).most_common(1)[0][0]} appears twice")
    # Unpacked, a file and a folder of one name cannot be.
    folders = sorted(f"{name}/" for name in names) if "/" in "".join(names) else ()
    # The names below a folder come right after it.
    for folder, other in itertools.pairwise(folders):
        if other.startswith(folder):
            raise ValueError(f"{folder[:-1]} is a member, and the folder of {other[:-1]}")


def _are_names(names: Sequence[str]) -> bool:
    parts = "/".join(names).split("/")
    known = {*"".join(parts)} <= _LATER and {part[:1] for part in parts} <= _FIRST
    return not names or (known and max(map(len, names)) <= LONGEST_NAME)
