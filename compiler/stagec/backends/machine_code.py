"""Change machine code of a library in this process's memory for a while. No file is touched.

What XLA asks of the machine and of its memory's layout cannot be set from outside (docs/reproducibility.md lists what
was tried), so `cpuid` and `hash_seeds` say what a few instructions are to do instead, and `changed` does it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


class CannotChange(OSError):
    """A library's code is not as expected, or cannot be changed in this process; the message says why."""


@dataclass(frozen=True)
class Change:
    """Other bytes at an address of this process; `before` and `after` are of one length."""

    address: int
    before: bytes
    after: bytes


@dataclass(frozen=True)
class Code:
    """The executable part of a library that this process has loaded: `size` bytes at `address`."""

    library: str
    address: int
    size: int

    def find(self, pattern: bytes, near: int | None = None, distance: int = 0) -> Iterator[int]:
        """Yield the addresses where `pattern` lies; with `near`, those at most `distance` bytes from there."""
        start, end = self.address, self.address + self.size
        if near is not None:
            start, end = max(start, near - distance), min(end, near + distance)
        while found := _libc().memmem(start, end - start, pattern, len(pattern)):
            yield found
            start = found + 1


@functools.cache  # a change splits the mapping into several
def loaded(library: str) -> Code:
    """Return the code of a library by its file's name. Raises CannotChange when this process has not loaded it."""
    for entry in _mappings():
        if entry.protection & mmap.PROT_EXEC and entry.path.endswith("/" + library):
            return Code(library, entry.start, entry.end - entry.start)
    raise CannotChange(f"this process has no {library}")


@functools.cache
def room_near(code: Code, size: int) -> int:
    """Return the address of `size` bytes of memory of our own, all 0, not farther from `code` than a jump can reach."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
    for distance in range(16, 1800, 16):
        wanted = code.address - (distance << 20)
        found = _libc().mmap(wanted, size, mmap.PROT_READ | mmap.PROT_EXEC, flags, -1, 0)
        if found == wanted:
            return wanted
        if found != ctypes.c_void_p(-1).value:  # an old kernel takes the address for a hint
            _libc().munmap(found, size)
    raise CannotChange(f"there is no room beside {code.library} in this process's memory")


@contextlib.contextmanager
def changed(changes: Sequence[Change]) -> Iterator[None]:
    """Make the changes, and undo them afterwards. No other thread may run the code meanwhile.

    Raises CannotChange, with nothing changed, on a system that does not let a process change its own code.
    """
    # A page that can no longer be made executable would be lost: memory of our own shows whether it can.
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        probe = ctypes.addressof(ctypes.c_char.from_buffer(page))
        if _libc().mprotect(probe, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
            raise CannotChange("this system does not let a process change its own code")
    mappings = list(_mappings())  # once: a library has hundreds
    protections = [
        next(entry.protection for entry in mappings if entry.start <= change.address < entry.end) for change in changes
    ]
    for change, protection in zip(changes, protections, strict=True):
        _write(change.address, change.after, protection)
    try:
        yield
    finally:
        for change, protection in zip(changes, protections, strict=True):
            _write(change.address, change.before, protection)


@functools.cache
def imported(library: str, function: str) -> int:
    """Return the address at which a loaded library keeps the address of a function of another library's.

    Raises CannotChange when the library does not import it.
    """
    path, base = next((entry.path, entry.start) for entry in _mappings() if entry.path.endswith("/" + library))
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        (start,), (count,) = struct.unpack_from("<Q", data, 0x20), struct.unpack_from("<H", data, 0x38)
        headers = [struct.unpack_from("<IIQQQQ", data, start + 56 * i) for i in range(count)]
        loads = [(at, size, offset) for kind, _, offset, at, _, size in headers if kind == 1]

        def place(at: int) -> int:
            return next(int(at - where + offset) for where, size, offset in loads if where <= at < where + size)

        dynamic = next(data[offset : offset + size] for kind, _, offset, _, _, size in headers if kind == 2)
        tags = dict(struct.iter_unpack("<QQ", dynamic))  # DT_STRTAB is 5, DT_SYMTAB 6; then two tables of relocations
        for table, size in ((23, 2), (7, 8)):
            found = struct.iter_unpack("<QQQ", data[place(tags[table]) : place(tags[table]) + tags[size]])
            for at, info, _ in (row for row in found if row[1] & 0xFFFFFFFF in (6, 7)):  # GLOB_DAT, JUMP_SLOT
                (name,) = struct.unpack_from("<I", data, place(tags[6]) + 24 * (info >> 32))
                text = place(tags[5]) + name
                if data[text : data.find(b"\0", text)] == function.encode():
                    slot: int = base + at
                    return slot
    raise CannotChange(f"this {library} does not import {function}")


def _write(address: int, code: bytes, before: int) -> None:
    """Write to pages that have the protection `before`, and leave it to them."""
    page = address & -mmap.PAGESIZE
    size = address + len(code) - page
    # Another thread may be running something else on the page: it stays executable where the system allows both.
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc().mprotect(page, size, writable | before) and _libc().mprotect(page, size, writable):
        raise CannotChange("this system does not let a process change its own code")
    ctypes.memmove(address, code, len(code))
    if _libc().mprotect(page, size, before):
        raise CannotChange("this system does not let a process run code that it changed")


@dataclass(frozen=True)
class _Mapping:
    """A line of /proc/self/maps."""

    start: int
    end: int
    protection: int
    path: str


def _mappings() -> Iterator[_Mapping]:
    flags = {"r": mmap.PROT_READ, "w": mmap.PROT_WRITE, "x": mmap.PROT_EXEC}
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, letters, _, _, _, *path = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        yield _Mapping(start, end, sum(flags.get(letter, 0) for letter in letters), path[0] if path else "")


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = libc.memmem.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.memmem.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
