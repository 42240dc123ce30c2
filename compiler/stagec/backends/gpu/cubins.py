"""Read the resources of each function from the machine code of kernels for NVIDIA devices, a cubin.

A cubin is an ELF file (https://docs.nvidia.com/cuda/cuda-binary-utilities). NVIDIA does not say what is in its
sections; `cuobjdump -elf` prints them with the names that are used here. The tests compare with `cuobjdump -res-usage`,
and with what ptxas says of spills. No tool of NVIDIA's is needed here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from stagec.core.data import elf

_CUDA, _LAYOUT = 190, 8
"""e_machine of a cubin, and the e_ident[EI_ABIVERSION] that CUDA 13 writes: other layouts have other flags."""
_INFO, _TEXT, _SHARED = ".nv.info", ".text.", ".nv.shared."
_INLINE = (1, 2, 3)  # formats of an attribute (EIFMT_NVAL, BVAL, HVAL): its value is where the others have their size
_SIZED = 4  # EIFMT_SVAL
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F  # EIATTR_FRAME_SIZE, EIATTR_REGCOUNT: of a symbol
_THREADS, _BARRIERS, _ANNOTATIONS = 0x10, 0x4C, 0x55  # EIATTR_REQNTID, EIATTR_NUM_BARRIERS, EIATTR_ANNOTATIONS
_SPILL = 1
"""The kind of an annotation: nvdisasm prints such an instruction with the comment SpillRefill."""
_INSTRUCTION = 16  # bytes
_OPCODES = 0xFFF
_STORE_LOCAL, _LOAD_LOCAL = 0x387, 0x983  # STL, LDL
_WIDTHS = (1, 1, 2, 2, 4, 8, 16, 0)
"""Bytes of an access, by bits 73 to 75 of the instruction."""
_HOPPER, _BLACKWELL = 9, 10
"""Major compute capabilities. From the second one on, ptxas 13.0 does not mark each instruction that spills."""
_RESERVED = 1024
"""Bytes of a section of shared memory that the system takes, from Hopper on."""


class Function(NamedTuple):
    """The resources of a function.

    registers: of a thread. stack: bytes of a thread in local memory, which is main memory. spills: bytes of the
    instructions that store registers there and load them again, each counted once, as ptxas counts them. From compute
    capability 10.0 on, accesses to arrays that a thread indexes at run time count too: ptxas does not mark all spills
    there, so it is the most that they can be. shared: bytes of shared memory of a block, without what a launch adds.
    barriers: of a block. threads: of a block, if the code requires a number; None: it does not.
    """

    registers: int
    stack: int
    spills: int
    shared: int
    barriers: int
    threads: int | None


def read(code: bytes) -> dict[str, Function]:
    """Return the functions of a cubin by their names. Raises ValueError when it is damaged, or is none."""
    try:
        if code[:7] != b"\x7fELF\x02\x01\x01" or struct.unpack_from("<H", code, 0x12)[0] != _CUDA:
            raise ValueError("it is not machine code for NVIDIA devices")
        if code[8] != _LAYOUT:
            raise ValueError(f"its layout is version {code[8]}, and this stagec reads {_LAYOUT}")
        return _functions(code)
    except (struct.error, LookupError) as error:
        raise ValueError("machine code for NVIDIA devices that is damaged") from error


def _functions(code: bytes) -> dict[str, Function]:
    major = (struct.unpack_from("<I", code, 0x30)[0] >> 8 & 0xFF) // 10
    sections = elf.sections(code)
    named = {section.name: section for section in sections}
    of_symbols = _of_symbols(code, sections, named[_INFO]) if _INFO in named else {}
    functions = {}
    for section in sections:
        name = section.name.removeprefix(f"{_INFO}.")
        if name == section.name or _TEXT + name not in named:
            continue
        if name in functions:
            raise LookupError("a function that has its attributes twice")
        attributes = dict(_attributes(code[section.content]))
        text = code[named[_TEXT + name].content]
        static = named[_SHARED + name].size if _SHARED + name in named else 0
        threads = attributes.get(_THREADS)
        functions[name] = Function(
            registers=of_symbols[name][_REGISTERS],
            stack=of_symbols[name].get(_FRAME_SIZE, 0),
            spills=sum(_access(text, at) for at in _spills(text, attributes.get(_ANNOTATIONS, b""), major)),
            shared=max(0, static - (_RESERVED if major >= _HOPPER else 0)),
            barriers=int.from_bytes(attributes.get(_BARRIERS, b"")[:1], "little"),
            threads=math.prod(struct.unpack("<III", threads)) if threads else None,
        )
    return functions


def _of_symbols(code: bytes, sections: Sequence[elf.Section], info: elf.Section) -> dict[str, dict[int, int]]:
    """Return the attributes that stand in one section for all functions, by the function's name."""
    symbols = sections[info.link]
    table, names = code[symbols.content], sections[symbols.link].content.start
    numbers: dict[int, dict[int, int]] = {}
    for attribute, value in _attributes(code[info.content]):
        if attribute in (_FRAME_SIZE, _REGISTERS):
            symbol, number = struct.unpack("<II", value)
            numbers.setdefault(symbol, {})[attribute] = number
    named: dict[str, dict[int, int]] = {}
    length = 0
    for symbol, attributes in numbers.items():
        (at,) = struct.unpack_from("<I", table, 24 * symbol)
        name = elf.text(code, names + at)
        length += len(name)
        if length > len(code):  # names may begin in each other
            raise LookupError("names that are longer than the file")
        named.setdefault(name, {}).update(attributes)
    return named


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the attributes of a section: the number of each, and its value."""
    at = 0
    while at < len(content):
        form, attribute, size = struct.unpack_from("<BBH", content, at)
        at += 4
        if form in _INLINE:
            yield attribute, content[at - 2 : at]
        elif form == _SIZED and at + size <= len(content):
            yield attribute, content[at : at + size]
            at += size
        else:
            raise LookupError("an attribute of another format")


def _spills(text: bytes, annotations: bytes, major: int) -> Iterable[int]:
    """Return the addresses of instructions that may spill: the marked ones if the marks are complete, else all."""
    marked = list(struct.iter_unpack("<II", annotations))
    if major < _BLACKWELL and all(kind == _SPILL for kind, _ in marked):
        return [at for _, at in marked]
    return range(0, len(text) - _INSTRUCTION + 1, _INSTRUCTION)


def _access(text: bytes, at: int) -> int:
    """Return the bytes of local memory that an instruction reads or writes."""
    low, high = struct.unpack_from("<QQ", text, at)
    return _WIDTHS[high >> 9 & 7] if low & _OPCODES in (_STORE_LOCAL, _LOAD_LOCAL) else 0
