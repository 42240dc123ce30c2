"""Callbacks into Python, wherever they are in a function: the line of each is told."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import buffer_callback, checkify, io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning

import stagec

HERE = Path(__file__)
X = np.ones((2, 3), np.float32)
LIKE = jax.ShapeDtypeStruct((2, 3), jnp.float32)


def pure(x: Any) -> Any:
    return jax.pure_callback(lambda a: a, LIKE, x)  # here


def ordered(x: Any) -> Any:
    io_callback(lambda a: None, None, x, ordered=True)  # ordered
    return x


def printed(x: Any) -> Any:
    jax.debug.print("{}", x)  # print
    return x


@jax.custom_jvp
def custom_jvp(x: Any) -> Any:
    return pure(x)


custom_jvp.defjvp(lambda primals, tangents: (custom_jvp(*primals), tangents[0]))


@jax.custom_vjp
def custom_vjp(x: Any) -> Any:
    return pure(x)


custom_vjp.defvjp(lambda x: (custom_vjp(x), None), lambda _, g: (g,))


@jax.custom_batching.custom_vmap
def custom_vmap(x: Any) -> Any:
    return pure(x)


@custom_vmap.def_vmap
def _(size: int, batched: Any, x: Any) -> Any:
    return x, True


@custom_partitioning
def partitioned(x: Any) -> Any:
    return pure(x)


partitioned.def_partition(
    partition=lambda *_: None, infer_sharding_from_operands=lambda *_: None, sharding_rule="i j -> i j"
)

hidden = eqxi.create_vprim(
    "hidden", eqxi.filter_primitive_def(pure), eqxi.filter_primitive_def(lambda x: x), None, None
)
"""As lineax makes its solves: no jaxpr shows what this becomes."""


def solve(x: Any) -> Any:
    return eqxi.filter_primitive_bind(hidden, x)  # bound


def kernel(x: Any, y: Any) -> None:
    jax.debug.print("{}", x[0, 0])  # kernel
    y[...] = x[...] * 2


def checked(x: Any) -> Any:
    def function(x: Any) -> Any:
        checkify.check(x.sum() > 0, "too small")
        return pure(x)

    return checkify.checkify(function)(x)[1]


def shard_map(x: Any) -> Any:
    mesh = jax.sharding.AbstractMesh((1,), ("d",))
    return jax.shard_map(pure, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)(x)


CALLS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "itself": (pure, "pure_callback", "here"),
    "buffer_callback": (
        lambda x: buffer_callback.buffer_callback(lambda *_: None, LIKE)(x + 1),  # buffer
        "buffer_callback",
        "buffer",
    ),
    "debug.callback": (lambda x: (jax.debug.callback(lambda a: None, x), x)[1], "debug_callback", '"debug.callback"'),
    "jit": (jax.jit(pure), "pure_callback", "here"),
    "jit in jit": (jax.jit(lambda x: jax.jit(printed)(x) * 2), "debug_print", "print"),
    "ordered in jit": (jax.jit(ordered), "io_callback", "ordered"),
    "scan": (lambda x: lax.scan(lambda c, _: (pure(c), None), x, None, 2)[0], "pure_callback", "here"),
    "ordered in scan": (lambda x: lax.scan(lambda c, _: (ordered(c), None), x, None, 2)[0], "io_callback", "ordered"),
    "while": (lambda x: lax.while_loop(lambda c: c.sum() < 3, pure, x), "pure_callback", "here"),
    "condition of while": (
        lambda x: lax.while_loop(lambda c: pure(c).sum() < 3, lambda c: c + 1, x),
        "pure_callback",
        "here",
    ),
    "cond": (lambda x: lax.cond(x.sum() > 0, pure, lambda x: x, x), "pure_callback", "here"),
    "platform_dependent": (
        lambda x: lax.platform_dependent(x, cpu=pure, default=lambda x: x),
        "pure_callback",
        "here",
    ),
    "checkpoint": (jax.checkpoint(pure), "pure_callback", "here"),
    "custom_jvp": (custom_jvp, "pure_callback", "here"),
    "custom_vjp": (custom_vjp, "pure_callback", "here"),
    "custom_vmap": (custom_vmap, "pure_callback", "here"),
    "custom_linear_solve": (
        lambda x: lax.custom_linear_solve(pure, x, lambda matvec, b: matvec(b)),
        "pure_callback",
        "here",
    ),
    "custom_partitioning": (partitioned, "pure_callback", "here"),
    "linear_call": (
        lambda x: jax.custom_derivatives.linear_call(lambda _, x: pure(x), lambda _, x: x, (), x),
        "pure_callback",
        "here",
    ),
    "shard_map": (shard_map, "pure_callback", "here"),
    "composite": (lax.composite(pure, "my.pure"), "pure_callback", "here"),
    "ordered in composite": (lax.composite(ordered, "my.ordered"), "io_callback", "ordered"),
    "checkify": (checked, "pure_callback", "here"),
    "reduce": (
        lambda x: lax.reduce(x, np.float32(0), lambda a, b: jax.pure_callback(np.add, a, a, b), (0,)),  # reduce
        "pure_callback",
        "reduce",
    ),
    "pallas": (pl.pallas_call(kernel, LIKE, interpret=True), "debug_print", "kernel"),
    "a library": (lambda x: equinox.error_if(x, x.sum() > 0, "too large"), "pure_callback", '"a library"'),
    "a primitive of a library": (jax.jit(solve), "hidden", "bound"),
}


def line(mark: str) -> str:
    """The line of this file that ends in a comment, or starts with a key."""
    lines = HERE.read_text("utf-8").splitlines()
    found = [i for i, text in enumerate(lines, 1) if text.endswith(f"# {mark}") or text.strip().startswith(f"{mark}:")]
    assert len(found) == 1, mark
    return f"{HERE.name}:{found[0]}"


@pytest.mark.parametrize("stage", ["lower", "export"])
@pytest.mark.parametrize("name", CALLS)
def test_the_line_of_a_callback_is_told(name: str, stage: str) -> None:
    function, primitive, mark = CALLS[name]
    traced = stagec.jit(lambda x: function(x) + 1).trace(X)
    stages: dict[str, Callable[[], Any]] = {
        "lower": traced.lower,
        "export": functools.partial(traced.export, ("cpu", "cuda")),
    }
    with pytest.raises(NotImplementedError) as error:
        stages[stage]()
    told = str(error.value).splitlines()
    assert told[0].rpartition("/")[2] == f"{line(mark)}: a host callback ({primitive}) cannot be built ahead of time"


def test_all_lines_are_told() -> None:
    def function(x: Any) -> Any:
        return jax.jit(solve)(printed(pure(x)))

    with pytest.raises(NotImplementedError) as error:
        stagec.jit(function)(X)
    told = [text.rpartition("/")[2].partition(": ")[0] for text in str(error.value).splitlines()]
    assert told == [line("here"), line("print"), line("bound")]


def test_another_error_stays_as_it_is() -> None:
    with pytest.raises(ValueError, match="no compatibility guarantees"):
        stagec.jit(jax.ffi.ffi_call("unknown_call", LIKE)).trace(X).export()
