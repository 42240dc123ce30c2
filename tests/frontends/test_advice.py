"""What JAX traces and no artifact holds is refused with what to write instead."""

from pathlib import Path

import pytest

from stagec.manifest.values import read_constraint
from tests.frontends.exporting import export, spec

MODEL = """
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas
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


def interrupted(x):
    raise KeyboardInterrupt

"""
REFERENCE = "  a program takes and gives arrays: make the reference inside, jax.new_ref(x), and return ref[...]\n"
KEY = "of an implementation of your own (key<mine>)\n  pass its words, jax.random.key_data(key), and write "
KEY += "jax.random.wrap_key_data(words, impl=...) inside\n"
REFUSED = {
    "reads given_reference": f"functions.f.avals: model:given_reference returned a mutable reference\n{REFERENCE}",
    "gives_reference": REFERENCE,
    "token": "functions.f: a result is a token (AbstractToken())\n"
    "  order operations inside one program; take and return only arrays\n",
    "own_key": f"functions.f: a result is a PRNG key {KEY}",
    "draws given_key": f"functions.f: an argument is a PRNG key {KEY}",
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


@pytest.mark.parametrize("function", ["uses_reference", "dependent", "partitioned"])
def test_what_an_artifact_holds(model: Path, function: str) -> None:
    assert export(model, spec(entry=f"model:{function}", args=["f32[4]"]))[:2] == (0, "")


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
