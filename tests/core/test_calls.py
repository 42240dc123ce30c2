"""Calls as a person writes them: trees by paths, folded where they repeat.

Modules: `core/trees/folding.py`.
"""

from textwrap import dedent
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from stagec.core.messages.calls import Call
from stagec.core.sizes.avals import Aval, parse_aval
from stagec.core.trees.folding import fold
from stagec.core.trees.tree import LEAF, Tree
from stagec.frontends.jax.pytrees import to_tree


def rows(value: Any, path: str = "") -> list[str]:
    """The rows of a tree whose leaves are what is said of them."""
    leaves, structure = jax.tree.flatten(value)
    return [f"{row.path} {row.what}" for row in fold(to_tree(structure), leaves, path)]


class Point(NamedTuple):
    x: Any
    y: Any


def test_equal_elements_of_a_sequence_are_one() -> None:
    layer = {"b": "f32[2]", "w": "f32[2,2]"}
    assert rows({"layers": [layer] * 12}, "params") == [
        "params.layers list of 12",
        "params.layers[0..11].b f32[2]",
        "params.layers[0..11].w f32[2,2]",
    ]
    assert rows([layer, layer, {"b": "f32[2]"}, layer], "p") == [
        "p list of 4",
        "p[0..1,3].b f32[2]",
        "p[0..1,3].w f32[2,2]",
        "p[2].b f32[2]",
    ]
    assert rows(tuple([{"w": "a"}, {"w": "b"}] * 3), "p") == [
        "p tuple of 6",
        "p[0..4 step 2].w a",
        "p[1..5 step 2].w b",
    ]


def test_leaves_are_one_where_their_numbers_follow() -> None:
    assert rows(["a", "b", "a", "b"], "p") == ["p list of 4", "p[0] a", "p[1] b", "p[2] a", "p[3] b"]
    assert rows(["a", "a", "b", "a", "a"], "p") == ["p list of 5", "p[0..1] a", "p[2] b", "p[3..4] a"]


def test_keys_with_numbers_come_as_people_count() -> None:
    layers = {f"layer_{i}": {"w": "a"} for i in range(12)}
    assert rows(layers) == ["layer_{0..11}.w a"]
    assert rows({**layers, "layer_2": {"w": "b"}, "head": {"w": "c"}}) == [
        "head.w c",
        "layer_{0..1,3..11}.w a",
        "layer_2.w b",
    ]
    assert rows({f"w{i}": f"f32[{i}]" for i in (1, 2, 10)}) == ["w1 f32[1]", "w2 f32[2]", "w10 f32[10]"]


def test_several_numbers_of_a_key() -> None:
    blocks = {f"stage{i}_block{j}": {"w": "a"} for i in range(3) for j in range(1, 5)}
    assert rows(blocks) == ["stage{0..2}_block{1..4}.w a"]
    assert rows({**blocks, "stage2_block4": {"w": "b"}}) == [
        "stage{0..2}_block{1..3}.w a",
        "stage{0..1}_block4.w a",
        "stage2_block4.w b",
    ]


def test_numbers_with_zeros_in_front() -> None:
    assert rows({f"w_{i:02}": "a" for i in range(8, 12)}) == ["w_{08..11} a"]
    assert rows({"w_1": "a", "w_01": "a"}) == ["w_01 a", "w_1 a"]


def test_keys_of_any_length_take_no_time() -> None:
    many = {"a1" * 50_000 + f"a{i}": "a" for i in range(3)}
    assert len(rows(many)) == 3
    assert len(rows({"a" + "9" * 5000: "a", "a" + "8" * 5000: "a"})) == 2


def test_folds_are_nested() -> None:
    attention = {name: {"b": "f32[2]"} for name in ("query", "key", "value")}
    encoder = {"encoder": {"layers": [{"attention": attention}] * 3}}
    assert rows({"mu": encoder, "nu": encoder, "count": "i32[]"}) == [
        "count i32[]",
        "{mu,nu}.encoder.layers list of 3",
        "{mu,nu}.encoder.layers[0..2].attention.{key,query,value}.b f32[2]",
    ]


def test_what_is_no_dict_says_what_it_is() -> None:
    value = {"point": Point("a", ["b", None]), "empty": {}, "pair": (), "no name": "c", "list": []}
    assert rows(value, "x") == [
        "x dict",
        "x.empty {}",
        "x.list []",
        "x.pair ()",
        f"x.point {__name__}:Point",
        "x.point.x a",
        "x.point.y list of 2",
        "x.point.y[0] b",
        "x.point.y[1] None",
        "x['no name'] c",
    ]
    assert rows("f32[3]", "x") == ["x f32[3]"]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        attention = nn.MultiHeadDotProductAttention(num_heads=12, name="attention")
        x = x + attention(nn.LayerNorm(name="norm_1")(x))
        up, down = nn.Dense(3072, name="up"), nn.Dense(768, name="down")
        return x + down(nn.gelu(up(nn.LayerNorm(name="norm_2")(x))))


class Bert(nn.Module):
    """A transformer of the size of BERT (base), as flax's own examples write it."""

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(30522, 768, name="embed")(tokens)
        for i in range(12):
            x = Block(name=f"layers_{i}")(x)
        return nn.Dense(30522, name="head")(nn.LayerNorm(name="norm")(x))


def test_a_training_state_of_a_real_model_is_a_page() -> None:
    params = jax.eval_shape(Bert().init, jax.random.key(0), jax.ShapeDtypeStruct((1, 128), jnp.int32))
    state = params, jax.eval_shape(optax.adamw(1e-3).init, params)
    leaves, structure = jax.tree.flatten(state)
    avals = [f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for leaf in leaves]
    assert len(leaves) == 592
    folded = fold(to_tree(structure), avals, "state")
    assert len(folded) == 35
    assert ("state[0].params.layers_{0..11}.attention.{key,query,value}.kernel", "float32[768,12,64]") in folded
    assert ("state[1][0].{mu,nu}.params.layers_{0..11}.norm_{1..2}.scale", "float32[768]") in folded


def call(**given: Any) -> Call:
    trees: Any = (Tree("tuple", (LEAF, LEAF, LEAF)), Tree("dict", (LEAF, LEAF), ("mask", "scale")))
    avals = [parse_aval(text) for text in ("f32[2]", "f32[3]", "key<fry>[4]", "bool[n]", "f32[]")]
    return Call("f", Tree("tuple", trees), avals, LEAF, [Aval("f32", ("n",))], **given)


def test_the_signature_is_what_python_shows() -> None:
    assert call().signature == "f(args[0], args[1], args[2], /, *, mask, scale) -> f32[n]"
    assert call(parameters=("x", "*rest")).signature == "f(x, /, *rest, mask, scale) -> f32[n]"
    given = {"parameters": ("w", "x", "key"), "bound": {0: "w.safetensors:a"}, "filled": ("mask",)}
    assert call(**given, static={"n": 3, "mode": "fast"}).signature == (
        "f([w], x, key, /, *, mask=..., scale, n=3, mode='fast') -> f32[n]"
    )


def test_arguments_are_marked() -> None:
    given = {"parameters": ("w", "x", "key"), "bound": {0: "w.safetensors:a"}, "filled": ("mask",)}
    assert call(**given, donated=[False, True, False, False, False]).as_text() == dedent("""\
        f([w], x, key, /, *, mask=..., scale) -> f32[n]
          w      f32[2]  bound to w.safetensors
          x      f32[3]  donated
          key    u32[4,2] (key<fry>[4])
          mask   bool[n]  made by the loader where you leave it out
          scale  f32[]
        """)


def test_a_message_has_the_argument_that_it_is_about_and_no_more_than_fits() -> None:
    assert call(parameters=("w",)).path("args[0]['b'][1]") == "w['b'][1]"
    assert call(parameters=("w",)).path("args[1].b") == "args[1].b"
    assert call().path("kwargs['mask']") == "mask"
    assert call().after("args[1]").splitlines()[2:] == ["    args[1]  f32[3]"]
    assert call().after(most=2).splitlines()[2:] == [
        "    args[0]  f32[2]",
        "    args[1]  f32[3]",
        "    ... and 3 rows more, which stagec inspect shows",
    ]


def test_a_structure_that_is_no_call() -> None:
    """An artifact that JAX did not make may have any."""
    assert (
        Call("f", LEAF, [Aval("f32", ())], Tree("none"), []).as_text()
        == "f(arguments, /) -> None\n  arguments  f32[]\n"
    )
