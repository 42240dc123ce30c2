"""Lowering: an exported artifact becomes a module for one platform, with static shapes, without JAX.

A compile action has neither JAX nor the user's code, so neither can change an executable. This module edits `main` and
lets jaxlib refine the shapes, by the calling convention that `jax.export` documents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxlib import _jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo

from stagec.core.sizes.avals import Aval, evaluate_shape, physical
from stagec.stages import mlir
from stagec.stages.branches import inline_known_branches
from stagec.stages.data import ExportedData
from stagec.stages.errors import CannotLower, SizesDoNotFit
from stagec.stages.lowered import Lowered

_ALIAS = "tf.aliasing_output"
"""The attribute of a donated argument with the number of the result that takes its buffer."""
CALLING_CONVENTIONS = (9, 10)
"""The versions of the module's calling convention that `lower_exported` knows.

https://docs.jax.dev/en/latest/export/export.html#calling-convention-versions
"""


def lower_exported(exported: ExportedData, platform: str, bucket: Mapping[str, int]) -> Lowered:
    """Bind an `Exported` to one platform and to a size for each dimension variable.

    bucket: dimension variable -> size; empty when the shapes are static.

    The platform index and the dimensions become constants, and shape refinement makes every type static, as
    `jax.export` documents for a caller of the module
    (https://docs.jax.dev/en/latest/export/export.html#module-calling-convention).
    Raises CannotLower when the platform was not exported, the module has another calling convention or the bucket does
    not fit, SizesDoNotFit when a constraint does not hold.
    """
    if exported.calling_convention_version not in CALLING_CONVENTIONS:
        have = f"{exported.fun_name} has version {exported.calling_convention_version} of the calling convention"
        raise CannotLower(f"{have}, this version of stagec knows {' and '.join(map(str, CALLING_CONVENTIONS))}")
    if platform not in exported.platforms and "platform" not in exported.disabled_safety_checks:
        raise CannotLower(f"{exported.fun_name} was exported for {', '.join(exported.platforms)}, not for {platform}")
    in_avals = tuple(_static(aval, bucket, exported.fun_name) for aval in exported.in_avals)
    with mlir.context() as context, ir.Location.unknown():
        try:
            module = mlir.read_artifact(context, exported.mlir_module_serialized)
            main = mlir.main_function(module)
        except ValueError as error:
            raise CannotLower(f"{exported.fun_name}: {error}") from error
        kept = exported.module_kept_var_idx
        has_index = len(exported.platforms) > 1
        tokens = len(exported.ordered_effects)
        if len(main.regions[0].blocks[0].arguments) != has_index + tokens + len(kept):
            raise CannotLower(f"{exported.fun_name}: its module does not take the arguments that it declares")
        if has_index:
            # Another platform than those exported is compiled as the first: JAX does the same where the check is off.
            index = exported.platforms.index(platform) if platform in exported.platforms else 0
            _bind_first_argument(main, lambda kind: _constant(kind, index))
        # JAX's runtime passes tokens from call to call, to keep effects in order. A call of an artifact is a program by
        # itself: only its arguments can order it against other calls. So each call makes tokens, and drops them.
        for _ in range(tokens):
            _bind_first_argument(main, lambda _: stablehlo.create_token())
        _drop_results(main, tokens)
        _set_argument_shapes(main, [in_avals[i] for i in kept])
        # Without, it is for one platform and has static shapes already: refinement would change nothing.
        if exported.uses_global_constants:
            module = _refine(module, exported.fun_name)
            if has_index:
                inline_known_branches(module)
            main = mlir.main_function(module)
        given_away = _donated(main)
        out_types = [ir.RankedTensorType(t) for t in _type(main).results]
        return Lowered(
            fun_name=exported.fun_name,
            platform=platform,
            in_tree=exported.in_tree,
            flat_in_avals=in_avals,
            out_tree=exported.out_tree,
            flat_out_avals=tuple(
                Aval(physical(aval).dtype, tuple(t.shape))
                for aval, t in zip(exported.out_avals, out_types, strict=True)
            ),
            kept_var_idx=kept,
            # Only the module's attributes say what is donated. An argument that it does not take stays the caller's.
            donated=tuple(i in kept and given_away[kept.index(i)] for i in range(len(in_avals))),
            custom_calls=tuple(sorted(mlir.custom_calls(module))),
            module=mlir.to_bytecode(module),
            nr_devices=exported.nr_devices,
            in_shardings=exported._in_shardings,
            out_shardings=exported._out_shardings,
            in_memory_kinds=_memory_kinds(main, "arg_attrs", len(kept)),
            out_memory_kinds=_memory_kinds(main, "res_attrs", len(out_types)),
            _parameters=exported._parameters,
        )


def _static(aval: Aval, bucket: Mapping[str, int], fun_name: str) -> Aval:
    try:
        shape = evaluate_shape(aval.shape, bucket)
    except ValueError as error:
        raise CannotLower(f"{fun_name}: {aval}: {str(error).partition(': ')[2]}") from error
    return physical(Aval(aval.dtype, shape))


def _constant(kind: ir.Type, value: int) -> Any:
    """Return a constant of a platform index's type; the type has 64 bits if JAX traced with x64 enabled."""
    scalar = ir.RankedTensorType(kind)
    splat = ir.DenseElementsAttr.get_splat(scalar, ir.IntegerAttr.get(scalar.element_type, value))
    return stablehlo.constant(splat)


def _bind_first_argument(main: ir.OpView, make: Callable[[ir.Type], Any]) -> None:
    """Replace the first argument of `main` by the value of its type that `make` makes at the start of the body."""
    block = main.regions[0].blocks[0]
    first = block.arguments[0]
    with ir.InsertionPoint.at_block_begin(block):
        first.replace_all_uses_with(make(first.type))
    if "arg_attrs" in main.attributes:
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(list(ir.ArrayAttr(main.attributes["arg_attrs"]))[1:])
    block.erase_argument(0)
    _update_type(main)


def _drop_results(main: ir.OpView, count: int) -> None:
    """Return from `main` without its first `count` results: the tokens of ordered effects."""
    if not count:
        return
    # XLA knows a donated argument by the number of the result that takes its buffer, so numbers move with the results
    # (`_alias_earlier`). A number that stays would give the buffer to another result.
    end = list(main.regions[0].blocks[0].operations)[-1]
    results = list(end.operands)[count:]
    with ir.InsertionPoint(end):
        func.return_(results)
    end.operation.erase()
    if "res_attrs" in main.attributes:
        main.attributes["res_attrs"] = ir.ArrayAttr.get(list(ir.ArrayAttr(main.attributes["res_attrs"]))[count:])
    if "arg_attrs" in main.attributes:
        attributes = [_alias_earlier(ir.DictAttr(a), count) for a in ir.ArrayAttr(main.attributes["arg_attrs"])]
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)
    arguments = _type(main).inputs
    main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(arguments, [r.type for r in results]))


def _alias_earlier(attributes: ir.DictAttr, count: int) -> ir.DictAttr:
    """Return the attributes of an argument, for a `main` without its first `count` results."""
    named = {attribute.name: attribute.attr for attribute in map(attributes.__getitem__, range(len(attributes)))}
    if _ALIAS in named:
        number = ir.IntegerAttr(named[_ALIAS])
        named[_ALIAS] = ir.IntegerAttr.get(number.type, number.value - count)
    return ir.DictAttr.get(named)


def _set_argument_shapes(main: ir.OpView, avals: list[Aval]) -> None:
    """Give each argument of `main` its static shape; inside, convert back to the type that its users expect."""
    block = main.regions[0].blocks[0]
    with ir.InsertionPoint.at_block_begin(block):
        for argument, aval in zip(list(block.arguments), avals, strict=True):
            dynamic = ir.RankedTensorType(argument.type)
            static = ir.RankedTensorType.get([int(size) for size in aval.shape], dynamic.element_type, dynamic.encoding)
            if static == dynamic:
                continue
            argument.set_type(static)
            converted = stablehlo.ConvertOp(dynamic, argument)
            argument.replace_all_uses_except(converted.result, [converted.operation])
    _update_type(main)


def _update_type(main: ir.OpView) -> None:
    arguments = [argument.type for argument in main.regions[0].blocks[0].arguments]
    main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(arguments, _type(main).results))


def _type(main: ir.OpView) -> ir.FunctionType:
    return ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)


def _refine(module: ir.Module, fun_name: str) -> ir.Module:
    try:
        return ir.Module.parse(_refined(module))
    except Exception as error:  # XLA's status; a shape assertion of the module arrives here too
        violated = _violated(str(error)) or _violated_alone(module)
        if violated:
            raise SizesDoNotFit(f"{fun_name}: {violated}") from error
        status = str(error).strip()
        raise CannotLower(f"{fun_name}: {status.splitlines()[0] if status else 'shape refinement failed'}") from error


def _refined(module: ir.Module) -> bytes:
    return bytes(
        _jax.mlir.refine_polymorphic_shapes(
            mlir.to_bytecode(module), enable_shape_assertions=True, validate_static_shapes=True, enable_shardy=True
        )
    )


_SIZE = re.compile(r"'(\w+)' = (\d+) from specification '([^']+)' for dimension (.+?) \(= (\d+)\)")
"""The form in which shape assertions of `jax.export` name the origin of a size."""


def _violated(status: str) -> str:
    """Return the message of the failed shape assertion in XLA's status, with the sizes and arguments; "" without."""
    assertion = re.search(r"Input shapes do not match .*?(?=\s*Using the following|\s*Obtained dimension|$)", status)
    if not assertion:
        return ""
    sizes = dict.fromkeys(  # the status has it more than once
        f"{name} = {value} ({dimension} = {size}{'' if expression == name else f', which is {expression}'})"
        for name, value, expression, dimension, size in _SIZE.findall(status)
    )
    return ": ".join(filter(None, [assertion.group().rstrip(". "), ", ".join(sizes)]))


def _violated_alone(module: ir.Module) -> str:
    """Return the shape assertion of `main` that does not hold, "" if all hold; the module is unusable after that.

    An operation that depends on a constraint, such as a slice, may end refinement before the assertion. So this leaves
    out the function that `main` calls after the assertions.
    """
    main = mlir.main_function(module)
    block = main.regions[0].blocks[0]
    *operations, end = list(block.operations)
    with ir.InsertionPoint(end):
        func.return_([])
    end.operation.erase()
    for operation in reversed(operations):
        if operation.operation.name == "func.call" and not any(list(r.uses) for r in operation.operation.results):
            operation.operation.erase()
    for name in ("arg_attrs", "res_attrs"):
        if name in main.attributes:
            del main.attributes[name]
    main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(_type(main).inputs, []))
    try:
        _refined(module)
    except Exception as error:  # noqa: BLE001 - as above
        return _violated(str(error))
    return ""


def _memory_kinds(main: ir.OpView, which: str, count: int) -> tuple[str | None, ...]:
    """Return the memory of each array that `main` takes ("arg_attrs") or gives ("res_attrs"); None: the usual one."""
    if which not in main.attributes:
        return (None,) * count
    attributes = [ir.DictAttr(attribute) for attribute in ir.ArrayAttr(main.attributes[which])]
    kinds = [ir.StringAttr(a["mhlo.memory_kind"]).value if "mhlo.memory_kind" in a else "device" for a in attributes]
    return tuple(None if kind == "device" else kind for kind in kinds)


def _donated(main: ir.OpView) -> list[bool]:
    """For each argument of `main`, whether it may be overwritten (https://docs.jax.dev/en/latest/buffer_donation.html)."""
    if "arg_attrs" not in main.attributes:
        return [False] * len(main.regions[0].blocks[0].arguments)
    attributes = [ir.DictAttr(a) for a in ir.ArrayAttr(main.attributes["arg_attrs"])]
    return [_ALIAS in a or "jax.buffer_donor" in a for a in attributes]
