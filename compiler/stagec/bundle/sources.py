"""Where an archive's bytes come from: a file that somebody may change meanwhile, or memory. Standard library only."""

from __future__ import annotations

import functools
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

from stagec.core.data import reading
from stagec.core.data.reading import RegularFile
from stagec.core.telling.refusal import LoadError

_PIECE = 1 << 20
"""Bytes that are read at once of what may be larger than memory."""


class Source(Protocol):
    """Bytes that are read in parts. size: how many there are."""

    size: int

    def read(self, start: int, size: int) -> bytes:
        """Return a copy of `size` bytes from `start`. Raises LoadError when they are not there any more."""
        ...

    def copy(self, start: int, size: int) -> memoryview:
        """Return the same at a page of memory, which devices use as it is."""
        ...

    def map(self, start: int, size: int) -> memoryview:
        """Return the same without a copy."""
        ...


class Memory:
    """Bytes that are in memory already."""

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self._data = data

    def read(self, start: int, size: int) -> bytes:
        """Return a part."""
        return self._data[start : start + size]

    def copy(self, start: int, size: int) -> memoryview:
        """Return a part."""
        memory = reading.memory(size)
        memory[:] = self._data[start : start + size]
        return memory.toreadonly()

    def map(self, start: int, size: int) -> memoryview:
        """Return a part."""
        return memoryview(self._data)[start : start + size]


class File:
    """A file, which stays open until this object is gone: one that is replaced by renaming is still read as it was.

    Threads may read at the same time.
    """

    def __init__(self, path: str) -> None:
        """Open the file. Raises LoadError ("not-found", "not-a-bundle")."""
        self._path = path
        try:
            self._file = RegularFile(path)
        except FileNotFoundError:
            raise LoadError("not-found", f"{path}: no such file") from None
        except OSError as error:
            raise self._refusal(error) from error
        self.size = self._file.size

    def read(self, start: int, size: int) -> bytes:
        """Return a part. Raises LoadError: "digest" when the file became shorter, "not-found" when it is not read."""
        try:
            return self._file.read(start, size)
        except OSError as error:
            raise self._refusal(error) from error

    def copy(self, start: int, size: int) -> memoryview:
        """Return a part at a page of memory. Raises LoadError as `read` does."""
        try:
            return self._file.copy(start, size)
        except OSError as error:
            raise self._refusal(error) from error

    def map(self, start: int, size: int) -> memoryview:
        """Return a part, which starts at a page; it is mapped. Raises LoadError as `read` does."""
        descriptor = self._file.descriptor
        if os.fstat(descriptor).st_size < start + size:
            raise LoadError("digest", f"{self._path}: it was cut off while it was open")
        if not size:
            return memoryview(b"")
        try:
            import mmap  # for weights alone

            return memoryview(mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ, offset=start))
        except OSError as error:  # no memory, or as many mappings as a process may have
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> LoadError:
        if isinstance(error, reading.ChangedError):
            return LoadError("digest", f"{self._path}: {error.strerror}")
        if isinstance(error, reading.NotRegularError):
            return LoadError("not-a-bundle", f"{self._path}: not a bundle: {error.strerror}")
        return LoadError("not-found", f"{self._path}: cannot be read: {error.strerror}")


def in_pieces(source: Source | RegularFile, start: int, size: int) -> Iterator[bytes]:
    """Yield a part of a source piece by piece: it may be larger than memory. Raises what its `read` raises."""
    for at in range(start, start + size, _PIECE):
        yield source.read(at, min(_PIECE, start + size - at))


def sha256_of(
    source: Source | RegularFile, start: int = 0, before: bytes = b"", after: bytes = b"", size: int | None = None
) -> str:
    """Return the SHA-256 (hex) of what a source has from `start` on, with other bytes before and after it.

    size: how many bytes of it; None: up to its end. Raises OSError.
    """
    state = hashlib.sha256(before)
    for piece in in_pieces(source, start, source.size - start if size is None else size):
        state.update(piece)
    state.update(after)
    return state.hexdigest()


class Pieces(Protocol):
    """The content of a member that is read when it is written, piece by piece."""

    @property
    def sha256(self) -> str:
        """Its SHA-256, in hex."""
        ...

    @property
    def crc(self) -> int:
        """Its CRC-32."""
        ...

    def __len__(self) -> int:
        """How many bytes there are."""
        ...

    def pieces(self) -> Iterator[bytes]:
        """Yield the content. Raises ValueError or LoadError, at the end at the latest, when the digest is another."""
        ...


class Part:
    """A part of a file that goes into an archive: read for its digest, and again when the archive is written.

    It is not kept in between: an array may be larger than memory, and of a thousand functions there are thousands of
    executables. It is not mapped either: a file that somebody cuts off under a mapping ends the process.
    path: what to call the file. start: where the part is in it.
    """

    def __init__(self, path: str, opened: Callable[[], RegularFile], start: int, size: int) -> None:
        """opened: returns the file. start, size: of the part, in bytes."""
        self.path = path
        self.start = start
        self._opened, self._size = opened, size

    def __len__(self) -> int:
        """How many bytes there are."""
        return self._size

    @property
    def sha256(self) -> str:
        """Hex digest of what was there when it was first asked for. Raises ValueError when it cannot be read."""
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
            yield from in_pieces(self._opened(), self.start, self._size)
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


class OnDisk(Part):
    """A whole file that goes into an archive, in the same way. It is opened again each time: there may be thousands."""

    def __init__(self, path: str) -> None:
        """Raises OSError when the file cannot be opened."""
        size = RegularFile(path).size

        def opened() -> RegularFile:
            file = RegularFile(path)
            if file.size != size:
                raise reading.ChangedError
            return file

        super().__init__(path, opened, 0, size)
