"""Primitives that are programs: a function with a derivative of the user's, one that is computed again, a barrier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxlib.mlir.dialects import stablehlo as hlo

from stagec_arrays import binding, tracing
from stagec_arrays.lowering import IRValue, Rule
from stagec_arrays.primitives import derivatives as d
from stagec_arrays.primitives.derivatives import Derivative
from stagec_arrays.program import Primitive, Program, Variable, pruned
from stagec_arrays.values import ShapedArray

STOP_GRADIENT = Primitive("stop_gradient", lambda x: x, lambda rule, x: x, of_keys=True)


def stopped(x: Any) -> Any:
    """Return x, whose derivative is zero."""
    return binding.bind(STOP_GRADIENT, x)


def _inline(rule: Rule, *values: IRValue, program: Program, **_: Any) -> list[IRValue]:
    return rule.lowering.program(program, values)


def _results(*avals: ShapedArray, program: Program, **_: Any) -> list[ShapedArray]:
    return program.out_avals


@dataclass(frozen=True, eq=False)
class DerivativeOfUser:
    """The rule of a `custom_vjp` for cotangents, as a parameter of its equation: equal only to itself.

    name: of the function whose derivative it is: its text in programs.
    captured: how many of the operands are values that the function closes over, which get no cotangent.
    """

    name: str
    derive: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
    captured: int

    def __str__(self) -> str:
        return self.name


def _custom_vjp(given: Derivative, *, program: Program, derivative: DerivativeOfUser) -> list[Any]:
    cotangents = [given.given(i) for i in range(len(given.results))]
    result = derivative.derive(given.operands[derivative.captured :], cotangents)
    return [*[None] * derivative.captured, *result]


CUSTOM_VJP = Primitive("custom_vjp", _results, _inline, _custom_vjp, several=True, of_keys=True)


def call_custom_vjp(
    name: str,
    function: Callable[..., Sequence[Any]],
    derive: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
    values: Sequence[Any],
) -> list[Any]:
    """Call a function of arrays whose derivative is `derive`: of operands and cotangents, the operands' cotangents.

    name: of the function, in a program's text.
    """
    program, captured = _traced(function, values)
    of_user = DerivativeOfUser(name, derive, len(captured))
    result: list[Any] = binding.bind(CUSTOM_VJP, *captured, *values, program=program, derivative=of_user)
    return result


def _traced(function: Callable[..., Sequence[Any]], values: Sequence[Any]) -> tuple[Program, Sequence[Any]]:
    traced = tracing.trace(function, [binding.aval(value) for value in values])
    return pruned(traced.program), traced.captured


def _barrier_vjp(derivative: Derivative) -> list[Any]:
    wanted = d.differentiable(derivative.results)
    return d.placed(len(derivative.results), wanted, binding.bind(BARRIER, *map(derivative.given, wanted)))


BARRIER: Primitive = Primitive(
    "optimization_barrier",
    lambda *avals: list(avals),
    lambda rule, *values: list(hlo.OptimizationBarrierOp(list(values)).results),
    _barrier_vjp,
    several=True,
    of_keys=True,
)


NAME: Primitive = Primitive(
    "name",
    lambda x, *, name: x,
    lambda rule, x, *, name: x,
    lambda derivative, *, name: [derivative.cotangent],
    of_keys=True,
)


def named(x: Any, name: str) -> Any:
    """Return x, which has a name to the policies of checkpoints."""
    return binding.bind(NAME, x, name=name)


def _checkpoint_vjp(derivative: Derivative, *, program: Program, apart: bool, kept: int) -> list[Any]:
    first = len(program.outputs) - kept
    values = [*derivative.operands, *derivative.results[first:]]
    # The barrier keeps XLA from using what was computed before.
    values = binding.bind(BARRIER, *values) if apart else values
    count = len(program.inputs)
    kept_values: dict[Any, Any] = dict(zip(program.outputs[first:], values[count:], strict=True))
    known = d.evaluate(program, values[:count], kept_values)
    return d.backward(program, known, derivative.cotangents, [True] * len(program.inputs))


CHECKPOINT = Primitive("checkpoint", _results, _inline, _checkpoint_vjp, several=True, of_keys=True)


def kept_by_policies(program: Program) -> list[Variable]:
    """Return the variables whose values spare a derivative what the policies of a program's checkpoints keep.

    Those are also what others use of a checkpoint, which is not evaluated then.
    """
    used = {operand for equation in program.equations for operand in equation.inputs}
    result: list[Variable] = []
    for equation in program.equations:
        if equation.primitive is CHECKPOINT and (kept := equation.params["kept"]):
            first = len(equation.outputs) - kept
            result += [output for i, output in enumerate(equation.outputs) if i >= first or output in used]
    return result


def call_checkpointed(
    function: Callable[..., Sequence[Any]],
    values: Sequence[Any],
    apart: bool = True,
    policy: Callable[..., Any] | None = None,
) -> list[Any]:
    """Call a function that is computed again for its derivative.

    apart: whether the compiler may not use what was computed the first time. policy: says of an operation (its
    primitive, avals of operands, parameters by name) whether its results are kept for the derivative; they become
    results too, after the function's. Raises TypeError if it does not return a bool.
    """
    program, captured = _traced(function, values)
    kept = [] if policy is None else _kept(program, policy)
    program = Program(program.inputs, program.equations, [*program.outputs, *kept], program.constants)
    result = binding.bind(CHECKPOINT, *captured, *values, program=program, apart=apart, kept=len(kept))
    return list(result[: len(result) - len(kept)])


def _kept(program: Program, policy: Callable[..., Any]) -> list[Variable]:
    result: list[Variable] = []
    for equation in program.equations:
        answer = policy(equation.primitive, *(variable.aval for variable in equation.inputs), **equation.params)
        if not isinstance(answer, bool | np.bool_):
            what = f"the policy says {answer!r} of {equation.primitive.name}"
            raise TypeError(f"checkpoint: {what}; write True where its results are kept, and False elsewhere")
        result += equation.outputs if answer else []
    return result
