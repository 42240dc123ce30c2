"""Primitives of control flow: `case`, `while`, `scan`. Their branches and bodies are programs, as parameters.

Values from the traces around them are operands too, before the others (`captured`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from stagec_arrays import dims, dtypes, tracing
from stagec_arrays.binding import aval, bind
from stagec_arrays.lowering import IRValue, Rule, compare, constant, integer, integers, tensor_type
from stagec_arrays.primitives import derivatives as d, elementwise
from stagec_arrays.primitives.calls import kept_by_policies
from stagec_arrays.primitives.derivatives import Derivative
from stagec_arrays.program import Primitive, Program, Variable, pruned
from stagec_arrays.tracing import Recorded, Tracer
from stagec_arrays.values import ShapedArray

Function = Callable[..., Sequence[Any]]
_I32 = ShapedArray((), dtypes.int32)


# One of several branches.


class BranchError(TypeError):
    """Branches that give other arrays, or other trees."""


def case(index: Any, branches: Sequence[Function], operands: Sequence[Any]) -> list[Any]:
    """Return the result of one of several functions for operands; a number out of range is moved inside.

    index: of no dimensions, i32. The branches give arrays of the same avals.
    """
    traced = [tracing.trace(branch, [aval(operand) for operand in operands]) for branch in branches]
    programs, captured = _of_same_inputs(traced)
    inside = elementwise.minimum(elementwise.maximum(index, 0), len(branches) - 1)
    result: list[Any] = bind(CASE, inside, *captured, *operands, branches=tuple(programs))
    return result


def _of_same_inputs(traced: Sequence[Recorded]) -> tuple[list[Program], list[Tracer]]:
    """Give all programs the captured values of each; return the programs and the values."""
    every: dict[Any, Tracer] = {tracer._operand: tracer for part in traced for tracer in part.captured}
    programs = []
    for part in traced:
        own = {tracer._operand: variable for tracer, variable in zip(part.captured, part.program.inputs, strict=False)}
        first = [own.get(key) or Variable(tracer.aval) for key, tracer in every.items()]
        given = part.program.inputs[len(part.captured) :]
        program = Program([*first, *given], part.program.equations, part.program.outputs, part.program.constants)
        programs.append(pruned(program))
    return programs, list(every.values())


def _case_infer(index: ShapedArray, *avals: ShapedArray, branches: Sequence[Program]) -> list[ShapedArray]:
    first = branches[0].out_avals
    for number, other in enumerate(branches[1:], 1):
        if [shaped[:2] for shaped in other.out_avals] != [shaped[:2] for shaped in first]:
            types = [", ".join(map(str, branch.out_avals)) for branch in (branches[0], other)]
            both = f"branch 0 ({types[0]}), branch {number} ({types[1]})"
            raise BranchError(f"branches give arrays of other avals: {both}")
    weak = [all(branch.out_avals[i].weak_type for branch in branches) for i in range(len(first))]
    return [ShapedArray(shaped.shape, shaped.dtype, both) for shaped, both in zip(first, weak, strict=True)]


def _case_lower(rule: Rule, index: IRValue, *values: IRValue, branches: Sequence[Program]) -> list[IRValue]:
    operation = hlo.CaseOp(list(map(tensor_type, rule.outputs)), index, len(branches))
    for number, branch in enumerate(branches):
        rule.subprogram(operation, number, branch, values)
    return list(operation.results)


def _case_vjp(given: Derivative, *, branches: Sequence[Program]) -> list[Any]:
    index, *operands = given.operands
    derived = [d.backward_program(branch, [True] * len(operands)) for branch in branches]
    cotangents = map(given.given, d.differentiable(given.results))
    parts = bind(CASE, index, *operands, *cotangents, branches=tuple(program for program, _ in derived))
    return [None, *d.placed(len(operands), d.differentiable(operands), parts)]


CASE: Primitive = Primitive("case", _case_infer, _case_lower, _case_vjp, several=True, of_keys=True)


# As long as a condition holds.


def while_(condition: Function, body: Function, init: Sequence[Any]) -> list[Any]:
    """Return the values that a body, called again and again, gives when a condition no longer holds of them.

    condition: gives one bool. The body gives arrays of the avals that it takes.
    """
    avals = [aval(value) for value in init]
    test, step = tracing.trace(condition, avals, "cond_fun"), tracing.trace(body, avals, "body_fun")
    (tested, stepped), captured = _of_same_inputs([test, step])
    result: list[Any] = bind(WHILE, *captured, *init, condition=tested, body=stepped, captured=len(captured))
    return result


def _while_infer(*avals: ShapedArray, condition: Program, body: Program, captured: int) -> list[ShapedArray]:
    (test,) = condition.out_avals
    if test.shape != () or test.dtype != dtypes.bool_:
        raise TypeError(f"the condition of a loop gives one bool, not {test}")
    _same("the body of a loop", avals[captured:], body.out_avals)
    return list(avals[captured:])


def _same(what: str, taken: Sequence[ShapedArray], given: Sequence[ShapedArray]) -> None:
    """Raise TypeError if a body gives other avals than it takes."""
    if [shaped[:2] for shaped in taken] != [shaped[:2] for shaped in given]:
        types = [", ".join(str(ShapedArray(*shaped[:2])) for shaped in avals) for avals in (taken, given)]
        raise TypeError(f"{what} takes ({types[0]}) and gives ({types[1]}); they must be the same")


def _while_lower(rule: Rule, *values: IRValue, condition: Program, body: Program, captured: int) -> list[IRValue]:
    kinds = list(map(tensor_type, rule.inputs))
    operation = hlo.WhileOp(kinds, list(values))
    rule.subprogram(operation, 0, condition)
    block = rule.block(operation, 1, rule.inputs)
    with ir.InsertionPoint(block):
        arguments = list(block.arguments)
        hlo.return_([*arguments[:captured], *rule.lowering.program(body, arguments)])
    return list(operation.results)[captured:]


WHILE = Primitive(
    "while",
    _while_infer,
    _while_lower,
    "how often the loop turns is not known: write scan, or fori_loop with numbers as bounds",
    several=True,
    of_keys=True,
)


# Once for each element of an axis.


def scan(
    function: Callable[[Sequence[Any], Sequence[Any]], tuple[Sequence[Any], Sequence[Any]]],
    init: Sequence[Any],
    xs: Sequence[Any],
    length: Any,
    backward: bool = False,
) -> tuple[list[Any], list[Any]]:
    """Return the last carry, and for each result its values along a new first axis.

    function: takes what is carried and the parts of xs at one index of their first axis, gives what is carried next and
    results. backward: from the last index to the first.
    """
    avals = [aval(value) for value in init]
    parts = [ShapedArray(x.shape[1:], x.dtype) for x in map(aval, xs)]

    def flat(*values: Any) -> list[Any]:
        carry, ys = function(values[: len(avals)], values[len(avals) :])
        return [*carry, *ys]

    traced = tracing.trace(flat, [*avals, *parts], "the body of a scan")
    result = bind(
        SCAN,
        *traced.captured,
        *init,
        *xs,
        body=pruned(traced.program),
        captured=len(traced.captured),
        carried=len(init),
        length=length,
        backward=backward,
    )
    return result[: len(init)], result[len(init) :]


def _scan_infer(
    *avals: ShapedArray, body: Program, captured: int, carried: int, length: Any, backward: bool
) -> list[ShapedArray]:
    carry = avals[captured : captured + carried]
    _same("the body of a scan", carry, body.out_avals[:carried])
    ys = [ShapedArray((length, *shaped.shape), shaped.dtype) for shaped in body.out_avals[carried:]]
    return [*(ShapedArray(*shaped[:2]) for shaped in carry), *ys]


def _scan_lower(
    rule: Rule, *values: IRValue, body: Program, captured: int, carried: int, length: Any, backward: bool
) -> list[IRValue]:
    fixed = [*rule.inputs[:captured], *rule.inputs[captured + carried :]]
    carry, ys = rule.inputs[captured : captured + carried], rule.outputs[carried:]
    avals = [_I32, *fixed, *carry, *ys]
    empty = [rule.full(0, y) for y in ys]
    if type(length) is int and length == 0:  # no part of an array without elements can be written down
        return [*values[captured : captured + carried], *empty]
    start = [constant(np.asarray(0, np.int32)), *values[:captured], *values[captured + carried :]]
    start += [*values[captured : captured + carried], *empty]
    operation = hlo.WhileOp([tensor_type(shaped) for shaped in avals], start)
    test = rule.block(operation, 0, avals)
    with ir.InsertionPoint(test):
        limit = rule.lowering.size(length)
        hlo.return_([compare(test.arguments[0], limit, "LT", dtypes.int32)])
    block = rule.block(operation, 1, avals)
    with ir.InsertionPoint(block):
        count, *rest = block.arguments
        step, zero = constant(np.asarray(1, np.int32)), constant(np.asarray(0, np.int32))
        last = rule.lowering.size(length - 1)
        index = hlo.subtract(last, count) if backward else count
        end = len(fixed) + carried
        xs = []
        for value, known in zip(rest[captured : len(fixed)], fixed[captured:], strict=True):
            part = _part(rule, value, known, [index, *[zero] * (len(known.shape) - 1)])
            xs.append(rule.reshape(part, ShapedArray(known.shape[1:], known.dtype)))
        results = rule.lowering.program(body, [*rest[:captured], *rest[len(fixed) : end], *xs])
        updated = []
        for value, result, known in zip(rest[end:], results[carried:], ys, strict=True):
            wide = rule.reshape(result, ShapedArray((1, *known.shape[1:]), known.dtype))
            updated.append(hlo.dynamic_update_slice(value, wide, [index, *[zero] * (len(known.shape) - 1)]))
        hlo.return_([hlo.add(count, step), *rest[: len(fixed)], *results[:carried], *updated])
    return list(operation.results)[1 + len(fixed) :]


def _part(rule: Rule, value: IRValue, known: ShapedArray, starts: Sequence[IRValue]) -> IRValue:
    """Return one part of an array along its first axis."""
    sizes = (1, *known.shape[1:])
    if dims.is_static(sizes):
        return hlo.dynamic_slice(value, list(starts), integers(sizes))
    vector = tensor_type(ShapedArray((1,), dtypes.int32))
    first = hlo.concatenate([hlo.reshape(vector, start) for start in starts], integer(0))
    last, steps = hlo.add(first, rule.lowering.shape(sizes)), rule.lowering.shape((1,) * len(sizes))
    return hlo.real_dynamic_slice(tensor_type(ShapedArray(sizes, known.dtype)), value, first, last, steps)


def _scan_vjp(
    given: Derivative, *, body: Program, captured: int, carried: int, length: Any, backward: bool
) -> list[Any]:
    fixed, init = given.operands[:captured], given.operands[captured : captured + carried]
    xs = given.operands[captured + carried :]
    # What was carried into each turn is computed once more, and kept; the body is computed again from that, but for
    # what the policies of its checkpoints keep.
    saved = kept_by_policies(body)

    def carrying(carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        known = d.evaluate(body, [*fixed, *carry, *x])
        following = [d.read(known, operand) for operand in body.outputs[:carried]]
        return following, [*carry, *(known[variable] for variable in saved)]

    _, carries = scan(carrying, init, xs, length, backward)
    of_carry, of_fixed, of_xs = (d.differentiable(operands) for operands in (init, fixed, xs))
    ys = [i for i in d.differentiable(given.results) if i >= carried]
    first = carried + len(saved)

    def turn(state: Sequence[Any], parts: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        carry, again, x = parts[:carried], parts[carried:first], parts[first : first + len(xs)]
        known_cotangents = [*state[: len(of_carry)], *parts[first + len(xs) :]]
        cotangents = d.placed(len(given.results), [*of_carry, *ys], known_cotangents)
        known = d.evaluate(body, [*fixed, *carry, *x], dict(zip(saved, again, strict=True)))
        result = d.backward(body, known, cotangents, [True] * len(body.inputs))
        full = [
            d.zeros_like(variable.aval) if gradient is None and d.is_differentiable(variable.aval) else gradient
            for gradient, variable in zip(result, body.inputs, strict=True)
        ]
        sums = [elementwise.add(before, full[i]) for before, i in zip(state[len(of_carry) :], of_fixed, strict=True)]
        return [*(full[captured + i] for i in of_carry), *sums], [full[captured + carried + i] for i in of_xs]

    start = [given.given(i) for i in of_carry] + [d.zeros_like(fixed[i]) for i in of_fixed]
    state, of_parts = scan(turn, start, [*carries, *xs, *map(given.given, ys)], length, not backward)
    numbers = [*(captured + i for i in of_carry), *of_fixed, *(captured + carried + i for i in of_xs)]
    return d.placed(len(given.operands), numbers, [*state, *of_parts])


SCAN: Primitive = Primitive("scan", _scan_infer, _scan_lower, _scan_vjp, several=True, of_keys=True)
