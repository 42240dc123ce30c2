"""Custom calls: the functions outside XLA that a program names, and who provides them.

Every target belongs to one of three classes. GUARANTEED: JAX promises that later versions keep it for serialized
programs (https://docs.jax.dev/en/latest/export/export.html#compatibility-guarantees-for-custom-calls). TOOLCHAIN: this
jaxlib, or the XLA in it, has it, and promises nothing for others. UNKNOWN: somebody else has to provide it, so a
manifest must allow it by name (`allow_custom_calls`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from stagec.bundle.index import UNKNOWN_CALL

UNKNOWN = UNKNOWN_CALL
GUARANTEED, TOOLCHAIN = "guaranteed", "same toolchain"

_BUILTIN = frozenset({"PadToStatic", "SliceToDynamic", "TopK"})
"""Custom calls that XLA:CPU itself emits and carries."""
_OF_COMPILERS = frozenset({"LayoutConstraint", "__gpu$xla.gpu.triton"})
"""Custom calls that XLA's compilers replace: they state an array's layout, or a kernel of Triton."""

_SPARSE = "cpu_csr_sparse_"
"""How the names of jaxlib's products with sparse matrices begin."""

# The list in jax/_src/export/_export.py; tests/frontends hold the two against each other.
_LAPACK = (
    *("potrf", "geqrf", "gesdd", "getrf", "gehrd", "gees", "geev", "trsm", "gtsv"),
    *("orgqr", "ungqr", "syevd", "heevd", "sytrd", "hetrd"),
)
_COMPLEX_ONLY, _REAL_ONLY = frozenset({"ungqr", "heevd", "hetrd"}), frozenset({"orgqr", "syevd", "sytrd"})
_GUARANTEED = frozenset(
    {
        f"lapack_{letter}{routine}_ffi"
        for routine in _LAPACK
        for letter in ("" if routine in _COMPLEX_ONLY else "sd") + ("" if routine in _REAL_ONLY else "cz")
    }
    | {
        f"{library}_{routine}_ffi"
        for library in ("cusolver", "hipsolver")
        for routine in ("getrf", "geqrf", "orgqr", "potrf", "syevd", "gesvd", "gesvdj", "sytrd")
    }
    | {"cu_lu_pivots_to_permutation", "hip_lu_pivots_to_permutation", "hipsolver_gesdd_ffi", "cusparse_gtsv2_ffi"}
    | {"cu_threefry2x32_ffi", "hip_threefry2x32_ffi", "mosaic_gpu_v2", "tpu_custom_call", "AllocateBuffer"}
    | {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement", "shape_assertion"}
    | {"Eigh", "Qr", "ProductOfElementaryHouseholderReflectors", "LuDecomposition", "ApproxTopK"}
    | {f"stablehlo.dynamic_{name}" for name in ("approx_top_k", "reduce_window", "rng_bit_generator", "top_k")}
    | {"tf.call_tf_function"}
)


def provider(name: str) -> str:
    """Return the class of the custom call `name`: GUARANTEED, TOOLCHAIN or UNKNOWN."""
    if name in _GUARANTEED:
        return GUARANTEED
    return TOOLCHAIN if name in _BUILTIN | _OF_COMPILERS or not register_custom_calls([name]) else UNKNOWN


def register_custom_calls(names: Iterable[str]) -> list[str]:
    """Make those of the custom calls `names` callable that jaxlib has; return the others, sorted.

    Without its handlers a program with LAPACK calls does not compile, and crashes when it is loaded.
    """
    wanted = set(names) - _BUILTIN
    if any(name.startswith(_SPARSE) for name in wanted):
        wanted -= _sparse()
    return sorted(wanted - _lapack()) if wanted else []


@functools.cache
def _sparse() -> frozenset[str]:
    """Register jaxlib's handlers of products with sparse matrices, once; return their names."""
    from jaxlib import cpu_sparse, xla_client

    handlers = cpu_sparse.registrations()["cpu"]
    for name, handler, api_version in handlers:
        xla_client.register_custom_call_target(name, handler, platform="cpu", api_version=api_version)
    return frozenset(name for name, _, _ in handlers)


@functools.cache
def _lapack() -> frozenset[str]:
    """Register jaxlib's LAPACK handlers, once; return their names. It imports scipy for its library.

    As JAX does, they are said to take parts of a batch, so that XLA splits a batch over devices and gathers nothing.
    """
    from jaxlib import lapack, xla_client
    from jaxlib.cpu import _lapack

    _lapack.initialize()
    handlers = lapack.registrations()["cpu"]
    for name, handler, api_version in handlers:
        xla_client.register_custom_call_target(name, handler, platform="cpu", api_version=api_version)
    for name in lapack.batch_partitionable_targets():
        xla_client.register_custom_call_as_batch_partitionable(name)
    return frozenset(name for name, _, _ in handlers)
