"""Advice for functions that JAX traces, but no artifact can hold, or that JAX lowers for fewer platforms."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax

from stagec.core.builds.specs import FunctionSpec
from stagec.core.messages.errors import StagecError
from stagec.core.sizes.avals import DTYPES, NOT_EXPORTABLE
from stagec.frontends.jax.pytrees import CHECKS
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
_INDIVISIBLE = (
    re.compile(r"is partitioned (?P<parts>\d+) times, but the dimension size is (?P<size>.+?) \(full shape"),
    re.compile(r"should be divisible by (?P<parts>\d+), but it is equal to (?P<size>.+?) \(full shape"),
)
"""JAX's messages about a size that may not be a multiple of the number of devices."""


_NO_MESH = (
    "The context mesh cannot be empty",
    "when you are not under a mesh context",
    "requires a non-empty mesh in context",
)
_ANOTHER_MESH = (
    "must be >= the product of mesh_shape",
    "must equal the product of mesh_shape",
    "`set_mesh` can only be used",
    "cannot reshape array of size 1 into shape",  # the devices, in the form of a mesh
)
_AUTO = ("cannot contain axis names that are of type Auto or Manual", "can only refer to Auto axes of the mesh")
"""JAX's messages about meshes: a model is traced on one device, and the manifest names its mesh."""


@contextlib.contextmanager
def given(spec: FunctionSpec) -> Iterator[None]:
    """Add the advice to the errors of JAX's in this block, if there is one."""

    def advised(problem: Any) -> Any:
        said = f"{problem.what}\n{problem.write}"
        # A constraint is the better advice for a size, where a message has both.
        write = _constraint(said) or next((write for words, write in _WRITE.items() if words in said), "")
        write = write or _about_meshes(spec, said)
        return replace(problem, write=f"{problem.write}\n{write}") if write else problem

    try:
        yield
    except StagecError as error:
        raise StagecError(*map(advised, error.problems)) from error


def _about_meshes(spec: FunctionSpec, said: str) -> str:
    """Return the advice for a message about meshes; "" if it is not about them."""
    take = "take it from jax.sharding.get_abstract_mesh() in the function, or leave mesh out of jax.shard_map"
    if not any(words in said for words in (*_NO_MESH, *_ANOTHER_MESH, *_AUTO)):
        return ""
    if "cannot reshape" in said and "devices(" not in said:
        return ""
    if not spec.mesh:
        return (
            "a build has one device, and the manifest says over which mesh a function runs: write for example\n"
            f'mesh = "grid" for {spec.key}, and a table [meshes.grid] with axes = {{ data = 2, model = 2 }};\n{take}'
        )
    if any(words in said for words in _AUTO):
        types = ", ".join(['"Explicit"'] * len(spec.mesh))
        return f"its mesh has Auto axes: for those of jax.make_mesh, write axis_types = [{types}] in [meshes]"
    axes = ", ".join(f"{name} = {size}" for name, size in spec.mesh)
    return f"a build has one device, and the function runs over its mesh in [meshes] ({axes}):\n{take}"


def _constraint(said: str) -> str:
    """Return the advice for a symbolic size that is split over devices; "" for another message."""
    match = next(filter(None, (pattern.search(said) for pattern in _INDIVISIBLE)), None)
    if match is None or match["size"].isdigit():
        return ""
    size, parts = match["size"], match["parts"]
    for_jax = f'["mod({size}, {parts}) == 0"]'
    listed = f'["{size} % {parts} == 0"]' if size.isidentifier() else for_jax
    return f"write constraints = {listed}; if Python makes the arguments, symbolic_shape(..., constraints={for_jax})"


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
