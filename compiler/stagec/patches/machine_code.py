"""Change machine code of a library in this process's memory for a while. No file is touched.

What XLA asks of the machine and of its memory's layout cannot be set from outside (docs/reproducibility.md lists what
was tried), so `cpuid` and `hash_seeds` say what a few instructions are to do instead, and `patched` does it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stagec.core.data import elf

_FORBIDDEN = "this system does not let a process change its own code"


class PatchError(OSError):
    """A library's code is not as expected, or cannot be changed in this process; the message says why."""

    def __init__(self, what: str, write: str = "") -> None:
        super().__init__(what)
        self._write = write

    @property
    def write(self) -> str:
        """The advice; it may be empty."""
        return self._write


@dataclass(frozen=True)
class Patch:
    """Other bytes at an address of this process; `before` and `after` are of one length."""

    address: int
    before: bytes
    after: bytes


@dataclass(frozen=True)
class Code:
    """The executable part of a library that lies in this process's memory: `size` bytes at `address`.

    start: the address of the library's first byte, from which it counts its own. path: its file.
    architecture: that of its instructions, by the name of `uname -m`. is_file: whether this is its file, which
    somebody examines, and not what runs.
    """

    path: Path
    start: int
    address: int
    size: int
    architecture: str = "x86_64"
    is_file: bool = False

    @property
    def library(self) -> str:
        """The name of the file."""
        return self.path.name

    def find(self, pattern: bytes, near: int | None = None, distance: int = 0) -> Iterator[int]:
        """Yield the addresses where `pattern` lies; with `near`, those at most `distance` bytes from there."""
        start, end = self.address, self.address + self.size
        if near is not None:
            start, end = max(start, near - distance), min(end, near + distance)
        while address := _libc().memmem(start, end - start, pattern, len(pattern)):
            yield address
            start = address + 1

    def imported(self, function: str) -> int | None:
        """Return where the address is of another library's function; None if it does not import the function.

        Raises PatchError when its file cannot be read.
        """
        with _read(self.path) as file:
            slot = file.imported(function)
        return None if slot is None else self.start + slot

    def constants(self, content: bytes) -> list[int]:
        """Return the addresses of that content among its constants.

        Raises PatchError when its file cannot be read.
        """
        with _read(self.path) as file:
            return [self.start + address for address in file.constants(content)]

    def build_id(self) -> str:
        """Return the identifier of this build. Raises PatchError when the library cannot be read."""
        with _read(self.path) as file:
            return file.build_id


@functools.cache  # a change splits the mapping into several
def loaded(library: str) -> Code:
    """Return the code of a library by its file's name. Raises PatchError when this process has not loaded it."""
    mappings = [mapping for mapping in _mappings() if mapping.path.endswith("/" + library)]
    if not mappings:
        raise PatchError(f"this process has no {library}")
    path, start = Path(mappings[0].path), mappings[0].start
    with _read(path) as file:
        return Code(path, start, start + file.code.address, file.code.size, file.architecture)


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[Code]:
    """Map the file of a library to look at its code, which cannot run. Raises PatchError when it cannot be read."""
    with _read(path) as file:
        start = ctypes.addressof(ctypes.c_char.from_buffer(file.data))
        yield Code(path, start, start + file.code.offset, file.code.size, file.architecture, is_file=True)


@contextlib.contextmanager
def _read(path: Path) -> Iterator[elf.File]:
    try:
        with elf.opened(path) as file:
            yield file
    except PatchError:  # of what is done with it
        raise
    except (OSError, ValueError) as error:
        raise PatchError(f"{path.name} cannot be read: {error}") from error


@functools.cache
def room_near(code: Code, size: int) -> int:
    """Return the address of `size` bytes of memory of our own, all 0, not farther from `code` than a jump can reach.

    Raises PatchError when there is none, or on a system that lets no process have memory to change and run.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
    for distance in range(16, 1800, 16):
        # A jump of five bytes reaches 2 GiB, so a page somewhere in the process's memory is of no use.
        wanted = code.address - (distance << 20) & -mmap.PAGESIZE
        mapped = _libc().mmap(wanted, size, mmap.PROT_READ | mmap.PROT_EXEC, flags, -1, 0)
        if mapped == wanted:
            return wanted
        if mapped != ctypes.c_void_p(-1).value:  # an old kernel takes the address for a hint
            _libc().munmap(mapped, size)
        elif ctypes.get_errno() in (errno.EACCES, errno.EPERM):
            raise PatchError(_FORBIDDEN)
    raise PatchError(f"there is no room beside {code.library} in this process's memory")


@contextlib.contextmanager
def patched(changes: Sequence[Patch]) -> Iterator[None]:
    """Make the changes in their order, and undo them afterwards, the last one first.

    No other thread may run the code meanwhile (`pjrt.turns`). Raises PatchError, and has changed nothing, if an
    address has other bytes than `before`, or if the system does not let a process change its own code.
    """
    # A page that can no longer be made executable would be lost: memory of our own shows whether it can.
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        probe = ctypes.addressof(ctypes.c_char.from_buffer(page))
        if _libc().mprotect(probe, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
            raise PatchError(_FORBIDDEN)
    protections = _protections(changes)
    with contextlib.ExitStack() as made:
        # The answers come before the jumps to them (`cpuid.patches`): a jump must never lead to memory that is still
        # empty.
        for change, protection in zip(changes, protections, strict=True):
            if ctypes.string_at(change.address, len(change.before)) != change.before:
                raise PatchError("the code is not as it was found: something else has changed it")
            made.callback(_undo, change, protection)  # one that fails keeps no other
            _write(change.address, change.after, protection)
        yield


def _undo(change: Patch, protection: int) -> None:
    """Undo a change, if it was made. protection: of its page."""
    if ctypes.string_at(change.address, len(change.before)) != change.before:
        _write(change.address, change.before, protection)


def _protections(changes: Sequence[Patch]) -> list[int]:
    """Return the protection of each change's page."""
    ranges = [(change.address, change.address + len(change.before)) for change in changes]
    # Read once: a process has hundreds.
    mappings = list(_mappings(min(start for start, _ in ranges), max(end for _, end in ranges))) if ranges else []
    protections = []
    for start, end in ranges:
        parts = [
            (min(end, m.end) - max(start, m.start), m.protection) for m in mappings if m.start < end and start < m.end
        ]
        if sum(size for size, _ in parts) != end - start or len({protection for _, protection in parts}) != 1:
            raise PatchError(f"this process has no memory at {start:#x} that could be changed")
        protections.append(parts[0][1])
    return protections


def _write(address: int, code: bytes, before: int) -> None:
    """Write to pages that have the protection `before`, and leave it to them."""
    page = address & -mmap.PAGESIZE
    size = address + len(code) - page
    # Another thread may be running something else on the page: it stays executable where the system allows both.
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc().mprotect(page, size, writable | before) and _libc().mprotect(page, size, writable):
        raise PatchError(_FORBIDDEN)
    ctypes.memmove(address, code, len(code))
    _forget(address, len(code))
    if _libc().mprotect(page, size, before):
        raise PatchError("this system does not let a process run code that it changed")


def _forget(address: int, size: int) -> None:
    """Let the processor forget the instructions that it has read there. x86-64 sees by itself that they are others."""
    if os.uname().machine == "aarch64":
        ctypes.CDLL("libgcc_s.so.1").__clear_cache(ctypes.c_void_p(address), ctypes.c_void_p(address + size))


class _Mapping(NamedTuple):  # there are hundreds of them: other classes take several times as long
    """A line of /proc/self/maps."""

    start: int
    end: int
    protection: int
    path: str


def _mappings(lowest: int = 0, highest: int = 1 << 64) -> Iterator[_Mapping]:
    """Yield the mappings of this process that have something of the addresses from `lowest` to below `highest`."""
    flags = {"r": mmap.PROT_READ, "w": mmap.PROT_WRITE, "x": mmap.PROT_EXEC}
    try:
        text = Path("/proc/self/maps").read_text()
    except OSError as error:
        raise PatchError(f"this process cannot see its own memory: {error}") from error
    for line in text.splitlines():
        first, _, rest = line.partition("-")
        last, letters, _, _, _, *path = rest.split(maxsplit=5)
        start, end = int(first, 16), int(last, 16)
        if end <= lowest or highest <= start:
            continue
        yield _Mapping(start, end, sum(flags.get(letter, 0) for letter in letters), path[0] if path else "")


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.memmem.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.memmem.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
