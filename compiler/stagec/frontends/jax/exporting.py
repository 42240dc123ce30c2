"""`jax.export.export`, of functions with custom calls that it refuses at first."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export

from stagec.core.trees.tree import Tree
from stagec.frontends.jax import wholes
from stagec.stages.exported import Exported


def export(
    jitted: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    platforms: Sequence[str],
    disabled: Sequence[jax.export.DisabledSafetyCheck],
    allow: Callable[[Sequence[str]], None],
) -> jax.export.Exported:
    """Export a function under `jax.jit`; JAX keeps the trace, and does not trace again.

    disabled: JAX's checks. allow: is given the names of custom calls that JAX promises nothing for; it raises what
    is to be said of one that the artifact must not have. Raises the errors of JAX.
    """

    def attempt(checks: Sequence[jax.export.DisabledSafetyCheck]) -> jax.export.Exported:
        exported = jax.export.export(jitted, platforms=list(platforms), disabled_checks=list(checks))(*args, **kwargs)
        return dataclasses.replace(exported, in_tree=wholes.original(exported.in_tree))

    try:
        return attempt(disabled)
    except ValueError as error:
        calls = sorted(set(re.findall(r'stablehlo\.custom_call @"?([^"(]+)', str(error))))
        if not calls:
            raise
        allow(calls)
    return attempt([*disabled, *map(jax.export.DisabledSafetyCheck.custom_call, calls)])


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
