"""Write the corpus's artifacts with the JAX that is installed: write.py FOLDER.

A folder is written once, by one version of JAX, and never changed: what it holds must be readable for as long as stagec
promises to. Each program leaves NAME.exported, NAME.inputs.npz and NAME.outputs.npz (flat arrays, in order). Run with
XLA_FLAGS=--xla_force_host_platform_device_count=4 and JAX_PLATFORMS=cpu.
"""

import sys
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PLATFORMS = ("cpu", "cuda", "tpu")


def mlp(params, x):
    return jax.nn.softmax(jnp.tanh(x @ params["w"] + params["b"]))


def update(state, delta):
    return jax.tree.map(lambda v: v + delta, state), None


def factorize(a):
    return jnp.linalg.cholesky(a @ a.T + 5 * jnp.eye(5)), jnp.linalg.qr(a)[1]


def dtypes(a, b, c, d):
    return a + 1, b * 2, ~c, (d * d.conj()).real


def loop(x):
    return lax.scan(lambda carry, _: (jnp.sin(carry), carry.sum()), x, length=4)


def draw(key):
    return jax.random.normal(key, (4,))


def drop(x, unused, y):
    return x * y


def main(folder: Path) -> None:
    rng = np.random.default_rng(0)

    def f32(*shape):
        return rng.normal(size=shape).astype(np.float32)

    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    rows = NamedSharding(mesh, PartitionSpec("d"))
    total = jax.shard_map(lambda v: lax.psum(v, "d"), mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec())
    (batch,) = jax.export.symbolic_shape("batch")
    params = {"w": f32(16, 4), "b": f32(4)}
    cases = {
        # name: (jitted function, arguments, arguments to export with, export's options, vjp order)
        "mlp": (jax.jit(mlp), (params, f32(6, 16)), None, {"platforms": PLATFORMS}, 2),
        "symbolic": (
            jax.jit(mlp),
            (params, f32(6, 16)),
            (params, jax.ShapeDtypeStruct((batch, 16), jnp.float32)),
            {"platforms": PLATFORMS},
            1,
        ),
        "update": (
            jax.jit(update, donate_argnums=0),
            ({"a": f32(3), "b": [f32(2), (f32(),)]}, np.float32(2)),
            None,
            {},
            0,
        ),
        "factorize": (jax.jit(factorize), (f32(5, 5),), None, {}, 0),
        "dtypes": (
            jax.jit(dtypes),
            (
                np.arange(4, dtype=np.int8),
                f32(4).astype(jnp.bfloat16),
                np.array([True, False]),
                (f32(3) + 1j * f32(3)).astype(np.complex64),
            ),
            None,
            {},
            0,
        ),
        "loop": (jax.jit(loop), (f32(8),), None, {}, 0),
        "draw": (jax.jit(draw), (jax.random.key(3),), None, {}, 0),
        "drop": (jax.jit(drop), (f32(4), f32(5), f32(4)), None, {}, 0),
        "psum": (jax.jit(total, in_shardings=rows), (f32(8, 3),), None, {}, 0),
    }
    folder.mkdir()
    for name, (function, args, abstract, options, vjp_order) in cases.items():
        exported = jax.export.export(function, **{"platforms": ["cpu"], **options})(*(abstract or args))
        (folder / f"{name}.exported").write_bytes(exported.serialize(vjp_order=vjp_order))
        inputs = [_plain(leaf) for leaf in jax.tree.leaves(args)]
        outputs = [_plain(leaf) for leaf in jax.tree.leaves(function(*jax.tree.map(jnp.array, args)))]
        np.savez(folder / f"{name}.inputs.npz", *inputs)
        np.savez(folder / f"{name}.outputs.npz", *outputs)


def _plain(leaf):
    """An array that numpy stores: a key as its words, bfloat16 as float32."""
    if jnp.issubdtype(getattr(leaf, "dtype", np.dtype("f4")), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.astype(np.float32) if array.dtype == jnp.bfloat16 else array


if __name__ == "__main__":
    main(Path(sys.argv[1]))
