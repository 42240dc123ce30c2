"""Reverse mode: a program's vector-Jacobian product, by the third column of the table.

The program is evaluated in the current trace, or outside one, and walked backwards: each equation's rule `vjp` gives
the cotangents of its operands of those of its results. The rules are functions of primitives, so that derivatives of
derivatives need nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from stagec_arrays import binding, tracing
from stagec_arrays.dtypes import INEXACT, KINDS
from stagec_arrays.locations import location_of
from stagec_arrays.primitives import elementwise
from stagec_arrays.primitives.structural import broadcast
from stagec_arrays.program import Equation, Program, Variable, pruned
from stagec_arrays.values import Literal, ShapedArray

FLOAT0 = np.dtype([("float0", np.void, 0)])
"""The dtype of the cotangent of integers and bools, which is nothing, as in JAX."""


class NoDerivative(TypeError):
    """An operation has no derivative, for these operands and parameters. The message has the reason and the advice.

    is_placed: whether FILE:LINE of the operation in the user's sources is before the text, where `backward` puts it.
    """

    is_placed = False


class Derivative(NamedTuple):
    """The input of a primitive's rule `vjp`.

    cotangents: of the results; None for zero. operands, results: the values.
    """

    cotangents: Sequence[Any]
    operands: Sequence[Any]
    results: Sequence[Any]

    @property
    def cotangent(self) -> Any:
        """Of the only result."""
        return self.cotangents[0]

    def given(self, number: int) -> Any:
        """Return a cotangent, zeros where it is zero."""
        result = self.cotangents[number]
        return zeros_like(self.results[number]) if result is None else result


def zeros_like(x: Any) -> Any:
    """Return zeros of the shape and dtype of x."""
    return broadcast(Literal(np.zeros((), x.dtype)), x.shape, ())


def placed(count: int, numbers: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Return a list of `count` with values at these numbers, and None elsewhere: zero, as a cotangent."""
    known = dict(zip(numbers, values, strict=True))
    return [known.get(i) for i in range(count)]


def differentiable(avals: Sequence[Any]) -> list[int]:
    """Return the numbers of the arrays that have a derivative."""
    return [i for i, aval in enumerate(avals) if is_differentiable(aval)]


def is_differentiable(aval: Any) -> bool:
    """Whether an array has a derivative: integers and bools have none."""
    return KINDS[aval.dtype] in INEXACT


def evaluate(
    program: Program, values: Sequence[Any], kept: Mapping[Variable, Any] = MappingProxyType({})
) -> dict[Variable, Any]:
    """Bind a program's equations, on arguments, and return the value of each of its variables.

    kept: some that are known already. An equation that gives one of them is left out, with all that it gives.
    """
    known: dict[Variable, Any] = {**dict(zip(program.inputs, values, strict=True)), **kept}
    for variable, array in program.constants.items():
        known[variable] = binding.constant(array, variable.aval.dtype)
    for equation in program.equations:
        if kept and any(variable in kept for variable in equation.outputs):
            continue
        operands = [read(known, operand) for operand in equation.inputs]
        bound = binding.bind(equation.primitive, *operands, **equation.params)
        results = bound if equation.primitive.several else [bound]
        known.update(zip(equation.outputs, results, strict=True))
    return known


def read(known: dict[Variable, Any], operand: Any) -> Any:
    """Return the value of an operand."""
    return operand if isinstance(operand, Literal) else known[operand]


def run(program: Program, values: Sequence[Any]) -> list[Any]:
    """Return the results of a program for arguments."""
    known = evaluate(program, values)
    return [read(known, operand) for operand in program.outputs]


def backward(
    program: Program, known: dict[Variable, Any], cotangents: Sequence[Any], wanted: Sequence[bool]
) -> list[Any]:
    """Return the cotangent of each of a program's inputs that is `wanted`; None for zero.

    known: values of all variables (`evaluate`). cotangents: of the results; None for zero.
    Raises NoDerivative for a primitive that is not differentiable.
    """
    active = {
        variable
        for variable, want in zip(program.inputs, wanted, strict=True)
        if want and is_differentiable(variable.aval)
    }
    for equation in program.equations:
        if equation.primitive.vjp is not None and not active.isdisjoint(equation.inputs):
            active.update(output for output in equation.outputs if is_differentiable(output.aval))
    result: dict[Variable, Any] = {}

    def add(operand: Any, cotangent: Any) -> None:
        if cotangent is not None and isinstance(operand, Variable) and operand in active:
            before = result.get(operand)
            result[operand] = cotangent if before is None else elementwise.add(before, cotangent)

    for operand, cotangent in zip(program.outputs, cotangents, strict=True):
        add(operand, cotangent)
    for equation in reversed(program.equations):
        given = [result.pop(variable, None) for variable in equation.outputs]
        if all(cotangent is None for cotangent in given):
            continue
        operands = [read(known, operand) for operand in equation.inputs]
        results = [known.get(variable) for variable in equation.outputs]
        parts = _parts(equation, Derivative(given, operands, results))
        for operand, part in zip(equation.inputs, parts, strict=True):
            add(operand, part)
    return [result.get(variable) for variable in program.inputs]


def _parts(equation: Equation, given: Derivative) -> Sequence[Any]:
    """Return the cotangents of an equation's operands, by its rule. Raises NoDerivative."""
    rule = equation.primitive.vjp
    assert rule is not None, equation.primitive
    try:
        if isinstance(rule, str):
            raise NoDerivative(f"{equation.primitive.name} has no derivative: {rule}")
        parts: Sequence[Any] = rule(given, **equation.params)
    except NoDerivative as error:
        location = location_of(equation.traceback)
        if location and not error.is_placed:  # the innermost operation's
            error.args = (f"{location}: {error}",)
            error.is_placed = True
        raise
    return parts


def pullback(
    function: Callable[..., Sequence[Any]], values: Sequence[Any], name: str = ""
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Return the results of a function of arrays, and a function from the results' cotangents to the arguments'.

    A cotangent that is zero is None.
    """
    traced = tracing.trace(function, [binding.aval(value) for value in values], name)
    program = pruned(traced.program)
    known = evaluate(program, [*traced.captured, *values])
    results = [read(known, operand) for operand in program.outputs]
    wanted = [False] * len(traced.captured) + [True] * len(values)

    def pull(cotangents: Sequence[Any]) -> list[Any]:
        return backward(program, known, cotangents, wanted)[len(traced.captured) :]

    return results, pull


def backward_program(program: Program, wanted: Sequence[bool]) -> tuple[Program, list[int]]:
    """Return the program of a program's vector-Jacobian product, and the numbers of the inputs that it gives.

    It takes the arguments, and then the cotangents of those results that are floats; it gives the cotangents of those
    inputs that are asked for and floats, zeros where they are zero.
    """
    given = differentiable(program.out_avals)
    numbers = [i for i, aval in enumerate(program.in_avals) if wanted[i] and is_differentiable(aval)]

    def function(*values: Any) -> list[Any]:
        known = evaluate(program, values[: len(program.inputs)])
        cotangents = placed(len(program.outputs), given, values[len(program.inputs) :])
        result = backward(program, known, cotangents, wanted)
        return [zeros_like(program.in_avals[i]) if result[i] is None else result[i] for i in numbers]

    avals = [*program.in_avals, *(ShapedArray(*program.out_avals[i][:2]) for i in given)]
    return pruned(tracing.trace(function, avals, "backward", apart=True).program), numbers


def linearly(forward: Callable[..., Sequence[Any]]) -> Callable[..., list[Any]]:
    """Return the rule `vjp` of a primitive that has a rule of forward mode, which is linear: its transpose.

    forward: takes a `Derivative` without cotangents, the tangent of each operand, and parameters by name; gives that of
    each result, None for zero. What is linear has itself, backwards, as its derivative.
    """

    def vjp(d: Derivative, **params: Any) -> list[Any]:
        given = [i for i, cotangent in enumerate(d.cotangents) if cotangent is not None]
        count = len(d.operands)

        def back(*values: Any) -> list[Any]:
            known = Derivative((), values[:count], values[count : len(values) - len(given)])
            cotangents = dict(zip(given, values[len(values) - len(given) :], strict=True))
            used: list[int] = []

            def along(*tangents: Any) -> list[Any]:
                result = forward(known, *tangents, **params)
                used[:] = [i for i in given if result[i] is not None]
                return [result[i] for i in used]

            _, pull = pullback(along, [zeros_like(operand) for operand in known.operands], "forward")
            result = pull([cotangents[i] for i in used])
            pairs = zip(result, known.operands, strict=True)
            return [zeros_like(operand) if part is None else part for part, operand in pairs]

        values = [*d.operands, *d.results, *(d.cotangents[i] for i in given)]
        # Apart, so that what is computed along zeros alone is dropped.
        program = pruned(tracing.trace(back, list(map(binding.aval, values)), "transpose", apart=True).program)
        pairs = zip(run(program, values), d.operands, strict=True)
        return [result if is_differentiable(operand) else None for result, operand in pairs]

    return vjp


def vjp_program(program: Program) -> Program:
    """Return the program of a program's vector-Jacobian product, as `jax.export` has it.

    It takes the arguments, and a cotangent of each result; it gives one of each argument. Those of integers are bools.
    """

    def function(*values: Any) -> list[Any]:
        count = len(program.inputs)
        known = evaluate(program, values[:count])
        pairs = zip(values[count:], program.out_avals, strict=True)
        cotangents = [given if is_differentiable(aval) else None for given, aval in pairs]
        result = backward(program, known, cotangents, [True] * count)
        return [
            zeros_like(_cotangent(aval)) if part is None else part
            for part, aval in zip(result, program.in_avals, strict=True)
        ]

    avals = [*(ShapedArray(*aval[:2]) for aval in program.in_avals), *map(_cotangent, program.out_avals)]
    return pruned(tracing.trace(function, avals, "vjp", apart=True).program)


def _cotangent(aval: ShapedArray) -> ShapedArray:
    return ShapedArray(aval.shape, aval.dtype if is_differentiable(aval) else np.dtype(bool))
