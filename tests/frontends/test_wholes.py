"""Arguments that can be put together of arrays alone, such as distributions of TFP and distrax."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stagec
import stagec.jax as of_jax
from tests.building import build

X = np.arange(3, dtype=np.float32)


class Normal:
    """As a distribution of TFP: it converts what it gets, and keeps numbers apart."""

    def __init__(self, mean: Any, spread: Any) -> None:
        self.mean, self.spread = jnp.asarray(mean), jnp.asarray(spread)

    def density(self, x: Any) -> Any:
        return -(((x - self.mean) / self.spread) ** 2)


class Counted(Normal):
    """As one of distrax: it takes for an array what looks like one."""

    def __init__(self, mean: Any, spread: Any) -> None:
        self.mean, self.spread = mean, spread


for kind in (Normal, Counted):
    jax.tree_util.register_pytree_node(
        kind,
        lambda normal: ([part for part in (normal.mean, normal.spread) if hasattr(part, "astype")], None),
        lambda _, parts, kind=kind: kind(*parts),  # type: ignore[misc]
    )


@pytest.mark.parametrize("kind", [Normal, Counted])
def test_a_class_that_looks_at_its_arrays(kind: type[Normal]) -> None:
    def moved(given: Any, x: Any, by: int, *, more: Any) -> Any:
        (normal,) = given["normal"]
        assert isinstance(normal, kind)
        return kind(normal.mean + by, normal.spread), normal.density(x) + more.mean

    args = {"normal": [kind(jnp.zeros(3), jnp.ones(3))]}, X, 2
    kwargs = {"more": kind(jnp.ones(3), jnp.ones(3))}
    wrapped = stagec.jit(moved, static_argnums=2)
    wanted = jax.jit(moved, static_argnums=2)(*args, **kwargs)
    traced = wrapped.trace(*args, **kwargs)
    read = stagec.Exported.deserialize(traced.export().serialize())
    stored = stagec.Compiled.deserialize(wrapped.lower(*args, **kwargs).compile().serialize())
    assert [str(info.dtype) for info in jax.tree.leaves(traced.args_info)] == ["float32"] * 5
    for call in (
        wrapped,
        lambda given, x, _, more: read.call(given, x, more=more),
        lambda given, x, _, more: stored(given, x, more=more),
    ):
        for _ in range(2):
            result = call(*args, **kwargs)
            assert type(result[0]) is kind
            for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_array_equal(ours, theirs)


MODEL = """
import jax
import jax.numpy as jnp

@jax.tree_util.register_pytree_node_class
class Normal:
    def __init__(self, mean, spread):
        self.mean, self.spread = jnp.asarray(mean), jnp.asarray(spread)

    def tree_flatten(self):
        return (self.mean, self.spread), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)

def avals():
    return {"given": [Normal(jnp.zeros(3), jnp.ones(3))], "x": jax.ShapeDtypeStruct((3,), "float32")}

def density(given, x):
    return -(((x - given[0].mean) / given[0].spread) ** 2)
"""
MANIFEST = """
[manifest]
name = "m"
version = "1"
[functions.density]
entry = "normal_model:density"
avals = "normal_model:avals"
targets = ["cpu-avx2"]
vjp_order = 1
golden = {}
"""


def test_a_manifest_with_such_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "normal_model.py").write_text(MODEL)
    (tmp_path / "m.toml").write_text(MANIFEST)
    (out := tmp_path / "out").mkdir()
    with stagec.load(build("m.toml", out, tmp_path)) as bundle:
        density = bundle["density"]
        mean, spread = np.ones(3, np.float32), np.full(3, 2, np.float32)
        result = density(given=[(mean, spread)], x=X)  # without its class
        monkeypatch.syspath_prepend(tmp_path)
        import normal_model  # type: ignore[import-not-found]

        given = [normal_model.Normal(mean, spread)]
        np.testing.assert_array_equal(density(given=given, x=X), result)
        np.testing.assert_array_equal(jax.jit(normal_model.density)(given, X), result)
        gradient = jax.grad(lambda given: of_jax.function(bundle, "density")(given=given, x=X).sum())(given)
        wanted = jax.grad(lambda given: normal_model.density(given, X).sum())(given)
        np.testing.assert_allclose(gradient[0].mean, wanted[0].mean, rtol=1e-6)
