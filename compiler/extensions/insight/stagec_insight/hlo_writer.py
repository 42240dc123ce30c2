"""Write HLO text for CPUs, an instruction at a time, and read HLO text for that."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from stagec.costs import hlo
from stagec.costs.array_types import Array, array
from stagec.costs.hlo import Computation, Instruction, Program

_LAYOUT = re.compile(r"(?<=\])\{[^}]*\}")
_MARK = re.compile(r'"(?:[^"\\]|\\.)*"?|[][(){},]', re.DOTALL)
"""A string, a bracket or a comma."""


class Refused(Exception):
    """An instruction that has no form for CPUs, and why."""


def plain(type_: str) -> str:
    """Return a type without its layouts and comments."""
    return re.sub(r"/\*[^*]*\*/", "", _LAYOUT.sub("", type_))


def listed(numbers: Sequence[int]) -> str:
    """Return `{1,0}`."""
    return "{" + ",".join(map(str, numbers)) + "}"


def attributes(text: str) -> dict[str, str]:
    """Return the attributes of an instruction, by name, as XLA writes them after the operands."""
    named, depth, start = {}, 0, 0
    for match in _MARK.finditer(f"{text},"):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        if match[0] == "," and not depth:
            name, _, value = text[start : match.start()].strip().partition("=")
            if name:
                named[name] = value
            start = match.end()
    return named


class Writer:
    """Writes a device's computation as instructions for CPUs, in the same computation.

    num_devices: of the program. values: for each of the device's instructions, the one that has its result.
    types: of those that were written. beside: computations that were written.
    instruction: the device's instruction that is written now, since `begin`.
    """

    instruction: Instruction

    def __init__(self, computation: Computation, program: Program, num_devices: int) -> None:
        self.computation = computation
        self.program = program
        self.num_devices = num_devices
        self.values: dict[str, str] = {}
        self.types: dict[str, str] = {}
        self.lines: list[tuple[str, str]] = []
        self.beside: list[str] = []
        self._parts = 0

    def begin(self, instruction: Instruction) -> None:
        """Begin an instruction: the following ones get names from it."""
        self.instruction, self._parts = instruction, 0

    @property
    def type(self) -> str:
        """The type of the instruction's result, without layout."""
        return plain(self.instruction.type)

    @property
    def result(self) -> Array:
        """The array that is the instruction's result, or the first of its results. Raises Refused."""
        return array(plain(hlo.elements(self.instruction.type)[0]))

    @property
    def results(self) -> list[Array]:
        """All arrays of the instruction's result. Raises Refused."""
        return [array(plain(type_)) for type_ in hlo.elements(self.instruction.type)]

    @property
    def operands(self) -> list[str]:
        """The new names of the instruction's operands."""
        return [self.values[operand] for operand in self.instruction.operands]

    @property
    def attributes(self) -> dict[str, str]:
        """The instruction's attributes."""
        return attributes(self.instruction.attributes)

    @property
    def config(self) -> dict[str, Any]:
        """The instruction's backend_config: JSON, or MLIR's attributes."""
        text = self.attributes.get("backend_config", "{}")
        try:
            config: dict[str, Any] = json.loads(text)
        except ValueError:
            pairs = (pair.partition(" = ") for pair in text.strip("{}").split(", "))
            return {name: {"true": True, "false": False}.get(value, value) for name, _, value in pairs if name}
        return config

    def type_of(self, operand: str) -> str:
        """Return the type of one of the device's instructions of this computation, with its layout."""
        return self.computation.instructions[operand].type

    def add(self, type_: str, opcode: str, *operands: str, **rest: str) -> str:
        """Write an instruction; return its name. operands: names; rest: attributes, with _ for -."""
        return self.write(type_, f"{opcode}({', '.join(f'%{name}' for name in operands)})", rest)

    def same(self, opcode: str, *operands: str) -> str:
        """Write an elementwise operation; its result has the type of its operands."""
        return self.add(self.types[operands[0]], opcode, *operands)

    def constant(self, dtype: str, value: str) -> str:
        """Write a scalar constant."""
        return self.write(f"{dtype}[]", f"constant({value})", {})

    def full(self, type_: str, value: str) -> str:
        """Write an array of one value."""
        return self.add(type_, "broadcast", self.constant(array(type_).dtype, value), dimensions="{}")

    def write(self, type_: str, text: str, rest: Mapping[str, str]) -> str:
        """Write an instruction with operands given as a string."""
        self._parts += 1
        name = f"{self.instruction.name}.cpu{self._parts}"
        suffix = "".join(f", {key}={value}" for key, value in rest.items())
        self.lines.append((name, f"%{name} = {type_} {text}{suffix}"))
        self.types[name] = plain(type_)
        return name

    def element(self, value: str, index: int) -> str:
        """Write an element of a tuple."""
        return self.add(hlo.parts(self.types[value])[index], "get-tuple-element", value, index=str(index))

    def cast(self, value: str, dtype: str) -> str:
        """Write an array with another dtype, unless it has that."""
        type_ = array(self.types[value])
        return value if type_.dtype == dtype else self.add(type_._replace(dtype=dtype).plain, "convert", value)

    def zeros(self, type_: str) -> str:
        """Write an unused value of a type: zeros."""
        if type_.startswith("("):
            return self.add(type_, "tuple", *map(self.zeros, hlo.parts(type_) if type_ != "()" else []))
        if type_.startswith("token["):
            return self.add(type_, "after-all")
        array(type_)  # raises for any other
        return self.full(type_, "false" if type_.startswith("pred") else "0")

    def function(self, body: str) -> str:
        """Write a computation beside this one, `{...}`; return its name."""
        name = f"{self.computation.name}.{self.instruction.name}.cpu{len(self.beside)}"
        self.beside.append(f"%{name} {body}\n")
        return name
