"""Members that go into an archive, and the bytes of the archive. Standard library only."""

from __future__ import annotations

import functools
import hashlib
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from stagec.bundle import index
from stagec.bundle.archive import (
    INDEX,
    MOST_MEMBERS,
    Archive,
    Entry,
    check_names,
    encode_index,
    layout,
    local_header,
    read_index,
)
from stagec.bundle.functions import LISTED, Functions
from stagec.bundle.index import FUNCTIONS
from stagec.bundle.sources import in_pieces
from stagec.core.data import reading, strict_json
from stagec.core.data.reading import RegularFile


class Pieces:
    """The content of a member, read piece by piece for its digest, and again to write it.

    Nothing keeps it in between: an array may be larger than memory, and a thousand functions have thousands of
    executables. It is not mapped either: if somebody truncates a mapped file, the process ends.
    path: its name in messages.
    """

    def __init__(self, path: str, size: int, read: Callable[[], Iterator[bytes]]) -> None:
        """size: how many bytes. read: yields them."""
        self.path = path
        self._size, self._of_source = size, read

    def __len__(self) -> int:
        """How many bytes there are."""
        return self._size

    @property
    def sha256(self) -> str:
        """Hex digest of the content at the first request. Raises ValueError when it cannot be read."""
        return self._sums[0]

    @property
    def crc(self) -> int:
        """CRC-32, in the same way."""
        return self._sums[1]

    def pieces(self) -> Iterator[bytes]:
        """Yield the content. Raises ValueError when it cannot be read, and after the last piece when it changed."""
        crc = 0
        for piece in self._read():
            crc = zlib.crc32(piece, crc)
            yield piece
        if crc != self.crc:
            raise ValueError(f"{self.path} changed while it was read")

    def _read(self) -> Iterator[bytes]:
        try:
            yield from self._of_source()
        except (reading.ChangedError, FileNotFoundError):
            raise ValueError(f"{self.path} changed while it was read") from None
        except OSError as error:
            raise ValueError(f"{self.path}: cannot be read: {error.strerror}") from error

    @functools.cached_property
    def _sums(self) -> tuple[str, int]:
        state, crc = hashlib.sha256(), 0
        for piece in self._read():
            state.update(piece)
            crc = zlib.crc32(piece, crc)
        return state.hexdigest(), crc


class Part(Pieces):
    """A part of a file. start: its offset in the file."""

    def __init__(self, path: str, opened: Callable[[], RegularFile], start: int, size: int) -> None:
        """opened: returns the file. start, size: of the part, in bytes."""
        super().__init__(path, size, lambda: in_pieces(opened(), start, size))
        self.start = start


class OnDisk(Part):
    """A whole file that goes into an archive, in the same way. Each read opens it again: there may be thousands."""

    def __init__(self, path: str) -> None:
        """Raises OSError when the file cannot be opened."""
        size = RegularFile(path).size

        def opened() -> RegularFile:
            file = RegularFile(path)
            if file.size != size:
                raise reading.ChangedError
            return file

        super().__init__(path, opened, 0, size)


class Stored(Pieces):
    """A member of an archive that goes into another one, with the archive's digest and CRC-32."""

    def __init__(self, archive: Archive, name: str) -> None:
        entry, listed = archive._entry(name)
        super().__init__(name, entry.size, lambda: archive.pieces(name))
        self._sums = listed["sha256"], entry.crc

    def pieces(self) -> Iterator[bytes]:
        """Yield the content, as `Archive.pieces` does."""
        return self._of_source()


Content: TypeAlias = bytes | memoryview | Pieces
"""The content of a member: bytes, or pieces that are read when the member is written."""


def encode(members: Mapping[str, Content]) -> bytes:
    """Return the zip of `members`, in their order. Raises what `pieces` raises."""
    return b"".join(pieces(members))


def pieces(members: Mapping[str, Content]) -> Iterator[bytes | memoryview]:
    """Return the parts of the zip of `members`, in their order: to be written one after the other.

    Raises ValueError for an invalid name of a member, and for more than LARGEST_FILE or MOST_MEMBERS; the iterator
    raises it for a file that changed.
    """
    check_names([*members])
    if len(members) > MOST_MEMBERS:
        raise ValueError(f"{len(members):,} members are over the limit of {MOST_MEMBERS:,}")
    # Sizes and checksums stand before the data, where a zip has them, so files are read once for these and once to be
    # written: a stream with sizes after the data would be a second encoding.
    placed, directory = layout(
        (name, zlib.crc32(data) if isinstance(data, bytes | memoryview) else data.crc, len(data))
        for name, data in members.items()
    )
    return itertools.chain(_interleaved(placed, members.values()), (directory,))


def _interleaved(placed: Iterable[Entry], members: Iterable[Content]) -> Iterator[bytes | memoryview]:
    for entry, data in zip(placed, members, strict=True):
        yield local_header(entry)
        yield from (data,) if isinstance(data, bytes | memoryview) else data.pieces()


def content(data: Content) -> bytes | memoryview:
    """Return the bytes of a member's content. Raises ValueError for a file that changed."""
    return data if isinstance(data, bytes | memoryview) else b"".join(data.pieces())


def digest(data: Content) -> str:
    """Return the SHA-256 (hex) of a member's content. Raises ValueError for a file that cannot be read."""
    return hashlib.sha256(data).hexdigest() if isinstance(data, bytes | memoryview) else data.sha256


def members_table(members: Mapping[str, Content]) -> dict[str, dict[str, Any]]:
    """Return the key "members" of an index: size and digest of each member, by name in sorted order."""
    return {name: {"sha256": digest(data), "bytes": len(data)} for name, data in sorted(members.items())}


def split(index: Mapping[str, Any], members: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], bytes]:
    """Return the index of a bundle as its member has it, and the content of `FUNCTIONS`.

    index: with the whole entries of "functions". members: size and digest of the other members, by name.
    """
    listed, lines, start = {}, [], 0
    for name, entry in index["functions"].items():
        line = strict_json.line({key: value for key, value in entry.items() if key not in LISTED})
        line_of = {"start": start, "sha256": hashlib.sha256(line).hexdigest()}
        listed[name] = {**{key: entry[key] for key in LISTED}, **line_of}
        lines.append(line)
        start += len(line)
    text = b"".join(lines)
    own = {FUNCTIONS: {"sha256": hashlib.sha256(text).hexdigest(), "bytes": len(text)}}
    return {**index, "functions": listed, "members": dict(sorted({**members, **own}.items()))}, text


def bundle_members(index: Mapping[str, Any], members: Mapping[str, Content]) -> dict[str, Content]:
    """Return the members of a bundle, with its index and its functions.

    index: with the whole entries of "functions". members: the others, by name.
    """
    listed, lines = split(index, members_table({name: data for name, data in members.items() if name != FUNCTIONS}))
    return {INDEX: encode_index(listed), **dict(sorted({**members, FUNCTIONS: lines}.items()))}


def index_of(members: Mapping[str, Content], path: str) -> dict[str, Any]:
    """Return the index of the members of a bundle, with its functions. Raises LoadError, naming `path`."""
    sizes = {name: len(data) for name, data in members.items() if name != INDEX}
    frame, lines = read_index(bytes(content(members[INDEX])), index.check, path, sizes), content(members[FUNCTIONS])
    return {**frame, "functions": Functions(frame, lambda start, size: bytes(lines[start : start + size]), path)}
