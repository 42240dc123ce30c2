"""Functions that change their arguments, or what they close over: a call that would lose the change is refused.

Modules: `frontends/jax/forwarding.py`, `frontends/common/updates.py`.
"""

from pathlib import Path

import numpy as np
import pytest

from stagec.core.sizes.avals import DTYPES
from stagec.stages.exported import Exported
from stagec.stages.lowering import lower_exported
from tests.frontends.workspace import export, spec

JAX = """
import copy

import jax
import jax.numpy as np

STATE = {"w": np.ones(3)}
"""
LIBRARIES = """
import equinox as eqx
import jax
import jax.numpy as np
import optax
from flax import nnx


def trained():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), jax.ShapeDtypeStruct((4, 3), "float32")


def squares(model, x):
    return np.mean(model(x) ** 2)


@nnx.jit
def step(model, optimizer, x):
    loss, gradient = nnx.value_and_grad(squares)(model, x)
    optimizer.update(model, gradient)
    return loss


@nnx.jit
def whole_step(model, optimizer, x):
    loss, gradient = nnx.value_and_grad(squares)(model, x)
    optimizer.update(model, gradient)
    return loss, model, optimizer


@nnx.jit
def inferred(model, optimizer, x):
    return nnx.remat(model.__class__.__call__)(model, x)


@nnx.jit
def looped(model, optimizer, x):
    kept, y = nnx.fori_loop(0, 3, lambda i, carry: (carry[0], carry[1] + carry[0](carry[1])), (model, x))
    return nnx.cond(x.sum() > 0, lambda m, z: m(z), lambda m, z: z[:, :1], model, y)


def dropped():
    return nnx.Dropout(0.5, rngs=nnx.Rngs(0)), jax.ShapeDtypeStruct((4, 3), "float32")


def applied(model, x):
    return model(x)


def normalized():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    return norm, state, jax.ShapeDtypeStruct((4, 3), "float32")


def with_state(norm, state, x):
    over = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return over(x, state)


def without_state(norm, state, x):
    return with_state(norm, state, x)[0]

"""
ARRAYS = """
import copy

import stagec_arrays.numpy as np

STATE = {"w": np.ones(3)}


def element(params, x):
    params["w"][0] = 1
    return np.sum(x)


def returned_element(params, x):
    params["w"][0] = 1
    return np.sum(x), params
"""
BOTH = """

class Set:
    def __init__(self):
        self.parts = {"w": [np.ones(3)]}

    def __call__(self, params, x):
        self.parts["w"][0] = x
        return np.sum(x)

    def method(self, params, x):
        self.w = x
        return np.sum(x)


held = Set()
method = held.method


def replaced(params, x):
    params["w"] = params["w"] - x
    return np.sum(x)


def appended(params, x):
    params["list"] = [x * 2]
    return np.sum(x)


def closed_over(params, x):
    STATE["w"] = STATE["w"] - x
    return np.sum(x)


def inside(params, x):
    return closed_over(params, x) + 1


def taken_out(params, x):
    return params.pop("w") + x


def returned(params, x):
    params["w"] = params["w"] - x
    return np.sum(x), params


def of_a_copy(params, x):
    params = copy.copy(params)
    params["w"] = params["w"] - x
    return np.sum(params["w"])
"""
COPIES = {"jax": "jax.tree.map(lambda leaf: leaf, {0})", "arrays": "copy.deepcopy({0})"}


def run(folder: Path, frontend: str, function: str, avals: str = "") -> tuple[str, bytes]:
    """Export a function of the model; return what was printed, and the artifact if there is one."""
    text = LIBRARIES if avals else {"jax": JAX, "arrays": ARRAYS}[frontend] + BOTH
    (folder / "model.py").write_text(text)
    arguments = [] if avals else [{"w": "f32[3]"}, "f32[3]"]
    asked = spec(
        entry=f"model:{function}", frontend=frontend, args=arguments, avals=f"model:{avals}" if avals else None
    )
    status, said, output = export(folder, asked)
    assert bool(status) == (not output.exists())
    return said, output.read_bytes() if output.exists() else b""


def lost(function: str, paths: str, name: str, frontend: str) -> str:
    """What is said of an argument that is changed in place."""
    names = f"{name} too, and give the next call what the result has"
    first = name.partition(",")[0]
    copied = f"{first} = {COPIES[frontend].format(first)}"
    return (
        f"pkg/m.toml: functions.f.entry: model:{function} changes {paths} in place, and a call would lose the change\n"
        f"  return {names};\n  if no caller needs the change, make it to a copy: {copied}\n"
    )


@pytest.mark.parametrize("frontend", ["jax", "arrays"])
@pytest.mark.parametrize(("function", "path"), [("replaced", "params['w']"), ("appended", "params['list'][0]")])
def test_an_argument_that_is_changed_in_place(tmp_path: Path, frontend: str, function: str, path: str) -> None:
    assert run(tmp_path, frontend, function)[0] == lost(function, path, "params", frontend)


@pytest.mark.parametrize("frontend", ["jax", "arrays"])
@pytest.mark.parametrize(
    ("function", "path"),
    [("closed_over", "STATE['w']"), ("inside", "STATE['w']"), ("held", "self.parts['w'][0]"), ("method", "self.w")],
)
def test_an_object_that_a_function_closes_over(tmp_path: Path, frontend: str, function: str, path: str) -> None:
    said, _ = run(tmp_path, frontend, function)
    assert said.startswith(f"pkg/m.toml: functions.f.entry: model:{function} changes {path} (model.py:")
    assert said.endswith(
        ") in place, and a call would lose the change\n"
        "  make it an argument, and return the new value beside the result\n"
    )


@pytest.mark.parametrize("frontend", ["jax", "arrays"])
@pytest.mark.parametrize("function", ["taken_out", "returned", "of_a_copy"])
def test_changes_that_are_not_lost(tmp_path: Path, frontend: str, function: str) -> None:
    assert run(tmp_path, frontend, function)[0] == ""


def test_elements_of_an_argument(tmp_path: Path) -> None:
    assert run(tmp_path, "arrays", "element")[0] == lost("element", "params['w']", "params", "arrays")
    assert run(tmp_path, "arrays", "returned_element")[0] == ""


def test_a_step_of_flax_that_returns_the_loss_alone(tmp_path: Path) -> None:
    paths = "model.bias.value, model.kernel.value, optimizer.step.value"
    assert run(tmp_path, "jax", "step", "trained")[0] == lost("step", paths, "model, optimizer", "jax")
    assert run(tmp_path, "jax", "applied", "dropped")[0] == lost("applied", "model.rngs.count.value", "model", "jax")


def test_a_step_of_flax_that_returns_what_it_changes(tmp_path: Path) -> None:
    said, artifact = run(tmp_path, "jax", "whole_step", "trained")
    assert said == ""
    exported = Exported.deserialize(artifact)
    rng = np.random.default_rng(0)
    leaves = [np.asarray(rng.normal(size=aval.shape), DTYPES[aval.dtype].numpy_name) for aval in exported.in_avals]
    compiled, losses = lower_exported(exported, "cpu", {}).compile(), []
    for _ in range(5):
        loss, *leaves[:-1] = compiled.call_flat(leaves)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("function", ["inferred", "looped"])
def test_what_nnx_gives_back_unchanged_is_no_change(tmp_path: Path, function: str) -> None:
    assert run(tmp_path, "jax", function, "trained")[0] == ""


@pytest.mark.parametrize("function", ["with_state", "without_state"])
def test_a_state_of_equinox_is_in_the_result_or_left_out_by_hand(tmp_path: Path, function: str) -> None:
    assert run(tmp_path, "jax", function, "normalized")[0] == ""
