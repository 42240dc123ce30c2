"""The text of an optimized program: its instructions, and how large their results are.

The text is what every backend gives; XLA:TPU and XLA:GPU give no assignment of buffers for a program compiled without
a device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*-> .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = ")
_OPCODE = re.compile(r" ([\w-]+)\(")
_NAME = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r" (?:calls|to_apply)=%([\w.-]+)")
_INDEX, _WHOLE = re.compile(r", index=(\d+)"), re.compile(r"(\d+)")
_BRANCHES = re.compile(r" branch_computations=\{([^}]*)\}")
_MODEL_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_ARRAY = re.compile(r"([a-z]+)(\d*)[a-z0-9]*\[([^\]]*)\](?:\{([^}]*)\})?")
_TILE, _PACKED, _SPACE = re.compile(r"T\(([\d,]+)\)"), re.compile(r"E\((\d+)\)"), re.compile(r"S\((\d+)\)")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    computation: the computation that it is in; entry: whether that is the program itself; root: whether its result is
    the computation's. type: of the result, with layout. operands: names of instructions. number: of a parameter, of a
    tuple's element, or a constant index; -1 for others. called: the computation that a fusion stands for, or that a
    reduction applies; "" for others. branches: computations of which a conditional runs one. model_name: JAX's name of
    the operation that it comes from, "" where XLA has none.
    """

    computation: str
    entry: bool
    root: bool
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    number: int
    called: str
    branches: tuple[str, ...]
    model_name: str


def instructions(text: str) -> list[Instruction]:
    """Return the instructions of all computations that may run, in the order of the text.

    In an artifact for several platforms JAX chooses by a constant, which XLA does not always fold: the branches of the
    other platforms never run.
    """
    found = list(_all(text))
    numbers = {(one.computation, one.name): one.number for one in found if one.opcode == "constant"}
    dead: set[str] = set()
    for one in found:
        chosen = numbers.get((one.computation, one.operands[0]), -1) if one.branches else -1
        # An index of no branch is that of the last.
        dead |= {name for i, name in enumerate(one.branches) if chosen >= 0 and i != min(chosen, len(one.branches) - 1)}
    return [one for one in found if one.computation not in dead]


def _all(text: str) -> Iterator[Instruction]:
    computation, entry = "", False
    for line in text.splitlines():
        if not line.startswith(" "):
            head = _HEAD.match(line)
            computation, entry = (head[2], bool(head[1])) if head else ("", False)
            continue
        found = _INSTRUCTION.match(line) if computation else None
        if not found:
            continue
        end = _closing(line, found.end()) if line[found.end()] == "(" else line.find(" ", found.end())
        opcode = _OPCODE.match(line, end)
        if not opcode:
            continue
        after = _closing(line, opcode.end() - 1)
        operands, attributes = line[opcode.end() : after - 1], line[after:]
        model_name, called = _MODEL_NAME.search(attributes), _CALLED.search(attributes)
        number = _INDEX.search(attributes) if opcode[1] == "get-tuple-element" else None
        if opcode[1] in ("parameter", "constant"):
            number = _WHOLE.fullmatch(operands)
        branches = _BRANCHES.search(attributes) if opcode[1] == "conditional" else None
        yield Instruction(
            computation,
            entry,
            bool(found[1]),
            found[2],
            line[found.end() : end],
            opcode[1],
            tuple(_NAME.findall(operands)),
            int(number[1]) if number else -1,
            called[1] if called and opcode[1] != "call" and not opcode[1].startswith("async") else "",
            tuple(_NAME.findall(branches[1])) if branches else (),
            re.sub(r"\\(.)", r"\1", model_name[1]) if model_name else "",
        )


def _closing(line: str, start: int) -> int:
    """Return the position after the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(line, start):
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


def elements(type_: str) -> list[str]:
    """Return the array types of a type, those of nested tuples in order."""
    return [match[0] for match in _ARRAY.finditer(type_)]


def size(type_: str, padded: bool = True) -> int:
    """Return how many bytes the arrays of a type take, with the padding of tiles or without; tokens take none."""
    return sum(_array_size(array, padded) for array in _ARRAY.finditer(type_))


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
        tiles = [int(one) for one in tile[1].split(",")]
        sizes = [1] * (len(tiles) - len(sizes)) + sizes
        fixed = len(sizes) - len(tiles)
        whole = [-(-one // along) * along for one, along in zip(sizes[fixed:], tiles, strict=True)]
        sizes = [*sizes[:fixed], *whole]
    return -(-math.prod(sizes) * bits // 8)
