"""What of JAX, around a call and about its arguments, a program depends on."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax._src import config, core, mesh

from stagec.frontends.common.parameters import Arguments

_DEVICES: Any = (vars(config) | vars(mesh))["device_context"]
"""The concrete mesh around a call; in `config` before JAX 0.12."""
_ON_HOST = frozenset({np.ndarray, bool, int, float, complex, *np.sctypeDict.values()})
"""Types of values that are not on a device."""
BEYOND = (
    *("jax_default_prng_impl", "jax_enable_custom_prng", "jax_legacy_prng_key", "jax_bcoo_cusparse_lowering"),
    *("jax_ragged_dot_use_ragged_dot_instruction", "jax_refs_to_pins", "jax_mosaic_allow_hlo"),
    *("jax_pallas_poison_buffers", "jax_pallas_auto_assign_collective_ids", "jax_mosaic_unzip_debug_locations"),
    "jax_use_rgv3",
)
"""Settings that change a program, and that JAX leaves out of its trace context, of all releases."""


DISABLED, _NANS, _INFS = (
    config.config._value_holders[name] for name in ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs")
)
"""Settings under which JAX runs the function: without compilation, or to look for numbers and to name the operation."""
_HOLDERS = [config.config._value_holders[name] for name in BEYOND if hasattr(jax.config, name)]


def arguments(fun: Callable[..., Any], numbers: Any, names: Any) -> Arguments:
    """Return the arguments that options of `jax.jit` name, by numbers and by names, as this JAX counts them."""
    return Arguments.of(fun, numbers, names, by_signature=jax.__version_info__ >= (0, 12))


def beyond() -> Hashable:
    """Return the values of `BEYOND`, here and now."""
    return tuple([holder.value for holder in _HOLDERS])


def within() -> bool:
    """Whether a call is part of a trace around it, or runs in a mode without compilation."""
    return not core.trace_state_clean() or bool(DISABLED.value or _NANS.value or _INFS.value)


def settings() -> Hashable:
    """Return everything that changes a program and is neither an argument nor an option."""
    return config.trace_context(), _DEVICES.value, beyond()


def abstract(leaf: Any) -> Hashable:
    """Return the properties of an argument that a program depends on. Raises TypeError for no array or number."""
    aval = jax.typeof(leaf)
    if type(leaf) not in _ON_HOST:
        if isinstance(leaf, jax.Array):  # to ask it takes a microsecond
            return aval, leaf.sharding if leaf.committed else None
        if isinstance(leaf, jax.Ref):  # another program than that of an array with its shape
            return (aval,)
    return aval.shape, aval.dtype, aval.weak_type
