"""Where an archive's bytes come from: a file that somebody may change meanwhile, or memory. Standard library only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TypeAlias

from stagec.core.data import reading
from stagec.core.data.reading import RegularFile
from stagec.core.messages.refusal import LoadError

_PIECE = 1 << 20
"""Bytes to read at once from data that may be larger than memory."""


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


class File(RegularFile):
    """The file of an archive: an error is a LoadError, "not-found", "not-a-bundle", or "digest" where it changed."""

    def __init__(self, path: str) -> None:
        """Open the file. Raises LoadError, as all methods do."""
        self._path = path
        try:
            super().__init__(path)
        except OSError as error:
            raise self._refusal(error) from error

    def read(self, start: int, size: int) -> bytes:
        """Return a part."""
        try:
            return super().read(start, size)
        except OSError as error:
            raise self._refusal(error) from error

    def copy(self, start: int, size: int) -> memoryview:
        """Return a part at a page of memory."""
        try:
            return super().copy(start, size)
        except OSError as error:
            raise self._refusal(error) from error

    def map(self, start: int = 0, size: int | None = None) -> memoryview:
        """Return a part, which starts at a page; it is mapped."""
        try:
            return super().map(start, size)
        except OSError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> LoadError:
        if isinstance(error, reading.ChangedError):
            return LoadError("digest", f"{self._path}: {error.strerror}")
        if isinstance(error, reading.NotRegularError):
            return LoadError("not-a-bundle", f"{self._path}: not a bundle: {error.strerror}")
        what = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        return LoadError("not-found", f"{self._path}: {what}")


Source: TypeAlias = RegularFile | Memory
"""Bytes that are read in parts."""


def in_pieces(source: Source, start: int, size: int) -> Iterator[bytes]:
    """Yield a part of a source piece by piece: it may be larger than memory. Raises what its `read` raises."""
    for at in range(start, start + size, _PIECE):
        yield source.read(at, min(_PIECE, start + size - at))


def sha256_of(source: Source, start: int = 0, before: bytes = b"", after: bytes = b"", size: int | None = None) -> str:
    """Return the SHA-256 (hex) of the bytes of a source from `start` on, with other bytes before and after them.

    size: how many bytes of it; None: up to its end. Raises OSError.
    """
    state = hashlib.sha256(before)
    for piece in in_pieces(source, start, source.size - start if size is None else size):
        state.update(piece)
    state.update(after)
    return state.hexdigest()
