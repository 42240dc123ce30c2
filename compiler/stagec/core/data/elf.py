"""Read an ELF file: its sections; for a library also its build, its code, and its imports.

Libraries are for x86-64 and aarch64 (https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html).
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_LOAD, _DYNAMIC, _NOTE, _FUNCTIONS = 1, 2, 4, 0x6474E550  # kinds of segments; the last is PT_GNU_EH_FRAME
_EXECUTABLE, _WRITABLE = 1, 2  # flags of a segment
_BUILD_ID = 3  # a kind of GNU's notes
_NEEDED, _STRINGS, _SYMBOLS = 1, 5, 6  # tags of the dynamic section
_FUNCTIONS_OF_OTHERS = (0x10, 0x12)  # what a symbol is: STB_GLOBAL, and STT_NOTYPE or STT_FUNC
_NUMBER = 0x7FFF  # the bits of a symbol's version that say which
_RELOCATIONS = ((23, 2), (7, 8))  # the tags of a table of relocations and of its size
_ARCHITECTURES = {62: "x86_64", 183: "aarch64"}  # EM_X86_64, EM_AARCH64
# Relocations that are the address of a function: GLOB_DAT and JUMP_SLOT, of R_X86_64 and of R_AARCH64.
_ADDRESSES = {"x86_64": (6, 7), "aarch64": (1025, 1026)}
_NO_CONTENT = 8  # SHT_NOBITS: a section that has a size, and no bytes in the file
_LONGEST = 2**14  # bytes of a name: a damaged file may have one that does not end


@dataclass(frozen=True)
class Segment:
    """A part of the file, and where it lies in memory: `size` bytes at `offset` are at `address`."""

    kind: int
    flags: int
    offset: int
    address: int
    size: int


class Section(NamedTuple):
    """A section.

    content: where in the file it is; empty of one that only has a size. link: the index of another section, by kind.
    """

    name: str
    content: slice
    size: int
    link: int


def sections(data: bytes | mmap.mmap) -> list[Section]:
    """Return the sections of a 64-bit file, by index. Raises struct.error or LookupError when it is none.

    Together, their names and their contents are no longer than the file: who reads them takes time by its length.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        raise LookupError("no ELF file")
    (start,), (count, names) = struct.unpack_from("<Q", data, 0x28), struct.unpack_from("<HH", data, 0x3C)
    headers = list(struct.iter_unpack("<IIQQQQIIQQ", data[start : start + 64 * count]))
    listed: list[Section] = []
    named = filled = 0
    for title, kind, _, _, at, size, link, *_ in headers:
        content = slice(at, at + (size if kind != _NO_CONTENT else 0))
        listed.append(Section(text(data, headers[names][4] + title), content, size, link))
        named, filled = named + len(listed[-1].name), filled + content.stop - at
        if max(named, filled, content.stop) > len(data):
            raise LookupError("a file that is cut off, or whose sections share what they have")
    if len(listed) != count:
        raise LookupError("a file that is cut off")
    return listed


def undefined(data: bytes) -> Iterator[str]:
    """Yield the symbols that an object file needs from others. Raises as `sections`."""
    listed = sections(data)
    for section in listed:
        if section.name == ".symtab":
            names = listed[section.link].content
            for title, _, _, where, *_ in struct.iter_unpack("<IBBHQQ", data[section.content]):
                if title and not where:
                    yield text(data, names.start + title)


def text(data: bytes | mmap.mmap, at: int) -> str:
    """Return the string that begins there, up to the next zero byte."""
    end = data.find(b"\0", at, at + _LONGEST)
    return data[at:end].decode("ascii", "replace") if end >= 0 else ""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[File]:
    """Read a file. Raises OSError when it cannot be read; ValueError, also later, when it is not such a file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
        try:
            yield File(data)
        except (struct.error, LookupError) as error:
            raise ValueError(f"{path.name} is damaged, or is not a library for x86-64 or aarch64") from error


class File:
    """A file that `opened` reads."""

    def __init__(self, data: mmap.mmap) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise LookupError("no ELF file")
        self.data = data
        self.architecture = _ARCHITECTURES[struct.unpack_from("<H", data, 0x12)[0]]
        (start,), (count,) = struct.unpack_from("<Q", data, 0x20), struct.unpack_from("<H", data, 0x38)
        self._headers = data[start : start + 56 * count]
        rows = struct.iter_unpack("<IIQQQQQQ", self._headers)
        self.segments = [Segment(kind, flags, at, address, size) for kind, flags, at, address, _, size, *_ in rows]

    @property
    def code(self) -> Segment:
        """The first segment that may be executed."""
        code = [segment for segment in self._of_kind(_LOAD) if segment.flags & _EXECUTABLE]
        return code[0]

    @property
    def build_id(self) -> str:
        """The identifier of this build, in hexadecimal.

        The build-id that the linker wrote, as `readelf -n` prints it. jaxlib and the plugin for CUDA have none: then it
        is the start of a SHA-256 over the program headers and the sorted table of all functions' addresses, which
        another compiler, other options or other sources change, and which is read in milliseconds.
        """
        for segment in self._of_kind(_NOTE):
            at, end = segment.offset, segment.offset + segment.size
            while at < end:
                name_size, size, kind = struct.unpack_from("<III", self.data, at)
                start = at + 12 + (name_size + 3 & ~3)
                if kind == _BUILD_ID and self.data[at + 12 : at + 16] == b"GNU\0":
                    return self.data[start : start + size].hex()
                at = start + (size + 3 & ~3)
        functions = self._of_kind(_FUNCTIONS)[0]
        table = self.data[functions.offset : functions.offset + functions.size]
        return hashlib.sha256(self._headers + table).hexdigest()[:32]

    def imported(self, function: str) -> int | None:
        """Return the address of the slot for the address of another library's function; None if there is none."""
        dynamic = self._of_kind(_DYNAMIC)[0]
        tags = dict(struct.iter_unpack("<QQ", self.data[dynamic.offset : dynamic.offset + dynamic.size]))
        symbols, strings = self._offset(tags[_SYMBOLS]), self._offset(tags[_STRINGS])
        for table, size in _RELOCATIONS:
            start = self._offset(tags[table])
            for slot, info, _ in struct.iter_unpack("<QQQ", self.data[start : start + tags[size]]):
                if info & 0xFFFFFFFF in _ADDRESSES[self.architecture]:
                    (name,) = struct.unpack_from("<I", self.data, symbols + 24 * (info >> 32))
                    if text(self.data, strings + name) == function:
                        return int(slot)
        return None

    def libraries(self) -> list[str]:
        """Return the names of the libraries that it is linked with."""
        names = self.section(".dynstr")
        return [text(names, at) for tag, at in struct.iter_unpack("<QQ", self.section(".dynamic")) if tag == _NEEDED]

    def missing(self, libraries: Collection[str]) -> Iterator[str]:
        """Yield the functions that it takes from these of its libraries, or of which it does not say where from."""
        names, versions, table = map(self.section, (".dynstr", ".gnu.version", ".gnu.version_r"))
        of_version: dict[int, str] = {}
        at, more = 0, len(table)
        while more:
            _, count, file, entry, more = struct.unpack_from("<HHIII", table, at)
            entry += at
            for _ in range(count):
                _, _, number, _, step = struct.unpack_from("<IHHII", table, entry)
                of_version[number], entry = text(names, file), entry + step
            at += more
        for index, symbol in enumerate(struct.iter_unpack("<IBBHQQ", self.section(".dynsym"))):
            name, info, _, section, _, _ = symbol
            (number,) = struct.unpack_from("<H", versions, 2 * index)
            function = info in _FUNCTIONS_OF_OTHERS and not section
            if function and of_version.get(number & _NUMBER, "") in ("", *libraries):
                yield text(names, name)

    def constants(self, content: bytes) -> Iterator[int]:
        """Yield the addresses of that content in memory that is neither writable nor executable."""
        for segment in self._of_kind(_LOAD):
            at = -1
            while not segment.flags & (_EXECUTABLE | _WRITABLE):
                at = self.data.find(content, max(at + 1, segment.offset), segment.offset + segment.size)
                if at < 0:
                    break
                yield at - segment.offset + segment.address

    def section(self, name: str) -> bytes:
        """Return the content of a section; b"" when there is none of that name."""
        return next((self.data[section.content] for section in sections(self.data) if section.name == name), b"")

    def _of_kind(self, kind: int) -> list[Segment]:
        return [segment for segment in self.segments if segment.kind == kind]

    def _offset(self, address: int) -> int:
        """Return the file offset of an address."""
        around = [s for s in self._of_kind(_LOAD) if s.address <= address < s.address + s.size]
        return address - around[0].address + around[0].offset
