"""Read files that anybody may have written: only regular files, whose size is known first. Standard library only."""

from __future__ import annotations

import errno
import os
import stat
import weakref

LARGEST = 2**31
"""Bytes of a file that is read whole (2 GiB): the limit of a protobuf or a flatbuffer, as most artifacts are."""


class ChangedError(OSError):
    """A file is shorter than when it was opened."""


class NotRegularError(OSError):
    """A file that is not a regular file: reading a pipe or a device may never end."""


class RegularFile:
    """A regular file that stays open as long as this object: if a rename replaces it, the old content stays readable.

    size: bytes, when it was opened. descriptor: of the open file. Threads may read at the same time.
    """

    def __init__(self, path: str | os.PathLike[str], below: int | None = None) -> None:
        """Open the file. below: its folder; then no link is followed; None: by its path.

        Raises OSError, NotRegularError among them.
        """
        follow = 0 if below is None else os.O_NOFOLLOW
        try:
            # O_NONBLOCK: to open a pipe would else wait until somebody writes into it.
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | follow, dir_fd=below)
        except ValueError as error:  # a null byte in the path
            raise OSError(errno.EINVAL, str(error)) from None
        weakref.finalize(self, os.close, self.descriptor)
        status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode):
            what = "it is a folder" if stat.S_ISDIR(status.st_mode) else "it is not a regular file"
            raise NotRegularError(errno.EINVAL, what)
        self.size = status.st_size

    def read(self, start: int, size: int) -> bytes:
        """Return a part. Raises OSError, ChangedError among them."""
        pieces, left = [], size
        while left:  # one call reads 2 GiB at most
            try:
                piece = os.pread(self.descriptor, left, start + size - left)
            except (MemoryError, OverflowError):
                what = f"{size:,} bytes of it are more than there is memory for"
                raise OSError(errno.ENOMEM, what) from None
            if not piece:
                raise ChangedError(errno.EIO, "it was cut off while it was open")
            pieces.append(piece)
            left -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def copy(self, start: int, size: int) -> memoryview:
        """Return a part in memory from the start of a page: devices use it without a copy. Raises as `read` does."""
        part = memory(size)
        at = 0
        while at < size:
            count = os.preadv(self.descriptor, [part[at:]], start + at)
            if not count:
                raise ChangedError(errno.EIO, "it was cut off while it was open")
            at += count
        return part.toreadonly()

    def map(self, start: int = 0, size: int | None = None) -> memoryview:
        """Map a part that starts at a page, or the whole file. Raises OSError."""
        count = self.size if size is None else size
        # A page beyond the end is a SIGBUS when somebody reads it, and the end of the process.
        if os.fstat(self.descriptor).st_size < start + count:
            raise ChangedError(errno.EIO, "it was cut off while it was open")
        if not count:
            return memoryview(b"")
        import mmap  # for weights alone

        return memoryview(mmap.mmap(self.descriptor, count, mmap.MAP_PRIVATE, mmap.PROT_READ, offset=start))


def memory(size: int) -> memoryview:
    """Return `size` zero bytes of memory from the start of a page. Raises OSError if there is not enough memory."""
    import mmap

    try:
        return memoryview(mmap.mmap(-1, size)) if size else memoryview(bytearray())
    except (OSError, OverflowError, ValueError):
        raise OSError(errno.ENOMEM, f"{size:,} bytes of it are more than there is memory for") from None


def start(path: str | os.PathLike[str], size: int) -> bytes:
    """Return the first bytes of a regular file, `size` at most. Raises OSError."""
    file = RegularFile(path)
    return file.read(0, min(size, file.size))


def whole(path: str | os.PathLike[str], most: int = LARGEST) -> bytes:
    """Return the content of a regular file. Raises OSError, for one of more than `most` bytes too."""
    file = RegularFile(path)
    if file.size > most:
        raise OSError(errno.EFBIG, f"its {file.size:,} bytes are over the limit of {most:,}")
    return file.read(0, file.size)
