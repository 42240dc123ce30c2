"""Static arguments, numbers in state types and children without arrays, in bundles of both frontends.

Modules: `loader/function.py`, `loader/variant.py`.
"""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

import stagec
from tests.building import COMPILER, build, stagec as command, write_specs

MODEL = """
import dataclasses
import typing

import {numpy} as xp
from {trees} import register_dataclass


@register_dataclass
@dataclasses.dataclass
class State:
    x: typing.Any
    step: int
    kind: int = dataclasses.field(default=1, metadata={{"static": True}})


class Options(typing.NamedTuple):
    rate: float
    on: bool = True


@register_dataclass
@dataclasses.dataclass
class Nothing:
    name: str = dataclasses.field(default="n", metadata={{"static": True}})


@register_dataclass
@dataclasses.dataclass
class Flow:
    shift: typing.Any
    base: typing.Any = None
    parts: typing.Any = ()
    table: typing.Any = dataclasses.field(default_factory=dict)
    kind: typing.Any = dataclasses.field(default_factory=Nothing)


def told(x, p=0):
    return x * 0 + {{"1": 1.0, "1.0": 2.0, "True": 3.0, "(1,)": 4.0, "(1.0,)": 5.0}}[repr(p)]


def step(state, options, table):
    return State(state.x * options.rate, state.step + 1, state.kind), table["n"] * 2, options.on


def step_example():
    return State(xp.ones(3), 1), Options(0.5), {{"n": 3}}


def shaped(state, options, table):
    return xp.ones((state.step,))


def flow(flow, more, *, mask=None):
    return Flow(flow.shift * 2), more["x"] + 1


def flow_example():
    return {{"flow": Flow(xp.ones(3)), "more": {{"x": xp.ones(3), "none": None, "empty": {{"a": ()}}}}, "mask": None}}
"""
KEYED = """

@jax.tree_util.register_pytree_with_keys_class
class Keyed:
    def __init__(self, shift, base=None, parts=()):
        self.children = shift, base, parts

    def tree_flatten_with_keys(self):
        names = map(jax.tree_util.GetAttrKey, ("shift", "base", "parts"))
        return list(zip(names, self.children)), ("keyed", 1)

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@jax.tree_util.register_pytree_node_class
class Unkeyed(Keyed):
    def tree_flatten(self):
        return self.children, None


def keyed(one, other):
    return one.children[0] * 2, other.children[0] * 3


def keyed_example():
    return Keyed(xp.ones(3)), Unkeyed(xp.ones(3))
"""
MANIFEST = """
[manifest]
name = "m"
version = "1"
[functions.told]
entry = "{model}:told"
args = ["f32[3]"]
targets = ["cpu-avx2"]
[functions.told.variants]
int.static = {{ p = 1 }}
float.static = {{ p = 1.0 }}
bool.static = {{ p = true }}
ints.static = {{ p = [1] }}
floats.static = {{ p = [1.0] }}
"""
FUNCTION = """
[functions.{name}]
entry = "{model}:{name}"
avals = "{model}:{name}_example"
targets = ["cpu-avx2"]
"""
X = np.arange(3, dtype=np.float32)
FRONTENDS = {"jax": ("jax.numpy", "jax.tree_util"), "arrays": ("stagec_arrays.numpy", "stagec_arrays")}


@pytest.fixture(scope="module", params=FRONTENDS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    frontend, root = request.param, tmp_path_factory.mktemp("statics")
    numpy, trees = FRONTENDS[frontend]
    model, names = f"statics_of_{frontend}", ["step", "flow"]
    text = MODEL.format(numpy=numpy, trees=trees)
    if frontend == "jax":
        text, names = "import jax\n" + text + KEYED, [*names, "keyed"]
    (root / f"{model}.py").write_text(text)
    manifest = MANIFEST + "".join(FUNCTION.format(name=name, model=model) for name in names)
    manifest = manifest.format(model=model)
    if frontend == "arrays":
        manifest = manifest.replace("targets =", 'frontend = "arrays"\ntargets =')
    (root / "m.toml").write_text(manifest)
    return build("m.toml", tmp_path_factory.mktemp("built"), root), model


@pytest.fixture
def bundle(built: tuple[Path, str]) -> stagec.Bundle:
    return stagec.load(built[0])


def test_the_type_of_a_static_argument_chooses(bundle: stagec.Bundle) -> None:
    told = bundle["told"]
    for _ in range(2):
        for number, value in enumerate((1, 1.0, True, (1,), (1.0,)), 1):
            assert told(X, p=value)[0] == number
        assert told(X, p=[1])[0] == 4  # a list is what TOML has for a tuple
        for value in (2, 2.0, False, np.int32(1), np.float64(1), (True,)):
            with pytest.raises(stagec.CallError) as refusal:
                told(X, p=value)
            assert refusal.value.code == "static"
            assert str(refusal.value).startswith(f"told was not built with p={value!r}, but with p=True; p=1.0; ")
    one = told.variants["int"]
    assert one(X, p=1)[0] == 1
    with pytest.raises(stagec.CallError, match=r"told-int was not built with p=1.0, but with p=1"):
        one(X, p=1.0)


def test_numbers_of_an_example_are_arguments(built: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = next(path for path in built[0].parent.parent.glob("statics*") if (path / f"{built[1]}.py").exists())
    monkeypatch.syspath_prepend(folder)
    model = __import__(built[1])
    step = stagec.load(built[0])["step"]
    for number in (1, 2, 3, 5, 1):
        state, doubled, on = step(model.State(X, number), model.Options(number / 2, number > 1), {"n": number})
        assert (state.step, doubled, on, state.kind) == (number + 1, 2 * number, number > 1, 1)
        np.testing.assert_array_equal(state.x, X * number / 2)
        state, doubled, _ = step({"x": X, "step": number}, {"rate": number / 2, "on": False}, {"n": number})
        assert (np.asarray(state.step), doubled) == (number + 1, 2 * number)
    state = model.State(X, 0)
    for number in range(4):  # a loop goes on
        assert np.asarray(state.step) == number
        state, _, _ = step(state, model.Options(1.0), {"n": 0})
    for kind in (1.0, True, 2, 1.0):
        with pytest.raises(stagec.CallError, match=rf"step: state: kind is {kind}, it was 1 when the function was"):
            step(model.State(X, 1, kind), model.Options(1.0), {"n": 0})


def test_children_without_arrays_may_be_left_out(bundle: stagec.Bundle) -> None:
    whole = {"shift": X, "base": None, "parts": (), "table": {}, "kind": {"name": "n"}}
    more = {"x": X, "none": None, "empty": {"a": ()}}
    for flow in (whole, {"shift": X}, {"shift": X, "parts": ()}, {"shift": X, "kind": {}}):
        for given in (more, {"x": X}, {"x": X, "empty": {}}):
            for named in ({"mask": None}, {}):
                _, plus = bundle["flow"](flow=flow, more=given, **named)
                np.testing.assert_array_equal(plus, X + 1)
    for wrong, text in (
        ({"base": None}, "shift is missing"),
        ({"shift": X, "bass": None}, "unexpected key 'bass'"),
        ({"shift": X, "base": X}, "expected None"),
        ({"shift": X, "kind": {"name": "m"}}, "name is 'm', it was 'n'"),
    ):
        for _ in range(2):
            with pytest.raises(stagec.CallError, match=text):
                bundle["flow"](flow=wrong, more=more)
    if "keyed" in bundle:
        for one in ({"shift": X}, {"shift": X, "parts": ()}, {"shift": X, "base": None, "parts": ()}):
            for other in ((X,), (X, None, ())):
                first, second = bundle["keyed"](one, other)
                np.testing.assert_array_equal(first, X * 2)
                np.testing.assert_array_equal(second, X * 3)


def test_a_number_that_a_function_wants_as_a_constant(tmp_path: Path) -> None:
    numpy, trees = FRONTENDS["jax"]
    (tmp_path / "shapes.py").write_text(MODEL.format(numpy=numpy, trees=trees))
    manifest = MANIFEST.partition("[functions")[0] + FUNCTION.format(name="shaped", model="shapes")
    (tmp_path / "m.toml").write_text(manifest.replace("shaped_example", "step_example"))
    write_specs("m.toml", tmp_path, tmp_path)
    outputs = ["--output", tmp_path / "x", "--description", tmp_path / "y", "--lowered", tmp_path / "z"]
    done = command(
        "action", "export", "--spec", tmp_path / "m.shaped.spec", *outputs, "--import-root", tmp_path, cwd=tmp_path
    )
    assert "m.toml: functions.shaped.avals: numbers in what shapes:step_example returned are arguments" in done.stderr
    assert "[0].step is 1, [1].rate is 0.5, [1].on is True, [2]['n'] is 3\n" in done.stderr
    assert "one that must stay constant is a keyword argument in static, or a static field of its class" in done.stderr


def test_without_the_classes(built: tuple[Path, str]) -> None:
    script = """
    import sys
    sys.modules["jax"] = None
    import numpy as np
    import stagec
    step = stagec.load(sys.argv[1])["step"]
    for number in (1, 5):
        given = {"x": np.ones(3, np.float32), "step": number}, {"rate": 2.0, "on": True}, {"n": number}
        state, doubled, on = step(*given)
        print(int(state["step"]), int(doubled), bool(on))
    """
    path: list[Any] = [str(COMPILER), *(entry for entry in sys.path if entry.endswith("site-packages"))]
    done = subprocess.run(
        [sys.executable, "-B", "-s", "-c", dedent(script), built[0]],
        env={"PYTHONPATH": ":".join(path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "2 2 True\n6 10 True\n", done.stderr
