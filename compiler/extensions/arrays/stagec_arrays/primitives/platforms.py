"""Rules of lowering that depend on the platform, and rules that are functions of primitives."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from stagec_arrays import tracing
from stagec_arrays.lowering import IRValue, Rule, tensor_type
from stagec_arrays.program import Program, pruned, subprograms
from stagec_arrays.values import ShapedArray

Lower = Callable[..., Any]
"""The type of `Primitive.lower`: from a rule, MLIR values and parameters to a value or a list of values."""


def by_platform(default: Lower | str, **rules: Lower) -> Lower:
    """Return the lowering of a primitive that has one for each platform: cpu, cuda, rocm, tpu.

    default: for the platforms that are not named; a string says why there is none.
    A module for several platforms has all, and chooses by the index of the platform on which it runs, as `jax.export`
    does. A rule here is called with a `Rule` of one platform. Raises ValueError if a platform has none.
    """

    def lower(rule: Rule, *values: IRValue, **params: Any) -> Any:
        chosen: dict[str, Lower] = {}
        for platform in rule.platforms:
            chosen_rule = rules.get(platform, default)
            if isinstance(chosen_rule, str):
                raise ValueError(f"{rule.location}: {rule.name} cannot be lowered for {platform}: {chosen_rule}")
            chosen[platform] = chosen_rule
        if len(chosen) == 1:
            return next(iter(chosen.values()))(rule, *values, **params)
        index: Any = rule.lowering.platform_index
        operation = hlo.CaseOp(list(map(tensor_type, rule.outputs)), index, len(chosen))
        single = True
        for number, (platform, lowering) in enumerate(chosen.items()):
            with ir.InsertionPoint(rule.block(operation, number, [])):
                results = lowering(_on(rule, platform), *values, **params)
                single = not isinstance(results, list)
                hlo.return_([results] if single else results)
        return operation.results[0] if single else list(operation.results)

    return lower


def _on(rule: Rule, platform: str) -> Rule:
    """Return a rule as it is on one platform."""
    result = copy.copy(rule)
    result.lowering = copy.copy(rule.lowering)
    result.lowering.platforms, result.lowering.platform_index = (platform,), None
    return result


def composed(function: Callable[..., Any]) -> Lower:
    """Return the lowering of a primitive that is a function of others, which takes the same operands and parameters."""

    def lower(rule: Rule, *values: IRValue, **params: Any) -> Any:
        return inline(rule, functools.partial(function, **params), values, rule.inputs)

    return lower


def inline(
    rule: Rule, function: Callable[..., Any], values: Sequence[IRValue], avals: Sequence[ShapedArray]
) -> IRValue | list[IRValue]:
    """Lower a function of primitives where a rule is, on values of these avals, and return its results."""
    single = False

    def flat(*operands: Any) -> Sequence[Any]:
        nonlocal single
        result = function(*operands)
        single = not isinstance(result, list | tuple)
        return [result] if single else result

    program = pruned(tracing.trace(flat, avals, rule.name, apart=True).program)
    _forget_locations(program)
    results = rule.lowering.program(program, values)
    return results[0] if single else results


def _forget_locations(program: Program) -> None:
    """Operations of a rule are where the user wrote the function that has it, and not where it was lowered."""
    for equation in program.equations:
        equation.traceback = None
        for inner in subprograms(equation):
            _forget_locations(inner)
