"""Read the resources of each function from the machine code of kernels for AMD devices, a code object.

A code object is an ELF file with a note that says what each kernel takes, as a map in MessagePack
(https://llvm.org/docs/AMDGPUUsage.html#code-object-metadata, https://github.com/msgpack/msgpack/blob/master/spec.md).
The tests compare with another reader of MessagePack, and with `llvm-readobj --notes`. No tool of AMD's is needed here.
"""

from __future__ import annotations

import struct
from typing import Any

from stagec.backends.gpu.cubins import Function
from stagec.core.data import elf

_MACHINE = 224  # EM_AMDGPU
_METADATA = 32  # NT_AMDGPU_METADATA
_REGISTER = 4  # bytes of a thread
_DEEPEST = 16
_LARGEST = 16 << 20
"""Bytes of metadata that are read, as values that take many times as much memory: thousands of kernels take fewer."""
_HEADER = 64
_DAMAGED = "machine code for AMD devices that is damaged"
_MARK = 16
"""Bytes behind a code object: XLA's time and random number."""


def are_in(code: bytes) -> bool:
    """Whether machine code is for AMD devices."""
    return code[:6] == b"\x7fELF\x02\x01" and code[0x12:0x14] == _MACHINE.to_bytes(2, "little")


def size(code: bytes) -> int:
    """Return the length of a code object without what XLA writes behind it; of other bytes, their length.

    LLVM's linker writes the headers of sections last. Behind them, XLA has sixteen bytes. Raises ValueError when the
    header is cut off.
    """
    if not are_in(code):
        return len(code)
    if len(code) < _HEADER:
        raise ValueError(_DAMAGED)
    (start,), (each, count) = struct.unpack_from("<Q", code, 0x28), struct.unpack_from("<HH", code, 0x3A)
    end = start + each * count
    return end if len(code) == end + _MARK else len(code)


def read(code: bytes) -> dict[str, Function]:
    """Return the functions of a code object by their names. Raises ValueError when it is damaged.

    "registers" are vector registers, those for matrices among them; "spills" are the bytes of the vector registers that
    are kept in memory.
    """
    try:
        section = next(section for section in elf.sections(code) if section.name == ".note")
        kernels = _metadata(code[section.content])["amdhsa.kernels"]
        return {
            str(kernel[".name"]): Function(
                registers=int(kernel[".vgpr_count"]),
                stack=int(kernel[".private_segment_fixed_size"]),
                spills=_REGISTER * int(kernel[".vgpr_spill_count"]),
                shared=int(kernel[".group_segment_fixed_size"]),
                barriers=0,
                threads=None,
            )
            for kernel in kernels
        }
    except (struct.error, LookupError, StopIteration, UnicodeDecodeError, TypeError) as error:
        raise ValueError(_DAMAGED) from error


def _metadata(notes: bytes) -> dict[str, Any]:
    at = 0
    while at < len(notes):
        name, size, kind = struct.unpack_from("<III", notes, at)
        start = at + 12 + (name + 3 & ~3)
        if kind == _METADATA and notes[at + 12 : at + 19] == b"AMDGPU\0":
            if size > _LARGEST:
                raise LookupError("too much metadata")
            value, _ = _value(notes[start : start + size], 0, 0)
            return dict(value)
        at = start + (size + 3 & ~3)
    raise LookupError("no metadata")


def _value(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    """Return the value that begins there, and where the next one does."""
    kind = data[at]
    at += 1
    if depth > _DEEPEST:
        raise LookupError("values that are nested too deeply")
    if kind < 0x80:
        return kind, at
    if kind < 0xA0:
        return _several(data, at, depth, kind & 0xF, kind < 0x90)
    if kind < 0xC0:
        return _text(data, at, kind & 0x1F)
    match kind:
        case 0xC0 | 0xC2 | 0xC3:
            return {0xC0: None, 0xC2: False, 0xC3: True}[kind], at
        case 0xCC | 0xCD | 0xCE | 0xCF:
            size = 1 << (kind - 0xCC)
            return int.from_bytes(_bytes(data, at, size), "big"), at + size
        case 0xD9 | 0xDA | 0xDB:
            size = 1 << (kind - 0xD9)
            return _text(data, at + size, int.from_bytes(_bytes(data, at, size), "big"))
        case 0xDC | 0xDD | 0xDE | 0xDF:
            size = 2 << (kind & 1)
            count = int.from_bytes(_bytes(data, at, size), "big")
            return _several(data, at + size, depth, count, kind >= 0xDE)
    raise LookupError(f"a value of kind {kind:#x}")


def _several(data: bytes, at: int, depth: int, count: int, pairs: bool) -> tuple[Any, int]:
    values = []
    for _ in range(count * (1 + pairs)):
        value, at = _value(data, at, depth + 1)
        values.append(value)
    return (dict(zip(values[::2], values[1::2], strict=True)) if pairs else values), at


def _text(data: bytes, at: int, size: int) -> tuple[str, int]:
    return _bytes(data, at, size).decode("utf-8"), at + size


def _bytes(data: bytes, at: int, size: int) -> bytes:
    if at + size > len(data):
        raise LookupError("a value that is cut off")
    return data[at : at + size]
