"""Advice for functions that JAX traces, but no artifact can hold, or that JAX lowers for fewer platforms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from stagec.core.sizes.avals import DTYPES, NOT_EXPORTABLE
from stagec.core.telling.errors import StagecError
from stagec.frontends.pytrees import CHECKS
from stagec.pjrt.jax_arrays import KEYS

REFERENCE = "a program takes and gives arrays: make the reference inside, jax.new_ref(x), and return ref[...]"
_WRITE = {
    "Non-hashable static arguments are not supported": (
        "what static_argnums or static_argnames of your jax.jit name is a constant of a program, and no argument:\n"
        "write static = { NAME = VALUE } in the manifest, and leave it out of args, kwargs and avals"
    ),
    "checkify.check which was not functionalized": CHECKS,
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
_INSTEAD = {DTYPES[name].numpy_name: DTYPES[instead].numpy_name for name, instead in NOT_EXPORTABLE.items()}


def on(error: StagecError) -> StagecError:
    """Return an error of JAX's with the advice, if there is one."""

    def advised(problem: Any) -> Any:
        write = next((write for said, write in _WRITE.items() if said in f"{problem.what}\n{problem.write}"), None)
        return problem if write is None else replace(problem, write=f"{problem.write}\n{write}")

    return StagecError(*map(advised, error.problems))


def refused(exported: jax.export.Exported) -> dict[str, str]:
    """Return each fault of arguments and results that no artifact can hold, with what to write instead."""
    faults = {}
    for where, avals in (("an argument", exported.in_avals), ("a result", exported.out_avals)):
        for aval in avals:
            if not hasattr(aval, "dtype"):
                write = "order operations inside one program; take and return only arrays"
                faults[f"{where} is a token ({aval})"] = write
            elif str(aval.dtype).startswith("key<") and str(aval.dtype) not in KEYS:
                write = "pass its words, jax.random.key_data(key), "
                write += "and write jax.random.wrap_key_data(words, impl=...) inside"
                faults[f"{where} is a PRNG key of an implementation of your own ({aval.dtype})"] = write
            elif instead := _INSTEAD.get(str(aval.dtype)):
                write = f"take and return {instead}, and convert inside: x.astype(jnp.{aval.dtype})"
                faults[f"{where} is {aval.dtype}, which jax.export has not in its format"] = write
    return faults
