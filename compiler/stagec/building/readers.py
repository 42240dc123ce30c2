"""An artifact for the oldest jaxlib that a manifest names: in the version of StableHLO that it reads."""

from __future__ import annotations

import dataclasses

from stagec.core.builds.specs import FunctionSpec
from stagec.stages import mlir
from stagec.stages.exported import Exported


def readable(spec: FunctionSpec, serialized: bytes) -> bytes:
    """Return a serialized `Exported` in the version `spec.stablehlo`; the same bytes if it is not newer.

    Raises StagecError if an operation has no form in that version.
    """
    if spec.stablehlo is None:
        return serialized
    exported = derivative = Exported.deserialize(serialized)
    orders = 0
    while derivative.has_vjp():
        orders, derivative = orders + 1, derivative.vjp()
    try:
        older = _older(exported, spec.stablehlo)
    except ValueError as error:
        what = f"it has no form in StableHLO {spec.stablehlo}, the newest that the oldest jaxlib of its targets reads: "
        write = "leave that release out of jaxlib, or take a lock with its jax and jaxlib"
        raise spec.problem("", what + str(error).partition("\n")[0], write) from error
    return serialized if older == exported else older.serialize(orders)


def _older(exported: Exported, version: str) -> Exported:
    module = mlir.not_newer(exported.mlir_module_serialized, version)
    vjp = _older(exported.vjp(), version) if exported.has_vjp() else None
    return dataclasses.replace(exported, mlir_module_serialized=module, _vjp=vjp)
