"""Programs that both JAX and stagec run: between them they use what a model may use."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Program:
    """A function with arguments to call it on.

    args: positional arguments, pytrees of numpy arrays; of a static parameter, its value.
    options: further arguments of `jax.jit` and `stagec.jit`.
    mesh: sizes of the axes of the mesh that it runs on, by name; empty for one device.
    kwargs: keyword arguments.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)


def programs(sharded: bool = True) -> dict[str, Program]:
    """Return every program by name; where not `sharded`, those for one device: the others want four."""
    rng = np.random.default_rng(0)

    def f32(*shape: int) -> np.ndarray[Any, Any]:
        return np.asarray(rng.normal(size=shape), np.float32)

    layers = [{"w": f32(16, 16), "b": f32(16)} for _ in range(3)]
    square = f32(6, 6)
    symmetric = square @ square.T + 6 * np.eye(6, dtype=np.float32)
    found = {
        "mlp": Program(mlp, (layers, f32(4, 16))),
        "attention": Program(attention, (f32(2, 5, 8), f32(2, 5, 8), f32(2, 5, 8))),
        "scan": Program(scan, (f32(8),)),
        "while": Program(while_loop, (f32(8),)),
        "while in while": Program(nested_while, (np.int32(5),)),
        "cond": Program(cond, (f32(8), np.bool_(True))),
        "switch": Program(switch, (np.int32(2), f32(8))),
        "fft": Program(lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * 2), (f32(3, 16),)),
        "conv": Program(conv, (f32(2, 3, 8, 8), f32(4, 3, 3, 3))),
        "sort": Program(lambda x: (jnp.sort(x, axis=0), jnp.argsort(x, axis=1), lax.top_k(x, 3)), (f32(5, 7),)),
        "scatter": Program(lambda x, i: x.at[i].add(1.0), (f32(16), np.array([1, 3, 3, 0], np.int32))),
        "gather": Program(lambda x, i: x[i, ::2], (f32(8, 6), np.array([7, 0, 2], np.int32))),
        "rng": Program(rng_draws, (np.uint32(7),)),
        "cholesky": Program(jnp.linalg.cholesky, (symmetric,)),
        "eigh": Program(lambda a: tuple(jnp.linalg.eigh(a)), (symmetric,)),
        "qr": Program(lambda a: tuple(jnp.linalg.qr(a)), (square,)),
        "svd": Program(lambda a: tuple(jnp.linalg.svd(a)), (square,)),
        "solve": Program(jnp.linalg.solve, (symmetric, f32(6))),
        "grad": Program(jax.grad(lambda p, x: mlp(p, x).sum()), (layers, f32(4, 16))),
        "vmap": Program(jax.vmap(jnp.outer), (f32(3, 4), f32(3, 5))),
        "custom_vjp": Program(jax.grad(lambda x: clipped(x).sum()), (f32(8),)),
        "remat": Program(jax.grad(lambda x: jax.checkpoint(jnp.sin)(x).sum()), (f32(8),)),
        "reduce": Program(lambda x: (x.sum(), x.max(0), jnp.cumsum(x, 1), jnp.prod(x)), (f32(4, 9),)),
        "dot": Program(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (f32(3, 17, 19), f32(3, 19, 23))),
        "int4": Program(
            lambda x: (x.astype(jnp.int8) + 1).astype(jnp.int4), (np.arange(-4, 4).astype(ml_dtypes.int4),)
        ),
        "fp8": Program(
            lambda x, y: (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(jnp.float8_e4m3fn),
            (f32(8).astype(ml_dtypes.float8_e4m3fn), f32(8).astype(ml_dtypes.float8_e5m2)),
        ),
        "bf16": Program(
            lambda x, y: x @ y, (f32(4, 8).astype(ml_dtypes.bfloat16), f32(8, 4).astype(ml_dtypes.bfloat16))
        ),
        "f16": Program(jnp.exp, (f32(9).astype(np.float16),)),
        "complex": Program(
            lambda z: (z * z.conj()).real + jnp.abs(jnp.exp(z)), ((f32(8) + 1j * f32(8)).astype(np.complex64),)
        ),
        "integers": Program(
            lambda a, b: (a // b, a % b, a << 2, ~b, lax.population_count(a)),
            (np.arange(8, dtype=np.int32), np.full(8, 3, np.int32)),
        ),
        "booleans": Program(
            lambda a, b: (a & b, a | ~b, jnp.where(a, 1, 2)), (np.array([True, False]), np.array([True, True]))
        ),
        "zero size": Program(lambda x: (x.sum(0), jnp.concatenate([x, x])), (np.zeros((0, 3), np.float32),)),
        "scalars": Program(lambda x, n: x * 2 + n, (np.float32(3), np.int32(4))),
        "200 leaves": Program(
            lambda tree: jax.tree.map(lambda x: x + 1, tree), ({f"k{i:03}": f32(2) for i in range(200)},)
        ),
        "nested tree": Program(nested_tree, ({"a": [f32(2), (f32(3), None)], "b": {}}, f32(2))),
        "unused argument": Program(lambda x, unused: x + 1, (f32(4), f32(5))),
        "keep_unused": Program(lambda x, unused: x + 1, (f32(4), f32(5)), {"keep_unused": True}),
        "donation": Program(lambda state, x: (state + x, x.sum()), (f32(8), f32(8)), {"donate_argnums": (0,)}),
        "large constant": Program(with_constant, (f32(64),)),
        "precision": Program(lambda x, y: jnp.dot(x, y, precision="highest"), (f32(8, 8), f32(8, 8))),
        "keyword arguments": Program(
            lambda x, *, scale, shifts: x * scale + shifts["b"],
            (f32(4),),
            kwargs={"scale": f32(), "shifts": {"b": f32(4)}},
        ),
        "flax": flax_program(f32(4, 8)),
        "equinox": equinox_program(f32(4, 8)),
    }
    return {**found, **on_meshes(f32)} if sharded else found


def on_meshes(f32: Callable[..., Any]) -> dict[str, Program]:
    """Return the programs for several devices."""
    return {
        "psum on 4 devices": Program(psum, (f32(8, 4),), {}, LINE),
        "matmul on 2 x 2 devices": Program(sharded_matmul, (f32(8, 16), f32(16, 4)), {}, GRID),
        "shardings on 2 x 2 devices": Program(
            lambda params, x: (x @ params["w"] + params["b"], x.sum()),
            ({"w": f32(16, 4), "b": f32(4)}, f32(8, 16)),
            {
                "in_shardings": ({"w": split(GRID, None, "model"), "b": split(GRID)}, split(GRID, "data")),
                "out_shardings": (split(GRID, ("data", "model")), None),
            },
            GRID,
        ),
    }


GRID = {"data": 2, "model": 2}
LINE = {"d": 4}


def parameters() -> dict[str, Program]:
    """Return a program for each parameter of `jit`, by the parameter's name."""
    x = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
    return {
        "in_shardings": Program(
            lambda x, y: x @ y, (x, x[:4]), {"in_shardings": (split(LINE, "d"), split(LINE, None))}, LINE
        ),
        "out_shardings": Program(lambda x: x * 2, (x,), {"out_shardings": split(LINE, "d")}, LINE),
        "in_shardings with a memory kind": Program(
            lambda x: x * 2, (x,), {"in_shardings": split(LINE, "d").with_memory_kind("pinned_host")}, LINE
        ),
        "static_argnums": Program(power, (x, 3), {"static_argnums": 1}),
        "static_argnames": Program(power, (x,), {"static_argnames": "n"}, kwargs={"n": 2}),
        "donate_argnums": Program(lambda state, x: (state + x, x), (x, x), {"donate_argnums": (0,)}),
        "donate_argnames": Program(lambda x, state: (state + x, x), (x, x), {"donate_argnames": ("state",)}),
        "keep_unused": Program(lambda x, y: x + 1, (x, x[:5]), {"keep_unused": True}),
        "inline": Program(jnp.tanh, (x,), {"inline": True}),
        "compiler_options": Program(
            lambda x: jnp.exp(x).sum(), (x,), {"compiler_options": {"xla_disable_hlo_passes": "fusion"}}
        ),
    }


def power(x: Any, n: Any) -> Any:
    for _ in range(n):
        x = x * 1.5
    return x


def split(axes: dict[str, int], *spec: Any) -> jax.sharding.NamedSharding:
    """Return the sharding of an array over a mesh of these axes."""
    return jax.sharding.NamedSharding(mesh_of(axes), jax.sharding.PartitionSpec(*spec))


def mlp(layers: Any, x: Any) -> Any:
    for layer in layers:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / q.shape[-1] ** 0.5
    mask = jnp.tril(jnp.ones(scores.shape[1:], bool))
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), v)


def scan(x: Any) -> Any:
    def body(carry: Any, step: Any) -> Any:
        carry = jnp.sin(carry) + step
        return carry, carry.sum()

    return lax.scan(body, x, jnp.arange(5.0))


def while_loop(x: Any) -> Any:
    return lax.while_loop(lambda v: v.max() < 100, lambda v: v * 1.5 + 1, x)


def nested_while(n: Any) -> Any:
    def inner(i: Any) -> Any:
        return lax.fori_loop(0, i, lambda j, total: total + i * j, 0)

    return lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] + inner(s[0])), (0, 0))


def cond(x: Any, flag: Any) -> Any:
    return lax.cond(flag, lambda v: v * 2, lambda v: v - 1, x)


def switch(i: Any, x: Any) -> Any:
    return lax.switch(i, [jnp.sin, jnp.cos, jnp.tanh], x)


def conv(x: Any, kernel: Any) -> Any:
    return lax.conv_general_dilated(x, kernel, (1, 2), "SAME")


def rng_draws(seed: Any) -> Any:
    keys = jax.random.split(jax.random.key(seed), 3)
    return (
        jax.random.normal(keys[0], (5,)),
        jax.random.randint(keys[1], (4,), 0, 99),
        jax.random.permutation(keys[2], 6),
    )


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x * 3


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.clip(g * x, -1, 1),))


def nested_tree(tree: Any, x: Any) -> Any:
    return {"same": tree, "sum": (tree["a"][0] + x, [None, tree["a"][1][0].sum()])}


def with_constant(x: Any) -> Any:
    table = np.random.default_rng(3).normal(size=(64, 64)).astype(np.float32)
    return table @ x


def mesh_of(axes: dict[str, int]) -> jax.sharding.Mesh:
    """Return a mesh of CPU devices."""
    count = int(np.prod(list(axes.values())))
    return jax.sharding.Mesh(np.array(jax.devices("cpu")[:count]).reshape(tuple(axes.values())), tuple(axes))


def psum(x: Any) -> Any:
    add: Any = jax.shard_map(lambda v: lax.psum(v, "d"), mesh=mesh_of(LINE), in_specs=jax.P("d"), out_specs=jax.P())
    return add(x)


def sharded_matmul(x: Any, y: Any) -> Any:
    x = lax.with_sharding_constraint(x, split(GRID, "data", None))
    y = lax.with_sharding_constraint(y, split(GRID, None, "model"))
    return lax.with_sharding_constraint(x @ y, split(GRID, "data", "model"))


def flax_program(x: Any) -> Any:
    """A flax model: its parameters are a nested dict."""
    from flax import linen

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(3)(linen.relu(linen.Dense(16)(x)))

    net = Net()
    params = jax.tree.map(np.asarray, net.init(jax.random.key(0), x))
    return Program(net.apply, (params, x))


def equinox_program(x: Any) -> Any:
    """An equinox model: its arrays are the leaves of the module, its static part is closed over."""
    import equinox

    net = equinox.nn.MLP(8, 3, 16, 2, key=jax.random.key(0))
    arrays, static = equinox.partition(net, equinox.is_array)
    leaves, structure = jax.tree.flatten(arrays)

    def apply(leaves: Any, x: Any) -> Any:
        return jax.vmap(equinox.combine(jax.tree.unflatten(structure, leaves), static))(x)

    return Program(apply, ([np.asarray(leaf) for leaf in leaves], x))
