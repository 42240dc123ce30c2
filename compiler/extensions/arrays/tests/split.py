"""Functions of arrays that are split over four devices, written for JAX and for stagec: test_split.py.

As a program: whether JAX reads artifacts of stagec's of them, and gives the same as for its own. It needs four devices.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from compiler.extensions.arrays.tests.library import Library, jaxs

RNG = np.random.default_rng(0)
W, X, Y = (RNG.normal(size=shape).astype(np.float32) for shape in ((4, 8), (8, 4), (8, 8)))
AXES, SIZES = ("data", "model"), (2, 2)


def collectives(of: Library, y: Any) -> Any:
    xp, lax, p = of.xp, of.lax, of.P

    def body(a: Any) -> Any:
        both = {"sum": xp.sum(a), "row": a[0]}
        return {
            "psum": lax.psum(both, AXES),
            "pmean": lax.pmean(a, "model"),
            "pmax": lax.pmax(a, "data"),
            "pmin": lax.pmin(a, AXES),
            "tiled": lax.all_gather(a, "data", axis=1, tiled=True),
            "stacked": lax.all_gather(a, AXES),
            "turned": lax.ppermute(a, "data", [(0, 1), (1, 0)]),
            "sent": lax.ppermute(a, "model", [(0, 1)]),
            "exchanged": lax.all_to_all(a, "data", 1, 0, tiled=True),
            "moved": lax.all_to_all(xp.reshape(a, (2, 2, 4)), "model", 0, 2),
            "back": lax.all_to_all(xp.reshape(a, (4, 2, 2)), "model", 2, 0),
            "scattered": lax.psum_scatter(a, "model", scatter_dimension=1, tiled=True),
            "numbers": xp.reshape(lax.axis_index("data") * 10 + lax.axis_index(AXES), (1, 1)),
            "size": lax.axis_size(AXES) * xp.ones((1, 1)),
        }

    parts = {
        "psum": {"sum": p(), "row": p()},
        "pmax": p(),
        "pmin": p(),
        "tiled": p(None, AXES),
        "stacked": p(None, AXES),
    }
    whole = ("pmean", "turned", "sent", "exchanged", "moved", "back", "scattered", "numbers", "size")
    parts |= dict.fromkeys(whole, p("data", "model"))
    parts["pmean"] = p("data")
    return of.shard_map(body, in_specs=p("data", "model"), out_specs=parts, check_vma=False)(y)


def train(of: Library, w: Any, x: Any, y: Any) -> Any:
    """A loss over parts of the data and of the weights, and its gradient."""
    xp, lax, p = of.xp, of.lax, of.P

    def part(w: Any, x: Any, y: Any) -> Any:
        h = xp.tanh(lax.all_gather(x, "model", axis=1, tiled=True) @ w)
        h = h + lax.ppermute(h, "data", [(0, 1), (1, 0)]) * 0.5
        h = lax.all_to_all(h, "data", 1, 0, tiled=True)
        h = lax.all_to_all(h, "data", 0, 1, tiled=True)
        total = lax.psum_scatter(h, "data", scatter_dimension=0, tiled=True)
        return lax.pmean(xp.mean((h - y) ** 2), AXES) + lax.psum(xp.sum(total**3), AXES) * 1e-3

    specs = (p(None, "model"), p("data", "model"), p("data", "model"))
    loss = of.shard_map(part, in_specs=specs, out_specs=p(), check_vma=False)
    value, gradient = of.value_and_grad(loss, (0, 1))(w, x, y)
    return value, {"w": w - 0.1 * gradient[0]}, gradient[1]


def dense(of: Library, params: Any, x: Any) -> Any:
    h = of.lax.with_sharding_constraint(of.xp.tanh(x @ params["w"]), of.P("data", "model"))
    return {"h": h, "sum": of.xp.sum(h, axis=0)}


def nested(of: Library, params: Any, x: Any) -> Any:
    """Functions of jit inside another one: their shardings are constraints, also of cotangents."""
    name = of.lax.__name__.partition(".")[0].removesuffix("_arrays")
    package = sys.modules[name]  # as a program, this one has no stagec
    p, options = of.P, {"frontend": "arrays"} if package.__name__ == "stagec" else {}

    def layer(by: float, params: Any, x: Any) -> Any:
        return {"h": of.xp.tanh(x @ params["w"]), "x": x * by}

    split = ({"w": p(None, "model")}, p("data"))
    outputs = {"h": p("model"), "x": None}
    inner = package.jit(layer, in_shardings=split, out_shardings=outputs, static_argnums=0, **options)

    def loss(params: Any, x: Any) -> Any:
        found = inner(2.0, params, x)
        return of.xp.sum(found["h"] ** 2) + of.xp.sum(found["x"])

    return of.value_and_grad(loss, (0, 1))(params, x)


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "collectives": (collectives, (Y,)),
    "train": (train, (W, X, Y)),
    "dense": (dense, ({"w": W}, X)),
    "nested": (nested, ({"w": W}, X)),
}


def shardings(name: str, of: Callable[..., Any]) -> dict[str, Any]:
    """Parameters of jit. of: a sharding of axes."""
    if name == "dense":
        outputs = {"h": of("data", "model"), "sum": None}
        return {"in_shardings": ({"w": of(None, "model")}, of("data")), "out_shardings": outputs}
    return {"in_shardings": of("data")} if name == "collectives" else {}


def main(folder: Path) -> None:
    """Call stagec's artifacts, and compare with JAX's."""
    import jax
    import jax.export
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh(SIZES, AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    of = jaxs()
    with jax.set_mesh(mesh):
        for name, (function, args) in FUNCTIONS.items():
            theirs = jax.export.deserialize(bytearray((folder / f"{name}.exported").read_bytes()))
            options = shardings(name, lambda *axes: NamedSharding(mesh, PartitionSpec(*axes)))
            jitted = jax.jit(lambda *args, function=function: function(of, *args), **options)
            own = jax.export.export(jitted)(*args)
            for what in ("nr_devices", "in_tree", "out_tree", "module_kept_var_idx"):
                assert getattr(theirs, what) == getattr(own, what), (name, what)
            for side in ("in_shardings_jax", "out_shardings_jax"):
                both = (getattr(exported, side)(mesh) for exported in (theirs, own))
                assert [one and one.spec for one in next(both)] == [one and one.spec for one in next(both)], name
            constraints = re.compile(r"sdy\.sharding_constraint .*? <@mesh, (.*?)>")
            both = (constraints.findall(exported.mlir_module()) for exported in (theirs, own))
            assert sorted(next(both)) == sorted(next(both)), name
            found, wanted = jax.jit(theirs.call)(*args), jitted(*args)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), found, wanted)
            if name == "dense":

                def loss(call: Callable[..., Any], params: Any, args: Any = args) -> Any:
                    return jnp.sum(call(params, *args[1:])["h"] ** 2)

                both = [
                    jax.jit(jax.grad(lambda p, call=call: loss(call, p)))(*args[:1]) for call in (theirs.call, jitted)
                ]
                np.testing.assert_allclose(both[0]["w"], both[1]["w"], 1e-5, 1e-5)
            with np.load(folder / f"{name}.npz") as ours:
                leaves = jax.tree.leaves(wanted)
                for i, leaf in enumerate(leaves):
                    np.testing.assert_allclose(ours[f"arr_{i}"], leaf, 1e-5, 1e-6, err_msg=f"{name} {i}")
            print(f"{name}: equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
