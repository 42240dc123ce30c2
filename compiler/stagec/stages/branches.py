"""Choose the branches of one platform in a module that was lowered for several.

JAX lowers differences between platforms to a `case` over the platform index, a constant by now. XLA:CPU folds it;
XLA:TPU and XLA:GPU leave a conditional in the program where it lies in a part that is partitioned by hand
(`shard_map`).
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir


def inline_known_branches(module: ir.Module) -> None:
    """Replace every `stablehlo.case` with a constant index by the branch that runs."""
    while _inline_below(module.operation):
        pass


def _inline_below(operation: Any) -> bool:
    """Inline the branches of known cases; return whether there were any, because a branch may contain branches."""
    inlined = False
    for block in [block for region in operation.regions for block in region.blocks]:
        for inner in list(block.operations):
            index = _known(inner.operands[0]) if inner.operation.name == "stablehlo.case" else None
            if index is None:
                inlined |= _inline_below(inner.operation)
            else:
                _inline(inner, index)
                inlined = True
    return inlined


def _inline(case: Any, index: int) -> None:
    """Replace a `case` by one of its branches. An index of no branch stands for the last one (StableHLO, case)."""
    regions = list(case.regions)
    *body, end = list((regions[index] if 0 <= index < len(regions) else regions[-1]).blocks[0].operations)
    for operation in body:
        operation.operation.move_before(case.operation)
    for result, value in zip(case.results, end.operands, strict=True):
        result.replace_all_uses_with(value)
    case.operation.erase()


def _known(value: Any) -> int | None:
    """Return the value of a scalar constant; None for other values."""
    owner: Any = value.owner
    if isinstance(owner, ir.Block):
        parent: Any = owner.owner
        if parent.operation.name != "sdy.manual_computation":
            return None
        return _known(parent.operands[ir.BlockArgument(value).arg_number])
    if owner.name == "stablehlo.convert":  # the index has 64 bits where JAX traced with x64 enabled, a case takes 32
        return _known(owner.operands[0])
    if owner.name != "stablehlo.constant":
        return None
    numbers = ir.DenseIntElementsAttr(owner.attributes["value"])
    return int(numbers[0]) if len(numbers) == 1 else None
