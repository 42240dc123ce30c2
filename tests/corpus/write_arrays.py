"""Write the corpus's artifacts of functions of arrays with this stagec, without JAX: write_arrays.py FOLDER.

As write.py: a folder is written once and never changed. Each program leaves NAME.exported, NAME.inputs.npz and
NAME.outputs.npz, and with derivatives NAME.cotangents.npz: those of its inputs, where those of results are ones.
"""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np

import stagec
import stagec_arrays
import stagec_arrays.numpy as xp
from stagec.stages.shardings import Mesh, NamedSharding, PartitionSpec
from stagec_arrays import lax, pytrees

PLATFORMS = ("cpu", "cuda", "tpu")
MESH = Mesh((4,), ("d",))


def mlp(params, x):
    e = xp.exp(xp.tanh(x @ params["w"] + params["b"]))
    return e / xp.sum(e, axis=-1, keepdims=True)


def update(state, delta):
    return {"a": state["a"] + delta, "b": [state["b"][0] * delta, (state["b"][1][0] - delta,)]}, None


def dtypes(a, b, c, d):
    return a + 1, b * 2, ~c, xp.real(d * xp.conj(d))


def loop(x):
    return lax.while_loop(lambda s: xp.sum(s) < 100, lambda s: s * 2 + 1, xp.abs(x)), lax.fori_loop(
        0, 3, lambda i, v: v + i, x
    )


def turns(x, w):
    def turn(carry, row):
        carry = xp.tanh(carry @ w + row)
        return lax.cond(xp.sum(carry) > 0, lambda v: v, lambda v: -v * 0.5, carry), carry

    return lax.scan(turn, xp.zeros(3), x)


def rank(x):
    y = xp.sort(x, axis=1)
    return (
        xp.cumulative_sum(xp.take(y, xp.asarray([2, 0, 0]), axis=1), axis=0),
        xp.argsort(x, axis=1),
        xp.where(x > 0, x[::-1, :], xp.maximum(x, -1.0)),
    )


def drop(x, unused, y):
    return x * y


def devices(x):
    return stagec_arrays.shard_map(
        lambda v: lax.psum(v * v, "d"), mesh=MESH, in_specs=PartitionSpec("d"), out_specs=PartitionSpec()
    )(x)


def main(folder: Path) -> None:
    rng = np.random.default_rng(0)

    def f32(*shape):
        return rng.normal(size=shape).astype(np.float32)

    params = {"w": f32(16, 4), "b": f32(4)}
    batch = stagec_arrays.ShapeDtypeStruct(stagec_arrays.symbolic_shape("batch, 16"), np.float32)
    rows = {"in_shardings": NamedSharding(MESH, PartitionSpec("d"))}
    small = np.arange(4, dtype=np.int8), f32(4).astype(ml_dtypes.bfloat16), np.array([True, False])
    cases = {
        # name: (function, arguments, arguments to export with, platforms, vjp order, options of jit)
        "mlp": (mlp, (params, f32(6, 16)), None, PLATFORMS, 2, {}),
        "symbolic": (mlp, (params, f32(6, 16)), (params, batch), PLATFORMS, 1, {}),
        "update": (
            update,
            ({"a": f32(3), "b": [f32(2), (f32(),)]}, np.float32(2)),
            None,
            None,
            0,
            {"donate_argnums": 0},
        ),
        "dtypes": (dtypes, (*small, (f32(3) + 1j * f32(3)).astype(np.complex64)), None, None, 0, {}),
        "loop": (loop, (f32(8),), None, None, 0, {}),
        "turns": (turns, (f32(5, 3), f32(3, 3)), None, None, 1, {}),
        "rank": (rank, (f32(4, 3),), None, None, 1, {}),
        "drop": (drop, (f32(4), f32(5), f32(4)), None, None, 0, {}),
        "devices": (devices, (f32(8, 3),), None, None, 1, rows),
    }
    assert "jax" not in sys.modules
    folder.mkdir()
    for name, (function, args, abstract, platforms, vjp_order, options) in cases.items():
        wrapped = stagec.jit(function, frontend="arrays", **options)
        exported = wrapped.trace(*(abstract or args)).export(platforms or ("cpu",))
        (folder / f"{name}.exported").write_bytes(exported.serialize(vjp_order=vjp_order))
        stored = {"inputs": args, "outputs": wrapped(*args)}
        if vjp_order and name != "devices":
            _, pull = stagec_arrays.vjp(lambda *a, f=function: _floats(f(*a)), *args)
            stored["cotangents"] = pull(pytrees.tree_map(xp.ones_like, _floats(function(*args))))
        elif vjp_order:
            stored["cotangents"] = (2 * args[0],)
        for kind, tree in stored.items():
            np.savez(folder / f"{name}.{kind}.npz", *map(_plain, pytrees.flatten(tree)[0]))


def _floats(tree):
    return [leaf for leaf in pytrees.flatten(tree)[0] if leaf.dtype.kind == "f"]


def _plain(leaf):
    """An array that numpy stores: bfloat16 as float32."""
    array = np.asarray(leaf)
    return array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array


if __name__ == "__main__":
    main(Path(sys.argv[1]))
