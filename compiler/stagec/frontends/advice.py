"""Advice for functions that JAX traces, but no artifact can hold, or that JAX lowers for fewer platforms."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax

from stagec.core.builds.specs import FunctionSpec
from stagec.core.telling.errors import StagecError
from stagec.pjrt.jax_arrays import KEYS

REFERENCE = "a program takes and gives arrays: make the reference inside, jax.new_ref(x), and return ref[...]"
_WRITE = {
    "mutable array reference": REFERENCE,
    "primitives that require devices to be present": (
        "custom_partitioning asks a Python function while XLA partitions, and an artifact holds none:\n"
        "write jax.shard_map over the mesh, or jax.lax.with_sharding_constraint"
    ),
    "Only interpret mode is supported on CPU backend": (
        "JAX lowers a function, and each branch of lax.platform_dependent, for all of its platforms,\n"
        "and a Pallas kernel is for devices: write another function in the manifest for targets with platform cpu"
    ),
}
"""The advice, by JAX's message."""
_INDIVISIBLE = (
    re.compile(r"is partitioned (?P<parts>\d+) times, but the dimension size is (?P<size>.+?) \(full shape"),
    re.compile(r"should be divisible by (?P<parts>\d+), but it is equal to (?P<size>.+?) \(full shape"),
)
"""JAX's messages about a size that may not be a multiple of the number of devices."""


def on(error: StagecError) -> StagecError:
    """Return an error of JAX's with the advice, if there is one."""

    def advised(problem: Any) -> Any:
        said = f"{problem.what}\n{problem.write}"
        write = next((write for message, write in _WRITE.items() if message in said), None) or _constraint(said)
        return problem if write is None else replace(problem, write=f"{problem.write}\n{write}")

    return StagecError(*map(advised, error.problems))


def _constraint(said: str) -> str | None:
    """Return the advice for a symbolic size that is split over devices; None for another message."""
    match = next(filter(None, (pattern.search(said) for pattern in _INDIVISIBLE)), None)
    if match is None or match["size"].isdigit():
        return None
    size, parts = match["size"], match["parts"]
    for_jax = f'["mod({size}, {parts}) == 0"]'
    listed = f'["{size} % {parts} == 0"]' if size.isidentifier() else for_jax
    return f"write constraints = {listed}; if Python makes the arguments, symbolic_shape(..., constraints={for_jax})"


def check(spec: FunctionSpec, exported: jax.export.Exported) -> None:
    """Raise StagecError for arguments and results that no artifact can hold."""
    for where, avals in (("an argument", exported.in_avals), ("a result", exported.out_avals)):
        for aval in avals:
            if not hasattr(aval, "dtype"):
                what = f"{where} is a token ({aval})"
                raise spec.problem("", what, "order operations inside one program; take and return only arrays")
            if str(aval.dtype).startswith("key<") and str(aval.dtype) not in KEYS:
                what = f"{where} is a PRNG key of an implementation of your own ({aval.dtype})"
                write = "pass its words, jax.random.key_data(key), "
                write += "and write jax.random.wrap_key_data(words, impl=...) inside"
                raise spec.problem("", what, write)
