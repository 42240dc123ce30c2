"""Differences between the versions of jaxlib that stagec works with: its internal interface moves with each release.

Tested whole: 0.10.2 and 0.12.0.1. Of each release, with each Python, one executable was made and run
(building/examination.py); a build does the same with another one before it compiles. jaxlib is imported when it is
asked for, not with this module: a compile command sets its environment first.
"""

from __future__ import annotations

import functools
from typing import Any

OLDEST, BEFORE = (0, 10, 1), (0, 13)
"""The versions that stagec was tested with: from OLDEST, and before BEFORE."""


def version() -> str:
    """Return the version of the jaxlib that is installed."""
    import jaxlib.version

    return str(jaxlib.version.__version__)


@functools.cache
def build_id() -> str:
    """Return the build-id of the installed jaxlib's library, which tells builds of one version apart."""
    from stagec.core.builds.platforms import PLATFORMS
    from stagec.core.data import elf  # most processes ask for no build
    from stagec.pjrt import packages

    where = packages.folder("jaxlib")
    assert where is not None
    with elf.opened(where.parent / PLATFORMS["cpu"].files[0]) as file:
        return file.build_id


def numbers() -> tuple[int, ...]:
    """Return the version as numbers: (0, 10, 1)."""
    return tuple(int(part) for part in version().split(".")[:3] if part.isdigit())


def hlo() -> Any:
    """Return the module of jaxlib that has HloModule: since 0.10.2 its own."""
    import importlib

    return importlib.import_module("jaxlib._jax" if numbers() < (0, 10, 2) else "jaxlib._hlo")


def result_handler(aval: Any, sharding: Any, committed: bool = True) -> Any:
    """Return a function from an output buffer to an array of `aval` and `sharding`. committed: JAX does not move it."""
    from jaxlib import _jax

    # Before 0.11.2 a parameter turns off the check of both against jax's own classes; later there is no such parameter.
    if numbers() < (0, 11, 2):
        return _jax.array_result_handler(aval, sharding, committed, True)
    return _jax.array_result_handler(aval, sharding, committed)


def from_dlpack(capsule: Any, device: Any, stream: int | None, kind: int) -> Any:
    """Return a buffer that shares the memory of DLPack's capsule. kind: DLPack's number of the kind of device."""
    from jaxlib import _jax

    given = capsule, device, stream, False
    # JAX asks for jaxlib's extension version 467: 0.10.2 knows memory of the host that is pinned for a GPU.
    return _jax.dlpack_managed_tensor_to_buffer(*given, *((kind,) if numbers() >= (0, 10, 2) else ()))
