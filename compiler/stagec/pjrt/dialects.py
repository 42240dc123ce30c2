"""MLIR's context for JAX's modules."""

from __future__ import annotations

import threading

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


class _Kept(threading.local):
    context: ir.Context | None = None
    uses = 0


_KEPT = _Kept()
_MOST_USES = 256


def kept_context() -> ir.Context:
    """Return this thread's context, for modules without large constants: it keeps types, attributes and locations.

    Making a context takes as long as writing a module of a hundred operations, and the first module in one as long
    again. After some hundred uses it is a new one, so that a process does not grow without end.
    """
    if _KEPT.context is None or _KEPT.uses == _MOST_USES:
        _KEPT.context, _KEPT.uses = make_context(), 0
        _KEPT.context.enable_multithreading(False)  # there is one function in a module
    _KEPT.uses += 1
    return _KEPT.context
