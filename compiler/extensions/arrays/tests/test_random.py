"""Random numbers: the bits of `jax.random`, and keys as values of functions.

Modules: `stagec_arrays/namespace/keys.py`, `stagec_arrays/namespace/samplers.py`,
`stagec_arrays/primitives/hashing.py`, `stagec_arrays/random.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import stagec
import stagec_arrays
import stagec_arrays.lax
import stagec_arrays.numpy as xp
import stagec_arrays.random

LOGITS = np.log(np.linspace(0.1, 1, 12)).reshape(3, 4)
X = np.arange(24.0, dtype=np.float32).reshape(4, 6)
CHANCES = np.array([0.1, 0.2, 0.3, 0.15, 0.05, 0.2], np.float32)

OF_FLOATS: dict[str, Callable[[Any, Any, str], Any]] = {
    "uniform": lambda r, key, dtype: r.uniform(key, (37,), dtype, -3.0, 5.0),
    "normal": lambda r, key, dtype: r.normal(key, (37,), dtype),
    "truncated_normal": lambda r, key, dtype: r.truncated_normal(key, -1.0, 2.0, (37,), dtype),
    "exponential": lambda r, key, dtype: r.exponential(key, (37,), dtype),
    "gumbel": lambda r, key, dtype: r.gumbel(key, (37,), dtype),
    "gumbel_high": lambda r, key, dtype: r.gumbel(key, (37,), dtype, "highest"),
    "bernoulli": lambda r, key, dtype: r.bernoulli(key, np.linspace(0, 1, 37).astype(dtype)),
    "bernoulli_high": lambda r, key, dtype: r.bernoulli(key, np.full(37, 0.3, dtype), mode="high"),
    "categorical": lambda r, key, dtype: r.categorical(key, LOGITS.astype(dtype), 0, (5, 4)),
}
OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "seeds": lambda r, key: [r.key_data(r.key(seed)) for seed in (0, -1, 2**40 + 5, np.int8(-3))],
    "PRNGKey": lambda r, key: r.split(r.PRNGKey(2**33 + 1)),
    "split": lambda r, key: r.key_data(r.split(key, (3, 2))),
    "fold_in": lambda r, key: r.key_data(r.fold_in(key, 7)),
    "bits": lambda r, key: [r.bits(key, (5,), dtype) for dtype in ("uint8", "uint16", "uint32")],
    "float8": lambda r, key: r.uniform(key, (37,), "float8_e4m3fn"),
    "complex": lambda r, key: r.normal(key, (3, 7), "complex64"),
    "randint": lambda r, key: [r.randint(key, (9,), -3, 300, dtype) for dtype in ("uint8", "int16", "int32")],
    "randint_all": lambda r, key: r.randint(key, (9,), 0, 256, "uint8"),
    "randint_of_arrays": lambda r, key: r.randint(key, (4, 3), np.arange(3), np.arange(4)[:, None] + 5),
    "categorical_without": lambda r, key: r.categorical(key, LOGITS.astype("f"), -1, (2, 3), replace=False),
    "permutation": lambda r, key: [r.permutation(key, 10), r.permutation(key, X, 1), r.permutation(key, X, 1, True)],
    "choice": lambda r, key: [r.choice(key, X, (3, 2), axis=1), r.choice(key, X, (3,), False, axis=1)],
    "choice_by_chance": lambda r, key: [r.choice(key, 6, (9,), p=CHANCES), r.choice(key, 6, (3,), False, CHANCES)],
}


def same(found: Any, wanted: Any) -> None:
    """Dtypes, shapes and bits are the same."""
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(ours), np.asarray(theirs)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes(), (a, b)


@pytest.mark.pinned(but=4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_numbers_have_jaxs_bits(dtype: str) -> None:
    """All of a dtype in one program, which compiles sooner; integers and keys with f32 and f64."""
    wide = dtype == "float64"
    others = OTHERS if dtype.endswith(("32", "64")) else {}

    def every(r: Any, key: Any) -> Any:
        floats = [draw(r, key, dtype) for draw in OF_FLOATS.values()]
        return floats, [draw(r, key) for draw in others.values()], r.bits(key, (5,), "uint64" if wide else "uint32")

    with jax.enable_x64(wide), stagec_arrays.enable_x64(wide):
        wanted = jax.jit(lambda key: every(jax.random, key))(jax.random.key(42))
        same(
            stagec.jit(lambda key: every(stagec_arrays.random, key), frontend="arrays")(stagec_arrays.random.key(42)),
            wanted,
        )


def test_numbers_outside_of_a_trace() -> None:
    key, theirs = stagec_arrays.random.key(7), jax.random.key(7)
    for name in ("uniform", "normal", "gumbel"):
        draw = OF_FLOATS[name]
        same(draw(stagec_arrays.random, key, "float32"), draw(jax.random, theirs, "float32"))
    for name in ("seeds", "choice"):
        same(OTHERS[name](stagec_arrays.random, key), OTHERS[name](jax.random, theirs))


def walk(n: Any, key: Any, x: Any) -> Any:
    """Keys are carried, indexed, stacked, chosen, and closed over."""
    r, lax = (stagec_arrays.random, stagec_arrays.lax) if n is xp else (jax.random, jax.lax)
    fixed = r.key(5)

    def turn(carry: Any, key: Any) -> Any:
        first, second = r.split(carry)
        return first, r.normal(key) + r.uniform(second) + r.normal(fixed, x.shape)[0]

    keys = r.split(key, 4)
    carry, ys = lax.scan(turn, key, keys)
    carry = lax.cond(ys[0] > 0, lambda k: r.fold_in(k, 1), lambda k: k, carry)
    carry, _ = lax.while_loop(lambda s: s[1] < 3, lambda s: (r.split(s[0])[1], s[1] + 1), (carry, 0))
    chosen = n.where(n.asarray([True, False]), n.stack([carry, key]), keys[1:3])
    rows = n.reshape(keys, (2, 2))[::-1, n.asarray([1, 0])].at[0, 0].set(carry)
    return carry, ys, chosen, rows, lax.map(r.bits, keys), chosen == n.stack([carry, key])


def test_keys_are_values() -> None:
    """Traced, untraced and exported: `jax.export` reads the artifact, and takes and gives JAX's keys."""
    x = np.ones(3, np.float32)
    theirs = jax.jit(lambda key, x: walk(jnp, key, x))(jax.random.key(0), x)
    wanted = [jax.random.key_data(one) if one.dtype == jax.random.key(0).dtype else one for one in theirs]
    key, wrapped = stagec_arrays.random.key(0), stagec.jit(lambda key, x: walk(xp, key, x), frontend="arrays")
    assert (str(key.dtype), key.shape, key.ndim) == ("key<fry>", (), 0)
    assert repr(key) == "Array((), dtype=key<fry>) overlaying:\n[0 0]"
    for given in (key, jax.random.key(0)):
        found = wrapped(given, x)
        assert [str(one.dtype) for one in found] == [str(one.dtype) for one in theirs]
        same([stagec_arrays.random.key_data(one) for one in found], wanted)
    same([stagec_arrays.random.key_data(one) for one in walk(xp, key, x)], wanted)
    struct = stagec_arrays.ShapeDtypeStruct((), "key<fry>")
    traced = wrapped.trace(struct, stagec_arrays.ShapeDtypeStruct(stagec_arrays.symbolic_shape("n"), "float32"))
    exported = traced.export(("cpu", "tpu"))
    assert [str(aval) for aval in (*exported.in_avals, *exported.out_avals)][:4] == [
        *("key<fry>[]", "f32[n]", "key<fry>[]", "f32[4]")
    ]
    for given in (key, jax.random.key(0), np.zeros(2, np.uint32)):
        same(exported.call(given, x), wanted)
    called = jax.export.deserialize(bytearray(exported.serialize(vjp_order=1))).call(jax.random.key(0), x)
    same([jax.random.key_data(one) if one.dtype == jax.random.key(0).dtype else one for one in called], wanted)


def test_a_key_is_no_number() -> None:
    r, key = stagec_arrays.random, stagec_arrays.random.key(0)
    for use, message in (
        (lambda: key + 1, "PRNG keys are not numbers"),
        (lambda: xp.sum(r.split(key)), "reduce_sum: PRNG keys are not numbers; stagec_arrays.random takes them"),
        (lambda: np.from_dlpack(key), r"DLPack does not have PRNG keys; write stagec_arrays.random.key_data\(key\)"),
        (lambda: np.asarray(key), r"NumPy does not have PRNG keys; write stagec_arrays.random.key_data\(key\)"),
        (
            lambda: r.normal(np.ones(2)),
            r"normal takes a key, as stagec_arrays.random.key\(seed\) makes it, or uint32\[2\]",
        ),
        (lambda: r.normal(r.split(key)), r"normal takes one key, not an array of keys of shape \(2,\)"),
        (lambda: r.key(0.5), "a seed is an integer, not 0.5"),
        (lambda: r.key(0, impl="rbg"), "stagec has no generator 'rbg'; write 'threefry2x32'"),
        (lambda: r.split(key).at[0].add(key), "add: PRNG keys are not numbers; stagec_arrays.random takes them"),
        (lambda: r.uniform(key, 3), "a shape is a tuple of sizes, not 3"),
        (lambda: stagec_arrays.grad(lambda k: xp.sum(r.normal(k, (2,))))(key), "argument 0 has integers"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            use()


def test_other_platforms_unroll_the_rounds() -> None:
    """The bits are the same: what is lowered for TPUs runs on a CPU too."""
    wrapped = stagec.jit(lambda key: stagec_arrays.random.bits(key, (2, 3)), frontend="arrays")
    exported = wrapped.trace(stagec_arrays.random.key(3)).export(("tpu",))
    assert "stablehlo.while" not in exported.mlir_module()
    found = dataclasses.replace(exported, platforms=("cpu",)).call(np.array([0, 3], np.uint32))
    same(found, jax.random.bits(jax.random.key(3), (2, 3)))
