"""State types of flax and equinox, and dicts with keys of any kind, in a bundle: objects, or plain containers.

Modules: `core/trees/keyed.py`, `loader/function.py`.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import stagec
from stagec.bundle.archive import Archive
from stagec.core.trees.tree import Tree
from tests.building import COMPILER, build, stagec as command

MANIFEST = """\
[manifest]
name = "states"
version = "1.0.0"

[targets.cpu]
platform = "cpu"
isa = "AVX2"
parallelism = 2

[functions.doubled]
entry = "states_of_libraries:doubled"
avals = "states_of_libraries:avals"
targets = ["cpu"]
"""
MODEL = """\
import enum

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Color(enum.Enum):
    RED = "r"
    BLUE = "b"

    def __lt__(self, other):
        return self.value < other.value


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)


class Other(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(2, rngs=rngs)


def make(rate=0.125):
    net = Net(nnx.Rngs(0))
    graph, state = nnx.split(net)
    dense = nn.Dense(2)
    params = dense.init(jax.random.key(0), jnp.ones((1, 2)))
    train = TrainState.create(apply_fn=dense.apply, params=params, tx=optax.adam(rate))
    norm, stats = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="ema")
    x = jnp.arange(2.0)
    return {
        "net": net,
        "graph": graph,
        "state": state,
        "pure": nnx.to_pure_dict(state),
        "train": train.replace(step=jnp.asarray(0)),
        "norm": eqx.filter(norm, eqx.is_array),
        "stats": stats,
        "keys": {
            "levels": {Level.LOW: x, Level.HIGH: x},
            "colors": {Color.RED: x},
            "cells": {(1, "a"): x, (0, "b"): x},
        },
    }


def avals():
    return (jax.eval_shape(make),)


def doubled(states):
    return jax.tree.map(lambda x: x * 2, states)
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, out = tmp_path_factory.mktemp("states"), tmp_path_factory.mktemp("built")
    (root / "states_of_libraries.py").write_text(MODEL)
    (root / "states.toml").write_text(MANIFEST)
    path = build("states.toml", out, root)
    shutil.copy(root / "states_of_libraries.py", out)
    return path


@pytest.fixture
def model(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(bundle.parent)
    import states_of_libraries

    return states_of_libraries


def check(result: Any, given: Any) -> None:
    assert jax.tree.structure(result) == jax.tree.structure(given)
    for found, leaf in zip(jax.tree.leaves(result), jax.tree.leaves(given), strict=True):
        np.testing.assert_array_equal(found, leaf * 2)


def test_objects_come_back_as_objects(bundle: Path, model: Any) -> None:
    doubled = stagec.load(bundle)["doubled"]
    for given in (model.make(), model.make()):
        result = doubled(given)
        check(result, given)


def test_paths_are_those_of_jax(bundle: Path, model: Any) -> None:
    paths = stagec.load(bundle)["doubled"].flat(model.make()).paths
    assert len(paths) == len(set(paths)) == len(jax.tree.leaves(model.make()))
    assert {
        "args[0]['net'].layers[1].kernel.value",
        "args[0]['state'].layers[1]['kernel'].value",
        "args[0]['pure']['layers'][1]['kernel']",
        "args[0]['train'].opt_state[0].mu['params']['kernel']",
        "args[0]['stats'][0]",
        "args[0]['keys']['levels'][Level.HIGH]",
        "args[0]['keys']['colors'][Color.RED]",
        "args[0]['keys']['cells'][(0, 'b')]",
    } <= {path.replace("['layers'][1]['kernel'].value", ".layers[1]['kernel'].value") for path in paths} | set(paths)


def changed(states: Any, which: str, value: Any) -> Any:
    return {**states, which: value}


def test_objects_with_other_static_parts_are_refused(bundle: Path, model: Any) -> None:
    doubled = stagec.load(bundle)["doubled"]
    states, other = model.make(), model.make(rate=0.5)
    without = {**states["pure"], "layers": {0: states["pure"]["layers"][0]}}
    keys = states["keys"]
    for given, text in (
        (
            changed(states, "train", other["train"]),
            "states['train']: tx.update.update_fns[1].tx.update.step_size is -0.5, it was -0.125 "
            "when the function was built",
        ),
        (
            changed(states, "net", model.Other(model.nnx.Rngs(0))),
            "states['net']: expected a states_of_libraries:Net, or a dict of its children, not a value of type Other",
        ),
        (
            changed(states, "graph", model.nnx.split(model.Other(model.nnx.Rngs(0)))[0]),
            "states['graph']: attributes is not what it was when the function was built",
        ),
        (changed(states, "pure", without), "states['pure']['layers']: key 1 is missing"),
        (
            changed(states, "keys", {**keys, "levels": {"1": np.ones(2), 2: np.ones(2)}}),
            "states['keys']['levels']: key Level.LOW is missing, unexpected key '1'",
        ),
        (
            changed(states, "keys", {**keys, "cells": {(0, "b"): np.ones(2)}}),
            "states['keys']['cells']: key (1, 'a') is missing",
        ),
    ):
        with pytest.raises(stagec.CallError) as refusal:
            doubled(given)
        assert (refusal.value.code, str(refusal.value).splitlines()[0]) == ("structure", f"doubled: {text}")


def test_static_parts_of_results_are_those_of_the_arguments(bundle: Path, model: Any) -> None:
    """Also where a call is like one before the last one, and where an object is given for that when loading."""
    doubled = stagec.load(bundle)["doubled"]
    first, second = model.make(), model.make()
    for given in (first, second, first, second):
        assert doubled(given)["train"].tx is given["train"].tx

    containers = in_plain_containers(bundle, first)
    fresh = stagec.load(bundle)["doubled"](containers)
    assert isinstance(fresh["state"], model.nnx.State)
    assert type(fresh["train"]) is dict
    result = stagec.load(bundle, types=[first])["doubled"](containers)
    assert result["train"].tx is first["train"].tx
    assert jax.tree.structure(result["net"]) == jax.tree.structure(first["net"])
    result = stagec.load(bundle, types=[])["doubled"](first)
    assert {name: type(value) for name, value in result.items()} == {**dict.fromkeys(result, dict), "stats": tuple}


def in_plain_containers(bundle: Path, states: Any) -> Any:
    index = Archive(bundle).index
    (args, _) = Tree.from_json(index["functions"]["doubled"]["in_tree"]).unflatten(jax.tree.leaves(states))
    return args[0]


def test_without_the_libraries_there_are_plain_containers(bundle: Path, model: Any, tmp_path: Path) -> None:
    given = in_plain_containers(bundle, jax.tree.map(np.asarray, model.make()))
    x = np.arange(2, dtype=np.float32)
    given["keys"] |= {"levels": {1: x, 2: x}, "colors": {"RED": x}}
    script = f"""
import sys
sys.path[:0] = {[str(COMPILER), *(entry for entry in sys.path if entry.endswith("site-packages"))]!r}
sys.modules.update(dict.fromkeys(("jax", "flax", "equinox", "optax")))
import numpy as np, stagec
from numpy import array, float32, int32
doubled = stagec.load({str(bundle)!r})["doubled"]
result = doubled({given!r})
assert result["graph"] == {{}}
print([*result["net"]], [sorted(one) for one in result["net"]["layers"]], result["net"]["layers"][1]["kernel"]["value"])
print([*result["state"]], [*result["state"]["layers"]], [*result["pure"]["layers"]])
print([*result["train"]], [type(one).__name__ for one in result["train"]["opt_state"]], type(result["stats"]).__name__)
print([*result["keys"]["levels"]], [*result["keys"]["colors"]], [*result["keys"]["cells"]])
try:
    doubled({{**{given!r}, "train": 3}})
except stagec.CallError as error:
    print(str(error).splitlines()[0])
"""
    done = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True, env={})
    assert done.returncode == 0, done.stderr
    kernel = np.asarray(given["net"]["layers"][1]["kernel"]["value"]) * 2
    assert done.stdout.splitlines() == [
        f"['layers', 'norm'] [['bias', 'kernel'], ['bias', 'kernel']] {str(kernel).splitlines()[0]}",
        *str(kernel).splitlines()[1:],
        "['layers', 'norm'] [0, 1] [0, 1]",
        "['step', 'params', 'opt_state'] ['dict', 'dict'] tuple",
        "[1, 2] ['RED'] [(0, 'b'), (1, 'a')]",
        "doubled: states['train']: expected a flax.training.train_state:TrainState, or a dict of its children, "
        "not a value of type int",
    ]


def test_a_stub_has_the_plain_containers(bundle: Path) -> None:
    done = command("stub", bundle, cwd=bundle.parent)
    assert done.returncode == 0, done.stderr
    written = (bundle.parent / "states_types.pyi").read_text() if not done.stdout else done.stdout
    layer = "DoubledStatesNetLayers0 | DoubledStatesNetLayers0Object"
    net = f"class DoubledStatesNet(TypedDict):\n    _pytree__state: NotRequired[Any]\n    layers: list[{layer}] | Any"
    assert net in written
    assert "    graph: NotRequired[DoubledStatesGraph | Any]  # flax.nnx.graphlib:GraphDef" in written
    assert "tuple[" in written[written.index("    stats: ") :].splitlines()[0]


def test_an_export_is_the_same_on_another_machine(bundle: Path, tmp_path: Path) -> None:
    """With another seed for hashes, in another folder."""
    again = tmp_path / "again.exported"
    spec = bundle.parent / "states.doubled.spec"
    folder = bundle.parent
    done = command(
        *("action", "export", "--spec", spec, "--output", again, "--lowered", f"{again}.lowered"),
        *("--description", f"{again}.json", "--import-root", folder),
        cwd=tmp_path,
        env={"PYTHONHASHSEED": "4711"},
    )
    assert done.returncode == 0, done.stderr
    assert again.read_bytes() == (folder / "states.doubled.exported").read_bytes()
    described = json.loads(Path(f"{again}.json").read_text())
    assert "static part args[0]['train']" in described["components"]
