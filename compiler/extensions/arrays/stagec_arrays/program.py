"""Programs: a function as a list of equations over variables, as JAX's jaxprs are.

Tracing returns a `Program`; lowering, execution and derivatives take it. `str(program)` is its string form.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from jaxlib import _jax

from stagec_arrays.values import Literal, ShapedArray


@dataclass(frozen=True, eq=False)
class Primitive:
    """An operation of programs: a row of the table of primitives. This row defines it completely.

    name: as programs show it.
    infer: takes the `ShapedArray` of each operand, and parameters by name; gives that of the result, or a list of those
        of the results where `several`. Raises TypeError, ValueError or IndexError, in the user's words, where operands
        do not fit.
    lower: takes a `lowering.Rule`, the operands' MLIR values, and parameters by name; gives the result's, or a list.
    vjp: the derivative. Takes a `Derivative` (cotangents, operands, results), and parameters by name; gives the
        cotangent of each operand, None for zero. None if the derivative is zero; a string says why
        there is none.
    several: whether it has a list of results.
    of_keys: of PRNG keys. True: it takes them as it takes other arrays. A function: it returns operands and parameters
        that do the same to the words of keys, a last dimension of size 2. None: it does not take keys.

    Parameters are hashable.
    """

    name: str
    infer: Callable[..., Any] = field(repr=False)
    lower: Callable[..., Any] = field(repr=False)
    vjp: Callable[..., Any] | str | None = field(default=None, repr=False)
    several: bool = False
    of_keys: Callable[..., tuple[Sequence[Any], Mapping[str, Any]]] | bool | None = field(default=None, repr=False)

    def results(self, avals: Sequence[ShapedArray], params: Mapping[str, Any]) -> list[ShapedArray]:
        """Return the abstract results, by the rule `infer`."""
        result = self.infer(*avals, **params)
        return list(result) if self.several else [result]


class Variable:
    """A result of an equation, or an input of a program: one array. Two are the same if they are one object."""

    __slots__ = ("aval",)

    def __init__(self, aval: ShapedArray) -> None:
        self.aval = aval


Operand: TypeAlias = Variable | Literal


@dataclass(slots=True, eq=False)
class Equation:
    """An operation on operands.

    primitive: which. inputs: its operands. params: its parameters. outputs: variables, one for each result.
    traceback: of jaxlib, from where it was traced; None if it is not known.
    """

    primitive: Primitive
    inputs: Sequence[Operand]
    params: Mapping[str, Any]
    outputs: Sequence[Variable]
    traceback: _jax.Traceback | None = None


@dataclass(frozen=True, eq=False)
class Program:
    """A function of arrays.

    inputs: variables for its arguments. equations: in the traced order; each uses only earlier variables.
    outputs: its results. constants: known arrays, each with the variable that stands for it.
    """

    inputs: Sequence[Variable]
    equations: Sequence[Equation]
    outputs: Sequence[Operand]
    constants: Mapping[Variable, np.ndarray[Any, Any]] = field(default_factory=dict)

    @property
    def in_avals(self) -> list[ShapedArray]:
        """The abstract arguments."""
        return [variable.aval for variable in self.inputs]

    @property
    def out_avals(self) -> list[ShapedArray]:
        """The abstract results."""
        return [operand.aval for operand in self.outputs]

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def pruned(program: Program) -> Program:
    """Return the program without unused equations and constants."""
    used = set(program.outputs)
    kept: list[Equation] = []
    for equation in reversed(program.equations):
        if not used.isdisjoint(equation.outputs):
            kept.append(equation)
            used.update(equation.inputs)
    constants = {variable: value for variable, value in program.constants.items() if variable in used}
    return Program(program.inputs, kept[::-1], program.outputs, constants)


def constant_bytes(program: Program) -> int:
    """Return how many bytes the constants of a program, and of the programs in it, have."""
    parts = (equation for equation in program.equations if equation.params)  # most have none
    below = sum(constant_bytes(inner) for equation in parts for inner in subprograms(equation))
    return below + sum(array.nbytes for array in program.constants.values())


def subprograms(equation: Equation) -> Iterator[Program]:
    """Yield the programs among an equation's parameters: the branches of a `cond`, the body of a loop."""
    for value in equation.params.values():
        if isinstance(value, Program):
            yield value
        elif isinstance(value, tuple):
            yield from (part for part in value if isinstance(part, Program))


def _letters() -> Iterator[str]:
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    for length in itertools.count(1):
        for letters in itertools.product(alphabet, repeat=length):
            yield "".join(letters)


def _lines(program: Program) -> Iterator[str]:
    names: dict[Variable, str] = {}
    letters = _letters()

    def bound(variables: Sequence[Variable]) -> str:
        for variable in variables:
            names[variable] = next(letters)
        return " ".join(f"{names[variable]}:{variable.aval}" for variable in variables)

    constants = bound(list(program.constants))
    yield f"{{ lambda {constants} ; {bound(program.inputs)} . let".replace("  ", " ")
    for equation in program.equations:
        inner = list(subprograms(equation))
        shown = {name: value for name, value in equation.params.items() if not has_programs(value)}
        params = " ".join(f"{name}={_param(value)}" for name, value in sorted(shown.items()))
        operands = " ".join(
            str(operand) if isinstance(operand, Literal) else names[operand] for operand in equation.inputs
        )
        name = f"{equation.primitive.name}{f'[{params}]' if params else ''}"
        yield f"    {bound(equation.outputs)} = {name} {operands}".rstrip()
        for part in inner:
            yield from (f"        {line}" for line in _lines(part))
    results = ", ".join(str(operand) if isinstance(operand, Literal) else names[operand] for operand in program.outputs)
    yield f"  in ({results}{',' * (len(program.outputs) == 1)}) }}"


def has_programs(value: Any) -> bool:
    """Whether a parameter of an equation is a program, or has some."""
    return isinstance(value, Program) or (isinstance(value, tuple) and any(isinstance(part, Program) for part in value))


def _param(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({','.join(map(_param, value))}{',' * (len(value) == 1)})"
    return str(value)
