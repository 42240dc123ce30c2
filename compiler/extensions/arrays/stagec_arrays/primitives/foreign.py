"""Calls of functions outside XLA: LAPACK's on CPUs, those of NVIDIA's and AMD's solvers, and XLA's own for TPUs.

Only names that JAX guarantees (https://docs.jax.dev/en/latest/export/export.html#compatibility-guarantees-for-custom-calls).
Operands, attributes and layouts are those of `jax/_src/lax/linalg.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy, stablehlo as hlo

from stagec_arrays import dims, dtypes
from stagec_arrays.dtypes import COMPLEX, KINDS, DType
from stagec_arrays.lowering import IRValue, Rule, compare, tensor_type
from stagec_arrays.values import ShapedArray, shown

Attributes = Mapping[str, str | bool | int]
"""Of a call, by name: a letter as LAPACK has them, a bool, or a number of 8 bits."""

_NONE: Attributes = MappingProxyType({})
LETTERS: Mapping[DType, str] = {
    dtypes.float32: "s",
    dtypes.float64: "d",
    dtypes.complex64: "c",
    dtypes.complex128: "z",
}
"""The dtypes of matrices that can be factorized, each with LAPACK's letter."""
LIBRARIES: Mapping[str, str] = {"cuda": "cu", "rocm": "hip"}


def require_matrices(name: str, x: ShapedArray, square: bool = False) -> None:
    """Raise TypeError if the dtype of x is not in `LETTERS`, ValueError if x does not have (square) matrices."""
    if x.dtype not in LETTERS:
        wanted = "float32, float64, complex64 or complex128"
        raise TypeError(f"{name}: expected matrices of {wanted}, not of {x.dtype}; convert them with astype")
    if len(x.shape) < 2:
        raise ValueError(f"{name}: expected an array of 2 dimensions or more, not of shape {shown(x.shape)}")
    if square and x.shape[-1] != x.shape[-2]:
        raise ValueError(f"{name}: expected square matrices, not ones of shape {shown(x.shape[-2:])}")


def solver(
    rule: Rule,
    routine: str,
    operands: Sequence[IRValue],
    results: Sequence[ShapedArray],
    lapack: Attributes = _NONE,
    device: Attributes = _NONE,
) -> list[IRValue]:
    """Call LAPACK's routine, or an accelerator's, on the rule's operands; the first result has the first one's memory.

    lapack, device: attributes of the call, of LAPACK and of the others.
    """
    (platform,) = rule.platforms
    dtype = rule.inputs[0].dtype
    if platform == "cpu":
        if KINDS[dtype] == COMPLEX:
            routine = {"syevd": "heevd", "orgqr": "ungqr"}.get(routine, routine)
        return ffi_call(rule, f"lapack_{LETTERS[dtype]}{routine}_ffi", operands, rule.inputs, results, lapack)
    name = f"{LIBRARIES[platform]}solver_{routine}_ffi"
    return ffi_call(rule, name, operands, rule.inputs, results, device)


def ffi_call(
    rule: Rule,
    name: str,
    operands: Sequence[IRValue],
    avals: Sequence[ShapedArray],
    results: Sequence[ShapedArray],
    attributes: Attributes,
    aliased: int | None = 0,
    core: int = 2,
    column_major: bool = True,
) -> list[IRValue]:
    """Call a function by XLA's foreign function interface, and return its results.

    avals: of the operands. aliased: which operand is the first result's memory. core: how many axes are not batch axes.
    column_major: whether matrices lie column by column, as LAPACK's do.
    """
    rank = max(len(aval.shape) for aval in avals)
    by_columns = (rank - 2, rank - 1, *range(rank - 3, -1, -1))

    def layout(aval: ShapedArray) -> tuple[int, ...]:
        mine = len(aval.shape)
        return by_columns if column_major and mine == rank else tuple(range(mine - 1, -1, -1))

    given: dict[str, ir.Attribute] = {
        "backend_config": ir.StringAttr.get(""),
        "mhlo.backend_config": ir.DictAttr.get({key: _attribute(value) for key, value in attributes.items()}),
    }
    if all(dims.is_static(aval.shape) for aval in (*avals, *results)):
        batch = ir.StringAttr.get(str(rank - core))
        given["mhlo.frontend_attributes"] = ir.DictAttr.get({"num_batch_dims": batch})
        if rule.lowering.mesh:  # JAX writes it always
            given["sdy.sharding_rule"] = _sharding_rule(avals, results, rank - core)
    if aliased is not None:
        where = [0] if len(results) > 1 else []
        alias = hlo.OutputOperandAlias.get(output_tuple_indices=where, operand_index=aliased, operand_tuple_indices=[])
        given["output_operand_aliases"] = ir.ArrayAttr.get([alias])
    layouts = [layout(aval) for aval in avals], [layout(result) for result in results]
    return _call(rule, name, operands, results, given, 1, layouts)


def _sharding_rule(avals: Sequence[ShapedArray], results: Sequence[ShapedArray], batch: int) -> ir.Attribute:
    """Return how a call may be split over a mesh: along the first axes, which are a batch.

    Each other axis stands for itself:
    https://github.com/openxla/shardy/blob/main/docs/sdy_dialect.md#opshardingruleattr
    """
    sizes = list(avals[0].shape[:batch])

    def mapping(aval: ShapedArray) -> Any:
        axes = list(range(batch)) if len(aval.shape) >= batch else []  # what nobody asked for has no batch
        for size in aval.shape[batch:]:
            axes.append(len(sizes))
            sizes.append(size)
        return sdy.TensorMappingAttr.get([sdy.DimMappingAttr.get([axis]) for axis in axes])

    operands, result = (list(map(mapping, some)) for some in (avals, results))
    return sdy.OpShardingRuleAttr.get(sizes, operands, result, is_custom=True)


def xla_call(
    rule: Rule, name: str, operands: Sequence[IRValue], config: str = "", api_version: int = 1
) -> list[IRValue]:
    """Call a function that XLA's compiler for TPUs has, and return its results."""
    return _call(rule, name, operands, rule.outputs, {"backend_config": ir.StringAttr.get(config)}, api_version)


def _call(
    rule: Rule,
    name: str,
    operands: Sequence[IRValue],
    results: Sequence[ShapedArray],
    attributes: dict[str, ir.Attribute],
    api_version: int,
    layouts: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] | None = None,
) -> list[IRValue]:
    attributes = {
        **attributes,
        "call_target_name": ir.StringAttr.get(name),
        "has_side_effect": ir.BoolAttr.get(False),
        "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), api_version),
        "called_computations": ir.ArrayAttr.get([]),
    }
    sizes: list[IRValue] = []
    if not all(dims.is_static(result.shape) for result in results):
        sizes = [rule.lowering.shape(result.shape) for result in results]
        places: Any = np.arange(len(operands), len(operands) + len(sizes), dtype=np.int64)
        attributes["indices_of_shape_operands"] = ir.DenseIntElementsAttr.get(places)
    if layouts is not None:
        attributes["operand_layouts"] = _layouts([*layouts[0], *[(0,)] * len(sizes)])
        attributes["result_layouts"] = _layouts(layouts[1])
    call: Any = hlo.CustomCallOp
    kinds = [tensor_type(result) for result in results]
    operation = call.build_generic(results=kinds, operands=[*operands, *sizes], attributes=attributes)
    return list(operation.results)


def _layouts(layouts: Sequence[tuple[int, ...]]) -> ir.Attribute:
    index = ir.IndexType.get()
    result: list[Any] = [np.asarray(layout, np.int64) for layout in layouts]
    return ir.ArrayAttr.get([ir.DenseIntElementsAttr.get(layout, type=index) for layout in result])


def _attribute(value: str | bool | int) -> ir.Attribute:
    if isinstance(value, bool):
        return ir.BoolAttr.get(value)
    return ir.IntegerAttr.get(ir.IntegerType.get_unsigned(8), ord(value) if isinstance(value, str) else value)


def info_of(x: ShapedArray) -> ShapedArray:
    """Return the aval of a routine's status for each matrix of x: 0 for success."""
    return ShapedArray(x.shape[:-2], dtypes.int32)


def nan_where_failed(rule: Rule, info: IRValue, x: IRValue, aval: ShapedArray, positive_fails: bool = True) -> IRValue:
    """Return a result of `aval` with NaN for each matrix without factors, as JAX does.

    info: the routine's status. positive_fails: whether a number over 0 means failure too.
    """
    batch = ShapedArray(aval.shape[: len(rule.inputs[0].shape) - 2], dtypes.int32)
    fine = compare(info, rule.full(0, batch), "EQ" if positive_fails else "GE", dtypes.int32)
    axes = range(len(batch.shape))
    where = rule.broadcast(fine, ShapedArray(batch.shape, dtypes.bool_), aval.shape, axes)
    nan = complex(np.nan, np.nan) if KINDS[aval.dtype] == COMPLEX else np.nan
    return hlo.select(where, x, rule.full(nan, aval))
