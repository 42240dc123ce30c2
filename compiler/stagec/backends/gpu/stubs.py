"""Stand in for libraries that a plugin is linked with, and that compiling needs none of: ROCm's.

XLA's plugin for AMD devices has its compiler in it, but is linked with ROCm's libraries, which call a device. Each gets
a library of its name here, whose functions all return an error. No key has the ROCm of a machine, so it is not asked.
The libraries are files in memory (`memfd_create`), so they need no compiler, and no other process and no artifact can
have them.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path

from stagec.core.data import elf

_OF_THE_SYSTEM = re.compile(r"ld-linux-.*|lib(c|dl|gcc_s|m|pthread|rt|stdc\+\+)\.so\..*")
_PAGE = 0x1000
_LOAD, _DYNAMIC, _STACK = 1, 2, 0x6474E551  # kinds of segments; the last is PT_GNU_STACK
_READ, _WRITE, _RUN = 4, 2, 1
_HASH, _STRTAB, _SYMTAB, _STRSZ, _SYMENT, _SONAME = 4, 5, 6, 10, 11, 14  # tags of the dynamic section
_GLOBAL_FUNCTION = 0x12  # STB_GLOBAL, STT_FUNC
_CODE = bytes.fromhex("b864000000c3")
"""mov eax, 100; ret: hipErrorNoDevice, and no success in any other of the libraries."""


def load(plugin: Path) -> None:
    """Give this process, for good, a stub for each library that another is linked with, but for those of the system.

    The loader takes a library that the process has, by its name, and searches for no other.
    """
    with elf.opened(plugin) as file:
        others = [name for name in file.libraries() if not _OF_THE_SYSTEM.fullmatch(name)]
        here = ctypes.CDLL(None)
        functions = [name for name in file.missing(others) if not hasattr(here, name)]
    # The functions are in a library of another name: glibc looks for the versions of ROCm's in one that has ROCm's.
    for name, content in ((plugin.name, functions), *((name, ()) for name in others if not _is_here(name))):
        # It stays open: glibc knows a library by its path, and would take the next file of this number for this one.
        memory = os.memfd_create(name)
        os.write(memory, library(name, content))
        ctypes.CDLL(f"/proc/self/fd/{memory}", ctypes.RTLD_GLOBAL)


def _is_here(name: str) -> bool:
    try:
        ctypes.CDLL(name, os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def library(name: str, functions: Sequence[str] = ()) -> bytes:
    """Return a library for x86-64 by that name (its soname); each of its functions returns 100."""
    strings = bytearray(b"\0")

    def string(text: str) -> int:
        strings.extend(text.encode("ascii") + b"\0")
        return len(strings) - len(text) - 1

    soname = string(name)
    header_size = 64 + 56 * 4
    code_at = header_size
    symbols = [struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)]
    symbols += [
        struct.pack("<IBBHQQ", string(function), _GLOBAL_FUNCTION, 0, 1, code_at, len(_CODE)) for function in functions
    ]
    # A table of symbols by their hash: https://refspecs.linuxfoundation.org/elf/gabi4+/ch5.dynamic.html#hash
    buckets = [0] * max(1, len(functions))
    chains = [0] * len(symbols)
    for index, function in enumerate(functions, 1):
        bucket = _hashed(function) % len(buckets)
        chains[index], buckets[bucket] = buckets[bucket], index
    table = struct.pack(f"<II{len(buckets)}I{len(chains)}I", len(buckets), len(chains), *buckets, *chains)
    symbols_at = code_at + 8
    hash_at = symbols_at + 24 * len(symbols)
    strings_at = hash_at + len(table)
    read_only = strings_at + len(strings)
    dynamic_at = -(-read_only // _PAGE) * _PAGE  # the loader writes there: a segment, and so a page, of its own
    tags = [(_SONAME, soname), (_HASH, hash_at), (_STRTAB, strings_at), (_SYMTAB, symbols_at)]
    tags += [(_STRSZ, len(strings)), (_SYMENT, 24), (0, 0)]
    dynamic = b"".join(struct.pack("<QQ", *tag) for tag in tags)

    def segment(kind: int, flags: int, at: int, size: int) -> bytes:
        return struct.pack("<IIQQQQQQ", kind, flags, at, at, at, size, size, _PAGE if kind == _LOAD else 8)

    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 64, 0, 0, 64, 56, 4, 0, 0, 0)
    segments = [
        segment(_LOAD, _READ | _RUN, 0, read_only),
        segment(_LOAD, _READ | _WRITE, dynamic_at, len(dynamic)),
        segment(_DYNAMIC, _READ | _WRITE, dynamic_at, len(dynamic)),
        segment(_STACK, _READ | _WRITE, 0, 0),  # without it, glibc makes the stack executable
    ]
    content = header + b"".join(segments) + _CODE.ljust(8, b"\0") + b"".join(symbols) + table + bytes(strings)
    return content.ljust(dynamic_at, b"\0") + dynamic


def _hashed(name: str) -> int:
    value = 0
    for byte in name.encode("ascii"):
        value = (value << 4) + byte
        value = (value ^ (value & 0xF0000000) >> 24) & ~(value & 0xF0000000) & 0xFFFFFFFF
    return value
