"""Where an archive's bytes come from: a file that somebody may change meanwhile, or memory. Standard library only."""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import weakref
import zlib
from io import FileIO
from typing import Protocol

from stagec.runtime.refusal import LoadError


class Source(Protocol):
    """Bytes that are read in parts. size: how many there are."""

    size: int

    def read(self, start: int, size: int) -> bytes:
        """Return a copy of `size` bytes from `start`. Raises LoadError when they are not there any more."""
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
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise LoadError("not-found", f"{path}: no such file") from None
        except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
            what = error.strerror if isinstance(error, OSError) else error
            raise LoadError("not-found", f"{path}: cannot be read: {what}") from error
        weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise LoadError("not-a-bundle", f"{path}: not a bundle: it is no file")
        self.size = status.st_size

    def read(self, start: int, size: int) -> bytes:
        """Return a part. Raises LoadError ("digest") when the file became shorter."""
        pieces, left = [], size
        while left:  # one call reads 2 GiB at most
            try:
                piece = os.pread(self._descriptor, left, start + size - left)
            except OSError as error:
                raise LoadError("not-found", f"{self._path}: cannot be read: {error.strerror}") from error
            if not piece:
                raise self._cut_off()
            pieces.append(piece)
            left -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def map(self, start: int, size: int) -> memoryview:
        """Return a part, which starts at a page; it is mapped. Raises LoadError ("digest") as `read` does."""
        if os.fstat(self._descriptor).st_size < start + size:
            raise self._cut_off()
        if not size:
            return memoryview(b"")
        return memoryview(mmap.mmap(self._descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ, offset=start))

    def _cut_off(self) -> LoadError:
        return LoadError("digest", f"{self._path}: it was cut off while it was open")


class OnDisk:
    """The content of a file that goes into an archive: read for its digest, and again when the archive is written.

    It is not kept in between: of a thousand functions there are thousands of executables, of any size.
    path: of the file. sha256: hex digest; crc: CRC-32.
    """

    def __init__(self, path: str) -> None:
        """Read the file. Raises OSError."""
        data = _read(path)
        self.path = path
        self.sha256 = hashlib.sha256(data).hexdigest()
        self.crc = zlib.crc32(data)
        self._size = len(data)

    def __len__(self) -> int:
        """How many bytes there are."""
        return self._size

    def read(self) -> bytes:
        """Return the content. Raises ValueError when it is not what it was."""
        try:
            data = _read(self.path)
        except OSError:
            data = b""
        if len(data) != self._size or zlib.crc32(data) != self.crc:
            raise ValueError(f"{self.path} changed while it was read")
        return data


def _read(path: str) -> bytes:
    with FileIO(path) as file:  # half of the time of Path.read_bytes, for a small file
        return file.readall()
