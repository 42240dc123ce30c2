"""A program with JAX that calls every function of cached.toml: what it prints is of JAX's compilation cache.

usage: python serve.py [--hook]
"""

import hashlib
import json
import sys

if "--hook" in sys.argv:
    import stagec.jax_cache  # noqa: F401
import jax
import models
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

EVENTS: list[str] = []
RESULTS: dict[str, str] = {}
jax.monitoring.register_event_listener(lambda event, **_: EVENTS.append(event.rpartition("/")[2]))


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, "f4")


def drawn(avals):
    draw = np.random.default_rng(7)

    def array(leaf):
        return draw.normal(size=leaf.shape).astype(leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    return jax.tree.map(array, avals)


def called(name, function, *args, **kwargs):
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(function(*args, **kwargs)) if hasattr(leaf, "dtype")]
    RESULTS[name] = hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()


params = {"hidden": f32(6, 16), "output": f32(16, 4)}
predict = jax.jit(models.predict)
for size in (1, 8):
    called(f"predict {size}", predict, *drawn((params, f32(size, 6))))
held = jax.device_put(drawn(params))
step = jax.jit(models.step, static_argnames="rate", donate_argnums=0)
called("step", step, held, *drawn((f32(8, 6), f32(8, 4))), rate=0.5)
assert held["hidden"].is_deleted()
power = jax.jit(models.power, static_argnames="exponent")
for exponent in (2, 3):
    called(f"power {exponent}", power, *drawn((f32(10),)), exponent=exponent)
called("scale", jax.jit(models.scale), *drawn((f32(10),)), 2.5)
with jax.enable_x64(True):
    called("wide", jax.jit(models.wide), np.arange(5, dtype="f8"))
if jax.device_count() == 8:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def split(*axes):
        return NamedSharding(mesh, PartitionSpec(*axes))

    shardings = {"hidden": split(None, "model"), "output": split("model")}, split("data"), split("data")
    with jax.set_mesh(mesh):
        sharded = jax.jit(models.sharded, donate_argnums=0, in_shardings=shardings)
        called("sharded", sharded, *drawn((params, f32(8, 6), f32(8, 4))))
    mesh = jax.make_mesh((4, 2), ("data", "model"))  # Explicit axes, if nobody says otherwise
    with jax.set_mesh(mesh):
        explicit = jax.jit(models.explicit, donate_argnums=1)
        split = {"hidden": PartitionSpec(None, "model"), "output": PartitionSpec("model")}
        weights = jax.device_put(drawn(params), split)
        for size in (8, 16):
            x = jax.device_put(drawn(f32(size, 6)), PartitionSpec("data"))
            called(f"explicit {size}", explicit, weights, x, np.float32(2))
        x, y = jax.device_put(drawn((f32(8, 6), f32(8, 4))), PartitionSpec("data"))
        called("explicit step", models.explicit_step, weights, x, y)
called("flax_step", jax.jit(models.flax_step, donate_argnums=0), *drawn(models.flax_avals()))
called("equinox_step", models.equinox_step, *drawn(models.equinox_avals()))
called("nnx_loss", models.nnx_loss, *drawn(models.nnx_avals()))
counts = {name: EVENTS.count(name) for name in ("compile_requests_use_cache", "cache_hits", "cache_misses")}
print(json.dumps({**counts, "results": RESULTS}))
