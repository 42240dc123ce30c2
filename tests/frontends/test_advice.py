"""What JAX traces and no artifact holds is refused with what to write instead."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagec
from stagec.manifest.values import read_constraint
from tests.frontends.workspace import export, spec

MODEL = """
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import checkify, pallas
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import random

IMPLEMENTATION = random.define_prng_impl(
    key_shape=(2,),
    seed=lambda seed: jnp.stack([seed.astype("uint32")] * 2),
    split=lambda key, shape: jnp.broadcast_to(key, (*shape, 2)),
    random_bits=lambda key, width, shape: jnp.zeros(shape, f"uint{width}"),
    fold_in=lambda key, data: key,
    name="mine",
    tag="mine",
)


def given_reference():
    return (jax.new_ref(jnp.ones(4)),)


def reads(reference):
    return reference[...]


def gives_reference(x):
    return jax.new_ref(x)


def uses_reference(x):
    reference = jax.new_ref(x)
    reference[...] += 1
    return reference[...]


def token(x):
    return x, lax.create_token(x)


def own_key(x):
    return jax.random.key(0, impl=IMPLEMENTATION)


def given_key():
    return (jax.random.key(0, impl=IMPLEMENTATION),)


def draws(key):
    return jax.random.normal(key, (3,))


@custom_partitioning
def parted(x):
    return jnp.sin(x)


parted.def_partition(
    partition=lambda mesh, args, result: (mesh, jnp.sin, args[0].sharding, (args[0].sharding,)),
    infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
    sharding_rule="i -> i",
)


def partitioned(x):
    return parted(x)


def kernel(x):
    def double(source, target):
        target[...] = source[...] * 2

    return pallas.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def dependent(x):
    return lax.platform_dependent(x, tpu=kernel, default=lambda x: x * 2)


def narrow(x):
    return x.astype(jnp.int2)


def narrow_inside(x):
    return x.astype(jnp.int2).astype(jnp.int4)


def given_narrow():
    return (jnp.zeros(4, jnp.uint2),)


def checks(x):
    checkify.check(x.sum() > 0, "too small: {}", x)
    return x


def gives_error(x):
    return checkify.checkify(checks)(x)


def inspects(x):
    jax.debug.inspect_array_sharding(x, callback=print)
    return x


@functools.partial(jax.jit, static_argnums=(1, 2))
def padded(x, width, mode):
    return jnp.pad(x, width, mode=mode)


def given_mode():
    return jnp.ones(4), 2, "reflect"


def given_width():
    return {"x": jnp.ones(4), "width": 2, "mode": "reflect"}


def scaled(x, factor, y):
    return x * factor + y


def convolved(x):
    return lax.conv(x[None], jnp.ones((8, 3, 3, 3)), (1, 1), "SAME")


def larger(x):
    return x if x.shape[1] > 4 else x[:, :4]


def breaks(x):
    raise ValueError("w is the width")


def interrupted(x):
    raise KeyboardInterrupt

"""
REFERENCE = "  a program takes and gives arrays: make the reference inside, jax.new_ref(x), and return ref[...]\n"
KEY = "of an implementation of your own (key<mine>)\n  pass its words, jax.random.key_data(key), and write "
KEY += "jax.random.wrap_key_data(words, impl=...) inside\n"
CHECKS = "  an error of checkify has messages and call stacks of the process that traced it:\n"
CHECKS += "  return what it checks as a result instead, such as x.sum() > 0 or jnp.isfinite(x).all()\n"
NARROW = (
    "which jax.export has not in its format\n  take and return {0}int4, and convert inside: x.astype(jnp.{0}int2)\n"
)
REFUSED = {
    "reads given_reference": f"functions.f.avals: model:given_reference returned a mutable reference\n{REFERENCE}",
    "gives_reference": REFERENCE,
    "token": "functions.f: a result is a token (AbstractToken())\n"
    "  order operations inside one program; take and return only arrays\n",
    "own_key": f"functions.f: a result is a PRNG key {KEY}",
    "draws given_key": f"functions.f: an argument is a PRNG key {KEY}",
    "narrow": f"functions.f: a result is int2, {NARROW.format('')}",
    "reads given_narrow": f"functions.f: an argument is uint2, {NARROW.format('u')}"
    f"pkg/m.toml: functions.f: a result is uint2, {NARROW.format('u')}",
    "checks": CHECKS,
    "gives_error": "[0] is a jaxlib._jax.Traceback, which means nothing in another process\n" + CHECKS,
    "inspects": "functions.f: model.py:105: a host callback (inspect_sharding) cannot be built ahead of time\n"
    '  write host_callbacks = "drop" to build the function without it, or take it out\n',
    "padded given_mode": "returned leaves that are not avals: [2] is a str\n"
    "  return the positional arguments as a tuple, or keyword arguments as a dict, of jax.ShapeDtypeStruct\n"
    '  write static = { mode = "reflect" } in the manifest, and leave it out here; '
    "also what your jax.jit has in static_argnums\n",
    "padded given_width": "returned leaves that are not avals: ['mode'] is a str\n"
    "  return the positional arguments as a tuple, or keyword arguments as a dict, of jax.ShapeDtypeStruct\n"
    '  write static = { mode = "reflect" } in the manifest, and leave it out here; '
    "also what your jax.jit has in static_argnums\n",
    "partitioned": "  custom_partitioning asks a Python function while XLA partitions, and an artifact holds none:\n"
    "  write jax.shard_map over the mesh, or jax.lax.with_sharding_constraint\n",
    "dependent": "  JAX lowers a function, and each branch of lax.platform_dependent, for all of its platforms,\n"
    "  and a Pallas kernel is for devices: write another function in the manifest for targets with platform cpu\n",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


@pytest.mark.parametrize("function", REFUSED)
def test_what_to_write_instead(model: Path, function: str) -> None:
    entry, _, avals = function.partition(" ")
    asked = {"entry": f"model:{entry}", "args": [] if avals else ["f32[4]"]}
    if avals:
        asked["avals"] = f"model:{avals}"
    if entry == "partitioned":
        asked |= {"mesh": [["data", 2]], "in_shardings": ["P(data)"]}
    if entry == "dependent":
        asked["platforms"] = ["cpu", "tpu"]
    status, said, _ = export(model, spec(**asked))
    assert status == 2
    assert said.startswith("pkg/m.toml: functions.f")
    assert said.endswith(REFUSED[function])


@pytest.mark.parametrize("function", ["uses_reference", "dependent", "partitioned", "narrow_inside"])
def test_what_an_artifact_holds(model: Path, function: str) -> None:
    assert export(model, spec(entry=f"model:{function}", args=["f32[4]"]))[:2] == (0, "")


STATIC: list[tuple[dict[str, Any], str]] = [
    (
        {"entry": "model:padded", "args": ["f32[4]", "i32[]"], "static": {"mode": "reflect"}},
        "  what static_argnums or static_argnames of your jax.jit name is a constant of a program, and no argument:\n"
        "  write static = { NAME = VALUE } in the manifest, and leave it out of args, kwargs and avals\n",
    ),
    (
        {"entry": "model:padded", "args": ["f32[4]"], "static": {"mode": "reflect"}},
        "functions.f: the arguments do not fit model:padded(x, width, mode): missing a required argument: 'width'\n"
        "  name it in args, in kwargs or in what avals returns; other values, in static\n",
    ),
    (
        {"entry": "model:scaled", "args": ["f32[4]", "f32[4]"], "static": {"factor": 2}},
        "functions.f: the arguments do not fit model:scaled(x, factor, y): multiple values for argument 'factor'\n"
        "  write the arguments behind it in kwargs\n",
    ),
]


@pytest.mark.parametrize(("asked", "told"), STATIC)
def test_static_arguments_are_named(model: Path, asked: dict[str, Any], told: str) -> None:
    status, said, _ = export(model, spec(**asked))
    assert status == 2
    assert said.endswith(told)


def test_what_the_advice_about_static_arguments_says(model: Path) -> None:
    whole = {"entry": "model:padded", "args": ["f32[4]"], "static": {"mode": "reflect", "width": 2}}
    assert export(model, spec(**whole))[:2] == (0, "")
    behind = {"entry": "model:scaled", "args": ["f32[4]"], "kwargs": {"y": "f32[4]"}, "static": {"factor": 2}}
    assert export(model, spec(**behind))[:2] == (0, "")


NAMED: dict[str, str] = {
    "convolved": "pkg/m.toml: functions.f: sizes with names stand for all sizes: c\n"
    "  write a number instead of one that the function must know\n",
    "larger": "pkg/m.toml: functions.f: sizes with names stand for all sizes: h\n"
    '  write a number instead of one that the function must know, or constraints = ["h > 4"] if that holds for all\n',
    "breaks": "  ValueError: w is the width\n",
}


@pytest.mark.parametrize("function", NAMED)
def test_sizes_that_a_function_must_know(model: Path, function: str) -> None:
    """As jaxtyping's annotations have them, such as "c h w"."""
    status, said, _ = export(model, spec(entry=f"model:{function}", args=["f32[c,h,w]"]))
    assert status == 2
    assert said.endswith(NAMED[function])


def test_what_the_advice_about_sizes_says(model: Path) -> None:
    assert export(model, spec(entry="model:convolved", args=["f32[3,h,w]"]))[:2] == (0, "")
    assert export(model, spec(entry="model:larger", args=["f32[c,h,w]"], constraints=["h >= 5"]))[:2] == (0, "")


@pytest.mark.parametrize(
    ("constraints", "key", "told"),
    [
        (["h >= 5", "h <= 4"], "", "ValueError: Unsatisfiable constraint: h <= 4"),
        (["5 >= 6"], ".constraints", "ValueError: Unsatisfiable explicit constraint: 5 >= 6"),
    ],
)
def test_constraints_that_no_sizes_fulfil(model: Path, constraints: list[str], key: str, told: str) -> None:
    status, said, _ = export(model, spec(entry="model:larger", args=["f32[c,h,w]"], constraints=constraints))
    assert status == 2
    assert said.startswith(f"pkg/m.toml: functions.f{key}: ")
    assert told in said


@pytest.mark.parametrize("name", ["token", "own_key", "narrow"])
def test_jit_says_the_same(model: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.syspath_prepend(str(model))
    function = getattr(importlib.import_module("model"), name)
    what, write = REFUSED[name].removeprefix("functions.f: ").splitlines()
    with pytest.raises(TypeError) as error:
        stagec.jit(function)(np.ones(4, np.float32))
    assert str(error.value) == f"{name}: {what}; {write.strip()}"


def test_an_interrupt_is_no_mistake_of_the_model(model: Path) -> None:
    status, said, output = export(model, spec(entry="model:interrupted"))
    assert "tracing" not in said
    assert "KeyboardInterrupt: " not in said
    assert status != 0
    assert not output.exists()


@pytest.mark.parametrize(
    ("aval", "constraint", "for_jax"),
    [
        ("f32[batch,3]", "batch % 2 == 0", "mod(batch, 2) == 0"),
        ("f32[3*batch+1,3]", "mod(3*batch + 1, 2) == 0", "mod(3*batch + 1, 2) == 0"),
    ],
)
def test_a_symbolic_size_that_is_split(tmp_path: Path, aval: str, constraint: str, for_jax: str) -> None:
    (tmp_path / "model.py").write_text("def double(x):\n    return x * 2\n")
    split = {"entry": "model:double", "args": [aval], "mesh": [["data", 2]], "in_shardings": ["P(data)"]}
    status, said, _ = export(tmp_path, spec(**split))
    assert status == 2
    assert said.splitlines()[-1] == (
        f'  write constraints = ["{constraint}"]; if Python makes the arguments, '
        f'symbolic_shape(..., constraints=["{for_jax}"])'
    )
    assert export(tmp_path, spec(**split, constraints=[read_constraint(constraint)]))[:2] == (0, "")
    assert export(tmp_path, spec(**split, constraints=[for_jax]))[:2] == (0, "")


def test_an_example_with_a_mask(tmp_path: Path) -> None:
    """It stands for shape and dtype, but what it is an example of is not an array."""
    (tmp_path / "model.py").write_text(
        "import numpy as np\ndef double(x):\n    return x * 2\navals = {'x': np.ma.array([1.0, 2.0], mask=[0, 1])},\n"
    )
    status, said, _ = export(tmp_path, spec(entry="model:double", args=[], avals="model:avals"))
    assert status == 2
    assert said.splitlines()[0] == (
        "pkg/m.toml: functions.f.avals: model:avals returned leaves that are not avals: [0]['x'] is a MaskedArray"
    )
