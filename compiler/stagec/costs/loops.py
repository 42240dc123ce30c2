"""How often the loops of an optimized program turn.

XLA notes it where it has found out: `known_trip_count` in the text of a `while`, on CPUs and NVIDIA devices. XLA:TPU
drops the note, so the numbers are followed here: a loop turns a known number of times if its condition compares an
element of its state with a constant, and its body adds a constant to that element.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from stagec.costs.hlo import Computation, Instruction, Program

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION, _BODY = re.compile(r" condition=%([\w.-]+)"), re.compile(r" body=%([\w.-]+)")
_DIRECTION = re.compile(r" direction=([A-Z]{2})")
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
_SCALAR = re.compile(r"[su]\d+\[\]")
_SAME = ("copy", "bitcast", "convert", "reshape", "copy-done", "copy-start", "opt-barrier")
"""Instructions that pass a number on ..."""
_PASSED = ("get-tuple-element", "parameter", "copy", "copy-done", "copy-start", "bitcast")
"""... and those that pass on arrays. These may be elements of a loop's state that no turn changes."""
_DEEPEST = 200
"""Follow a number through at most this many instructions."""


class Element(NamedTuple):
    """A number that a turn of a loop begins with, and what has been added to it. at: which one of the loop's state."""

    at: int
    added: int = 0


Number: TypeAlias = int | Element | None
"""Knowledge about a scalar: its value, its place in the loop's state, or nothing."""


class Scope:
    """The instructions of a computation at one call, and the knowledge about their numbers.

    outer, operands: who calls it, and with which instructions; None and none for the program itself.
    state: what is known of the elements of its one parameter, a tuple, where it is the body of a loop.
    """

    def __init__(
        self,
        program: Program,
        computation: str,
        outer: Scope | None = None,
        operands: Sequence[str] = (),
        state: Sequence[Number] | None = None,
    ) -> None:
        self.program, self.outer, self.operands, self.state = program, outer, operands, state
        self.computation: Computation = program.computations[computation]
        self._numbers: dict[str, Number] = {}
        self._constants: dict[str, frozenset[int]] = {}

    def number(self, name: str, depth: int = 0) -> Number:
        """Return the knowledge about a number, or about an array that equals an element of the state."""
        if name not in self._numbers:
            instruction = self.computation.instructions[name]
            self._numbers[name] = self._number(instruction, depth) if depth < _DEEPEST else None
        return self._numbers[name]

    def _number(self, instruction: Instruction, depth: int) -> Number:
        if instruction.opcode not in _PASSED and not _SCALAR.match(instruction.type):
            return None
        match instruction.opcode:
            case "constant":
                return instruction.number
            case "get-tuple-element" if instruction.number is not None:
                return self.element(instruction.operands[0], instruction.number, depth + 1)
            case "parameter" if self.outer and self.operands and instruction.number is not None:
                return self.outer.number(self.operands[instruction.number], depth + 1)
            case "fusion" | "call":
                inside = Scope(self.program, instruction.called, self, instruction.operands)
                return inside.number(inside.computation.root.name, depth + 1)
            case "add" | "subtract":
                left, right = (self.number(operand, depth + 1) for operand in instruction.operands)
                return _sum(left, right) if instruction.opcode == "add" else _sum(left, _negative(right))
            case opcode if opcode in _SAME:
                return self.number(instruction.operands[0], depth + 1)
        return None

    def element(self, name: str, index: int, depth: int = 0) -> Number:
        """Return the knowledge about an element of a tuple."""
        instruction = self.computation.instructions[name]
        if depth >= _DEEPEST:
            return None
        match instruction.opcode:
            case "tuple":
                return self.number(instruction.operands[index], depth + 1)
            case "parameter" if self.state is not None:
                return self.state[index] if index < len(self.state) else None
            case "parameter" if self.outer and self.operands and instruction.number is not None:
                return self.outer.element(self.operands[instruction.number], index, depth + 1)
            case "fusion" | "call":
                inside = Scope(self.program, instruction.called, self, instruction.operands)
                return inside.element(inside.computation.root.name, index, depth + 1)
            case "while" if index in self._constant(instruction):
                return self.element(instruction.operands[0], index, depth + 1)
            case "opt-barrier" | "copy":
                return self.element(instruction.operands[0], index, depth + 1)
        return None

    def loop(self, instruction: Instruction, varying: bool = False) -> tuple[Scope, Scope]:
        """Return condition and body of a `while`; of their numbers is known what is the same in all turns.

        varying: whether other elements of the state stand for themselves.
        """
        constant, begun = self._constant(instruction), instruction.operands[0]
        state = [
            self.element(begun, i) if i in constant else Element(i) if varying else None
            for i in range(_elements(instruction))
        ]
        condition, body = _parts(instruction)
        return Scope(self.program, condition, state=state), Scope(self.program, body, state=state)

    def turns(self, instruction: Instruction) -> int | None:
        """Return the number of turns of a `while`; None if it is decided at run time."""
        noted = _KNOWN.search(instruction.attributes)
        if noted:
            return int(noted[1])
        condition, body = self.loop(instruction, varying=True)
        compared = condition._comparison(condition.computation.root.name)
        if compared is None:
            return None
        direction, left, right = compared
        if isinstance(left, int):
            left, right, direction = right, left, _MIRRORED[direction]
        if not isinstance(left, Element) or not isinstance(right, int):
            return None
        start = self.element(instruction.operands[0], left.at)
        step = body.element(body.computation.root.name, left.at)
        if not isinstance(start, int) or not isinstance(step, Element) or step.at != left.at:
            return None
        return _turns(direction, start + left.added, right, step.added)

    def _constant(self, instruction: Instruction) -> frozenset[int]:
        """Which elements of the state of a `while` no turn changes."""
        if instruction.name not in self._constants:
            body = Scope(
                self.program, _parts(instruction)[1], state=[Element(i) for i in range(_elements(instruction))]
            )
            root = body.computation.root
            results = enumerate(root.operands if root.opcode == "tuple" else ())
            self._constants[instruction.name] = frozenset(i for i, name in results if body.number(name) == Element(i))
        return self._constants[instruction.name]

    def _comparison(self, name: str, depth: int = 0) -> tuple[str, Number, Number] | None:
        """The operands and the direction of a comparison."""
        instruction = self.computation.instructions[name]
        if depth > _DEEPEST:
            return None
        if instruction.opcode in ("fusion", "call"):
            inside = Scope(self.program, instruction.called, self, instruction.operands)
            return inside._comparison(inside.computation.root.name, depth + 1)
        if instruction.opcode in _SAME:
            return self._comparison(instruction.operands[0], depth + 1)
        direction = _DIRECTION.search(instruction.attributes) if instruction.opcode == "compare" else None
        if direction is None or direction[1] not in _MIRRORED:
            return None
        left, right = map(self.number, instruction.operands)
        return direction[1], left, right


def _turns(direction: str, start: int, end: int, step: int) -> int | None:
    """The number of true comparisons of `start` with `end`, growing by `step`; None if only overflow ends it."""
    if direction in ("GT", "GE"):
        direction, start, end, step = direction.replace("G", "L"), -start, -end, -step
    if direction == "NE":
        return (end - start) // step if step and (end - start) % step == 0 and (end - start) // step >= 0 else None
    end += direction == "LE"
    if start >= end:
        return 0
    return -((start - end) // step) if step > 0 else None


def _sum(left: Number, right: Number) -> Number:
    match left, right:
        case int(), int():
            return left + right
        case Element(), int():
            return left._replace(added=left.added + right)
        case int(), Element():
            return right._replace(added=left + right.added)
    return None


def _negative(number: Number) -> Number:
    return -number if isinstance(number, int) else None


def _parts(instruction: Instruction) -> tuple[str, str]:
    condition, body = _CONDITION.search(instruction.attributes), _BODY.search(instruction.attributes)
    assert condition is not None
    assert body is not None
    return condition[1], body[1]


def _elements(instruction: Instruction) -> int:
    """The most elements of the state of a `while`; too many if some are tuples, which does no harm."""
    return instruction.type.count("[") + 1
