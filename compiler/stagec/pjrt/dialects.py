"""MLIR's context for JAX's modules."""

from __future__ import annotations

from jaxlib.mlir import ir

# Not jaxlib.mlir.dialects.mhlo: its classes are 8,000 objects that nobody here uses, as many as all modules of ours.
from jaxlib.mlir._mlir_libs import _jax_mlir_ext, _mlirHlo as mhlo
from jaxlib.mlir.dialects import chlo, sdy, stablehlo


def make_context() -> ir.Context:
    """Return a new context with every dialect that a module of `jax.export` may use."""
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context = ir.Context()
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    sdy.register_dialect(context)
    mhlo.register_mhlo_dialect(context)
    chlo.register_dialect(context)
    stablehlo.register_dialect(context)
    return context
