"""`jax.export.export`, also of functions with custom calls that it refuses at first; references are refused by name."""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
from jax._src.state.types import AbstractRef

from stagec.core.trees.tree import Tree
from stagec.frontends.jax import wholes
from stagec.frontends.jax.advice import REFERENCE
from stagec.stages.exported import Exported


def export(
    jitted: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    platforms: Sequence[str],
    disabled: Sequence[jax.export.DisabledSafetyCheck],
    allow: Callable[[Sequence[str]], None] | None,
) -> jax.export.Exported:
    """Export a function under `jax.jit`; JAX keeps the trace, and does not trace again.

    disabled: JAX's checks. allow: is given the names of custom calls that JAX promises nothing for; it raises what
    is to be said of one that the artifact must not have. None: JAX refuses them. Raises the errors of JAX, and
    TypeError for a function of which `has_references` is true.
    """

    def attempt(checks: Sequence[jax.export.DisabledSafetyCheck]) -> jax.export.Exported:
        exporter = jax.export.export(jitted, platforms=list(platforms), disabled_checks=list(checks))
        try:
            exported = exporter(*args, **kwargs)
        except AssertionError as error:  # of JAX 0.11.2 and newer, without a word
            if "gpu_lowering" not in {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}:
                raise
            what = f"JAX {jax.__version__} does not lower a pl.pallas_call with CompilerParams of Mosaic GPU"
            write = "write jax.experimental.pallas.mosaic_gpu.kernel, or leave compiler_params out, for Triton"
            raise NotImplementedError(f"{what}: {write}") from error
        return dataclasses.replace(exported, in_tree=wholes.original(exported.in_tree))

    traced = jitted.trace(*args, **kwargs)
    if has_references(traced):
        raise TypeError(f"{traced.fun_name} takes a jax.Ref (mutable array reference), or closes over one; {REFERENCE}")
    try:
        return attempt(disabled)
    except ValueError as error:
        calls = sorted(set(re.findall(r'stablehlo\.custom_call @"?([^"(]+)', str(error))))
        if not calls or allow is None:
            raise
        allow(calls)
    return attempt([*disabled, *map(jax.export.DisabledSafetyCheck.custom_call, calls)])


def has_references(traced: Any) -> bool:
    """Whether a traced program takes a `jax.Ref`, or closes over one: only the process that traced it can run it."""
    closed_over = [*traced.jaxpr.consts, *getattr(traced, "_consts", ())]  # in the second since JAX 0.10.2
    takes = any(isinstance(aval, AbstractRef) for aval in traced.jaxpr.in_avals)
    return takes or any(isinstance(value, jax.Ref) for value in closed_over)


def flat(exported: Exported) -> jax.export.Exported:
    """Return an exported function as JAX's, of flat arguments and results: its types need not be registered here."""
    orders, derivative = 0, exported
    while derivative.has_vjp():
        orders, derivative = orders + 1, derivative.vjp()
    flat_in, flat_out = (
        Tree("tuple", (Tree("leaf"),) * len(avals)) for avals in (exported.in_avals, exported.out_avals)
    )
    flat = dataclasses.replace(exported, in_tree=Tree("tuple", (flat_in, Tree("dict"))), out_tree=flat_out)
    return jax.export.deserialize(bytearray(flat.serialize(orders)))
