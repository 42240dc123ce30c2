"""How artifacts and sizes are called, in file names and in messages."""

from __future__ import annotations

from collections.abc import Mapping

JAXLIB = r"^jaxlib==[0-9]+(\.[0-9]+)+$"
"""How a jaxlib of a fleet is written, as in a lock: `jaxlib==0.12.0`."""
MACRO_TARGETS = (
    "autotune",
    "baseline_test",
    "container",
    "explain",
    "golden_cuda_optimized_test",
    "golden_cuda_test",
    "golden_rocm_optimized_test",
    "golden_rocm_test",
    "golden_test",
    "golden_tpu_optimized_test",
    "golden_tpu_test",
    "image",
    "imports",
    "jax_cache",
    "latency",
    "provenance",
    "push",
    "report",
    "reproducibility_test",
    "serve",
    "sign",
    "size_test",
    "update_baseline",
)
"""Names of other targets that the macro `aot_manifest` declares, after the manifest's name and a dot.

tests/core/test_naming.py runs the macro and compares."""


def artifact(function: str, variant: str) -> str:
    """Return the name of a function's artifacts: its name, and `-VARIANT` if it has variants."""
    # Not with a `.`: a target follows the next one (`manifest.function-variant.target`).
    return f"{function}-{variant}" if variant else function


def key(function: str, variant: str) -> str:
    """Return the key of a function in its manifest, or of its variant."""
    return f"functions.{function}.variants.{variant}" if variant else f"functions.{function}"


def sizes(given: Mapping[str, int]) -> str:
    """Return sizes by name as a person reads them, `batch = 8, length = 64`: of a bucket, or of a mesh's axes."""
    return ", ".join(f"{name} = {size}" for name, size in given.items())


def bucket(given: Mapping[str, int]) -> str:
    """Return the sizes of a bucket as `sizes` does, sorted by dimension; "" for none."""
    return sizes(dict(sorted(given.items())))
