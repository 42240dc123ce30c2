"""A program staged by JAX and by stagec, with one interface: the rows of the table take either."""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

import stagec
from tests.conformance.programs import Program, mesh_of
from tests.conformance.views import Bits, bits, words


class Staged:
    """One program; each stage is made when it is asked for, once.

    side: "ours" or "theirs".
    jit: `stagec.jit` or `jax.jit`.
    wrapped, traced, lowered, compiled, exported: the stages.
    """

    side: str

    def __init__(self, name: str, program: Program) -> None:
        self.name = name
        self.program = program
        self.jit: Any = stagec.jit if self.side == "ours" else jax.jit
        self.wrapped = self.jit(program.function, **program.options)

    @cached_property
    def traced(self) -> Any:
        return self.wrapped.trace(*self.program.args, **self.program.kwargs)

    @cached_property
    def lowered(self) -> Any:
        return self.wrapped.lower(*self.program.args, **self.program.kwargs)

    @cached_property
    def compiled(self) -> Any:
        return self.lowered.compile()

    @cached_property
    def exported(self) -> Any:
        raise NotImplementedError

    @cached_property
    def read_jaxs(self) -> Any:
        """`Exported.deserialize` of what JAX wrote."""
        stock = jax.export.export(jax.jit(self.program.function, **self.program.options), platforms=["cpu"])
        return self.read(bytes(stock(*self.program.args, **self.program.kwargs).serialize()))

    @property
    def args(self) -> tuple[Any, ...]:
        """Arguments of their own for a call: it may donate them."""
        return tuple(jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, self.program.args))

    def results(self, function: Callable[..., Any]) -> Bits:
        """What a function gives for the program's arguments."""
        return bits(function(*self.args, **self.program.kwargs))

    def cotangents(self, exported: Any) -> Bits:
        """What the vector-Jacobian product of an `Exported` gives for cotangents of ones."""
        primals = jax.tree.leaves((self.args, self.program.kwargs))
        results = map(words, jax.tree.leaves(self.wrapped(*self.args, **self.program.kwargs)))
        # Integers have cotangents of float0.
        ones = [np.ones_like(x) if jnp.issubdtype(x.dtype, np.inexact) else np.zeros(x.shape, bool) for x in results]
        return bits(self.run(exported.vjp(), *primals, *ones))

    def ndims(self, args: bool) -> list[int]:
        """The number of dimensions of each argument that the program takes, or of each result."""
        exported = self.exported
        if args:
            return [len(exported.in_avals[i].shape) for i in exported.module_kept_var_idx]
        return [len(aval.shape) for aval in exported.out_avals]

    def lower(self, platform: str) -> Any:
        """`Traced.lower` for a platform."""
        raise NotImplementedError

    def read(self, serialized: bytes) -> Any:
        """`Exported.deserialize`."""
        raise NotImplementedError

    def run(self, exported: Any, *args: Any, **kwargs: Any) -> Any:
        """`Exported.call`."""
        raise NotImplementedError


class Theirs(Staged):
    """A program staged by JAX."""

    side = "theirs"

    @cached_property
    def exported(self) -> Any:
        return jax.export.export(self.wrapped, platforms=["cpu"])(*self.program.args, **self.program.kwargs)

    def lower(self, platform: str) -> Any:
        return self.traced.lower(lowering_platforms=(platform,))

    def read(self, serialized: bytes) -> Any:
        return jax.export.deserialize(bytearray(serialized))

    def run(self, exported: Any, *args: Any, **kwargs: Any) -> Any:
        return call(exported, args, kwargs, self.program.mesh)


class Ours(Staged):
    """A program staged by stagec."""

    side = "ours"

    @cached_property
    def exported(self) -> Any:
        return self.traced.export()

    def lower(self, platform: str) -> Any:
        return self.traced.lower(platforms=(platform,))

    def read(self, serialized: bytes) -> Any:
        return stagec.Exported.deserialize(serialized)

    def run(self, exported: Any, *args: Any, **kwargs: Any) -> Any:
        return exported.call(*args, **kwargs)


class TracedByStagec(Ours):
    """A function of arrays staged by stagec, without JAX (docs/arrays.md)."""

    def __init__(self, name: str, program: Program) -> None:
        super().__init__(name, program)
        self.jit = partial(stagec.jit, frontend="arrays")
        self.wrapped = self.jit(program.function, **program.options)


class Pair(NamedTuple):
    """A program staged by both."""

    ours: Ours
    theirs: Theirs


def pair(name: str, program: Program) -> Pair:
    return Pair(Ours(name, program), Theirs(name, program))


def call(exported: Any, args: Any, kwargs: Any, mesh: dict[str, int]) -> Any:
    """Call JAX's `Exported` on numpy arrays, over a mesh of CPU devices where it wants one."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    float0 = jax.dtypes.float0
    leaves = [
        np.zeros(np.shape(leaf), float0) if aval.dtype == float0 else leaf
        for leaf, aval in zip(leaves, exported.in_avals, strict=True)
    ]
    if mesh:
        leaves = jax.device_put(leaves, jax.sharding.NamedSharding(mesh_of(mesh), jax.P()))
    args, kwargs = jax.tree.unflatten(structure, leaves)
    return exported.call(*args, **kwargs)
