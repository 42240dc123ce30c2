"""Layouts: the order of an array's elements in the memory of a device.

A layout is written as XLA writes it: "{0,1}" has the dimensions from the fastest to the slowest, so it is a matrix by
columns (https://openxla.org/xla/shapes). None is the usual layout of the platform. Arrays come to a device in that one;
if a program wants another, XLA makes a copy, as in JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib import _jax

from stagec.core.sizes.avals import mlir_name
from stagec.pjrt import clients, turns
from stagec.pjrt.shardings import Sharding


def of_executable(
    ask: Callable[[], Sequence[_jax.PjRtLayout]],
    arrays: Sequence[tuple[tuple[int, ...], np.dtype[Any]]],
    shardings: Sequence[Sharding],
) -> list[str | None]:
    """Return the layouts of the parameters or results of an executable.

    ask: its method. arrays: shape and dtype of each, whole. shardings: of each.
    """
    try:
        wanted = ask()
    except _jax.JaxRuntimeError:  # a plugin that does not say has none but the usual ones, as in JAX
        return [None] * len(arrays)
    return [_unusual(layout, *array, of) for layout, array, of in zip(wanted, arrays, shardings, strict=True)]


def of_array(array: _jax.ArrayImpl, shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Sharding) -> str | None:
    """Return the layout of an array of jaxlib's. shape, dtype, sharding: its own, which it may not know without JAX."""
    try:
        layout = array._pjrt_layout
    except _jax.JaxRuntimeError:  # a plugin that does not say
        return None
    return _unusual(layout, shape, dtype, sharding)


def _unusual(layout: _jax.PjRtLayout, shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Sharding) -> str | None:
    device = sharding.devices[0]
    if device.platform == "cpu" and str(layout) == _by_rows(len(shape)):
        return None
    actual, usual = (
        candidate._xla_layout()
        for candidate in (layout, device.client.get_default_layout(dtype, sharding.shard_shape(shape), device))
    )
    # XLA writes the bits of an element if it is smaller than a byte; the usual layout omits them.
    alike = not actual.tiling() and actual.minor_to_major() == usual.minor_to_major()
    return None if alike or str(actual) == str(usual) else str(layout)


@functools.cache
def _by_rows(rank: int) -> str:
    return f"{{{','.join(map(str, reversed(range(rank))))}}}"


@functools.lru_cache(maxsize=256)
def copying(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    before: str | None,
    after: str | None,
    devices: tuple[_jax.Device, ...],
) -> _jax.LoadedExecutable:
    """Return a program that copies a part of an array on each of `devices` from one layout to another.

    shape: of the part.
    """
    kind = f"tensor<{'x'.join([*map(str, shape), mlir_name(dtype.name)])}>"

    takes, gives = (f'{kind} {{mhlo.layout_mode = "{layout or "default"}"}}' for layout in (before, after))
    module = f"func.func public @main(%x: {takes}) -> ({gives}) {{ return %x : {kind} }}"
    options = clients.compile_options([device.id for device in devices], replicated=True)
    with turns.for_this_machine():
        return devices[0].client.compile_and_load(module, _jax.DeviceList(devices), options)
