"""Read the text of an optimized program: its instructions, and the sizes of their results.

Every backend gives the text; XLA:TPU and XLA:GPU give no assignment of buffers for a program compiled without
a device.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_FLAT = r"[^()\n]*(?:\([^()\n]*\)[^()\n]*)*"
_NESTED = rf"[^()\n]*(?:\({_FLAT}\)[^()\n]*)*"
_HEAD = r"(ENTRY )?%?([\w.-]+) \(.*-> .*\{"
_INSTRUCTION = rf"  +(ROOT )?%?([\w.-]+) = (\({_NESTED}\)|\S+) ([\w-]+)\(({_NESTED})\)(.*)"
_LINE = re.compile(rf"^(?:{_HEAD}|{_INSTRUCTION})$", re.MULTILINE)
"""The beginning of a computation, or an instruction: one expression for the whole text takes a fifth of the time."""
_NAME = re.compile(r"%([\w.-]+)")
_BRACKET, _COMMENT = re.compile(r"[](){}[,]"), re.compile(r"/\*[^*]*\*/")
_PARENTHESIS = re.compile(r"[()]")
_CALLED = re.compile(r" (?:calls|to_apply)=%([\w.-]+)")
_INDEX, _WHOLE = re.compile(r", index=(\d+)"), re.compile(r"-?\d+")
_BRANCHES = re.compile(r" branch_computations=\{([^}]*)\}")
_CHOICES = re.compile(r" true_computation=%([\w.-]+), false_computation=%([\w.-]+)")
_TRUTHS = {"false": 0, "true": 1}
_MODEL_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_ARRAY = re.compile(r"([a-z]+)(\d*)[a-z0-9]*\[([^\]]*)\](?:\{([^}]*)\})?")
_TILE, _PACKED, _SPACE = re.compile(r"T\(([\d,]+)\)"), re.compile(r"E\((\d+)\)"), re.compile(r"S\((\d+)\)")
FREE = frozenset({"bitcast", "constant", "get-tuple-element", "parameter", "tuple"})
"""Opcodes that only name arrays: they take no operation and move no byte."""


class Instruction(NamedTuple):
    """One instruction.

    computation: the computation that it is in; entry: whether that is the program itself; root: whether its result is
    the computation's. type: of the result, with layout. operands: names of instructions. number: of a parameter, of a
    tuple's element, or a constant integer; None for others. attributes: the rest of the line, as XLA writes it.
    written: the content of the parentheses: the operands, or the elements of a constant.
    """

    computation: str
    entry: bool
    root: bool
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    number: int | None
    attributes: str
    written: str

    @property
    def operation(self) -> str:
        """The opcode without `-start`, the suffix of asynchronous operations."""
        return self.opcode.removesuffix("-start")

    @property
    def result(self) -> str:
        """The type of what it computes: the start of something has its operands, `((...), ...)`, before that."""
        return self.type if self.opcode == self.operation or not self.type.startswith("((") else parts(self.type)[1]

    @property
    def called(self) -> str:
        """The computation that a fusion or a call stands for, or that a reduction applies; "" for others."""
        match = _CALLED.search(self.attributes)
        return match[1] if match else ""

    @property
    def branches(self) -> tuple[tuple[str, str], ...]:
        """The branches of a conditional, each with its operand, by index; true is 1."""
        if self.opcode != "conditional":
            return ()
        match = _BRANCHES.search(self.attributes)
        if match:
            return tuple(zip(_NAME.findall(match[1]), self.operands[1:], strict=True))
        chosen = _CHOICES.search(self.attributes)
        return ((chosen[2], self.operands[2]), (chosen[1], self.operands[1])) if chosen else ()

    @property
    def model_name(self) -> str:
        """JAX's name of the operation that it comes from, "" if XLA has none."""
        match = _MODEL_NAME.search(self.attributes)
        return re.sub(r"\\(.)", r"\1", match[1]) if match else ""


@dataclass(frozen=True)
class Computation:
    """A computation: its instructions by name, each after its operands. root: the instruction of its result."""

    name: str
    instructions: Mapping[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction of the computation's result."""
        return next(instruction for instruction in reversed(list(self.instructions.values())) if instruction.root)

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """Its parameters, by number."""
        parameters = (instruction for instruction in self.instructions.values() if instruction.opcode == "parameter")
        return sorted(parameters, key=lambda parameter: parameter.number or 0)

    @functools.cached_property
    def users(self) -> Mapping[str, Sequence[Instruction]]:
        """For each instruction, the users of its result, each once."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return users


@dataclass(frozen=True)
class Program:
    """A program: its computations by name, in the order of the text. entry: the name of the first one to run."""

    computations: Mapping[str, Computation]
    entry: str


@functools.lru_cache(maxsize=1)  # of the program that was compiled last, several things are counted
def parse(text: str) -> Program:
    """Read a program. If the text has none, there are no computations and `entry` is "".

    In an artifact for several platforms JAX chooses by a constant, which XLA does not always fold: the branches of the
    other platforms never run, and are left out.
    """
    computations: dict[str, Computation] = {}
    instructions: dict[str, Instruction] = {}
    conditionals: list[Instruction] = []
    computation, entry, main = "", False, ""
    for line in _LINE.finditer(text):
        begins, head, root, name, type_, opcode, operands, attributes = line.groups()
        if head:
            computation, entry, instructions = head, bool(begins), {}
            computations[head] = Computation(head, instructions)
            main = head if entry else main
            continue
        number = None
        if opcode == "get-tuple-element":
            index = _INDEX.search(attributes)
            number = int(index[1]) if index else None
        elif opcode in ("parameter", "constant"):
            number = int(operands) if _WHOLE.fullmatch(operands) else _TRUTHS.get(operands)
        names = tuple(_NAME.findall(operands))
        instruction = Instruction(
            computation, entry, bool(root), name, type_, opcode, names, number, attributes, operands
        )
        instructions[name] = instruction
        if opcode == "conditional":
            conditionals.append(instruction)
    for conditional in conditionals:
        which = computations[conditional.computation].instructions[conditional.operands[0]]
        if which.opcode == "constant" and which.number is not None:
            last = len(conditional.branches) - 1
            # An index out of range selects the last branch.
            taken = which.number if 0 <= which.number <= last else last
            for i, (name, _) in enumerate(conditional.branches):
                if i != taken:
                    computations.pop(name, None)
    return Program(computations, main)


def _closing(line: str, start: int) -> int:
    """Return the position after the parenthesis that closes the one at `start`."""
    depth = 0
    for match in _PARENTHESIS.finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(line)


def entry_types(text: str) -> tuple[list[str], list[str]]:
    """Return the types of a program's parameters and of its results on one device, with layouts, from its first line.

    Raises ValueError when the text does not begin with a module that has them.
    """
    line = text.partition("\n")[0]
    start = line.find("entry_computation_layout={(")
    if start < 0:
        raise ValueError("the HLO does not say how its parameters lie in memory")
    begin = line.index("(", start)
    end = _closing(line, begin)
    results = line[end:].removeprefix("->")
    alone = _ARRAY.match(results)
    return elements(line[begin:end]), elements(results[: alone.end() if alone else _closing(results, 0)])


def parts(type_: str) -> list[str]:
    """Return the types of a tuple's elements, which may be tuples."""
    types, depth, start = [], 0, 1
    for match in _BRACKET.finditer(type_):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        if depth == (1 if match[0] == "," else 0):
            types.append(_COMMENT.sub("", type_[start : match.start()]).strip())
            start = match.end()
    return types


def elements(type_: str) -> list[str]:
    """Return the array types of a type, those of nested tuples in order."""
    return [match[0] for match in _ARRAY.finditer(type_)]


@functools.lru_cache(maxsize=2**16)
def size(type_: str, padded: bool = True) -> int:
    """Return the bytes of a type's arrays, with or without the padding of tiles; tokens take none."""
    return sum(_array_size(array, padded) for array in _ARRAY.finditer(type_))


@functools.lru_cache(maxsize=2**16)
def dims(type_: str) -> tuple[int, ...]:
    """Return the sizes of an array type, or of the first array of a tuple; of a dynamic dimension, the largest."""
    array = _ARRAY.search(type_)
    return tuple(int(dim.lstrip("<=")) for dim in array[3].split(",") if dim) if array else ()


def is_complex(type_: str) -> bool:
    """Whether an array type, or the first array of a tuple, has complex numbers."""
    array = _ARRAY.search(type_)
    return array is not None and array[1] == "c"


def plain(type_: str) -> str:
    """Return an array type without its layout, for a reader."""
    return type_.partition("{")[0]


def in_main_memory(type_: str) -> bool:
    """Whether an array is in the device's main memory; others are in a memory of the core, or of the host."""
    space = _SPACE.search(type_)
    return space is None or space[1] == "0"


def _array_size(array: re.Match[str], padded: bool) -> int:
    kind, digits, dims, layout = array.groups()
    if kind in ("token", "opaque"):
        return 0
    packed = _PACKED.search(layout or "")
    # Types of less than a byte take one, unless the layout says that they are packed.
    bits = int(packed[1]) if packed else max(int(digits or 8), 8)
    sizes = [int(dim.lstrip("<=")) for dim in dims.split(",") if dim]
    order, _, rest = (layout or "").partition(":")
    tile = _TILE.search(rest)
    if tile and padded:
        minor_to_major = [int(axis) for axis in order.split(",") if axis]
        sizes = [sizes[axis] for axis in reversed(minor_to_major)]
        tiles = [int(part) for part in tile[1].split(",")]
        sizes = [1] * (len(tiles) - len(sizes)) + sizes
        fixed = len(sizes) - len(tiles)
        whole = [-(-size // along) * along for size, along in zip(sizes[fixed:], tiles, strict=True)]
        sizes = [*sizes[:fixed], *whole]
    return -(-math.prod(sizes) * bits // 8)
