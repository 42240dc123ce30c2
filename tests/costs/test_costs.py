"""What programs cost: as XLA:CPU compiles them, by hand, and as XLA counts them where there is no loop.

Modules: `costs/accesses.py`, `costs/operations.py`, `costs/totals.py`.
"""

import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import stagec
from examples.transformer import avals, model
from stagec.costs import operations, totals

f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
WEIGHTS, X = f32((256, 256)), f32((128, 256))
PRODUCT = 2 * 128 * 256 * 256


def compiled(function: Callable[..., Any], *arguments: Any) -> stagec.Compiled:
    """Compile for this machine's CPU."""
    made: stagec.Compiled = stagec.jit(function).lower(*arguments).compile()
    return made


def counted(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """What a function takes."""
    return dict(compiled(function, *arguments).description.analysis)


def layer(x: Any, w: Any) -> Any:
    """A dense layer."""
    return jnp.tanh(x @ w)


def scanned(weights: Any, x: Any) -> Any:
    """As many layers as there are weights."""
    return lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]


def nested(weights: Any, x: Any) -> Any:
    """Each layer five times."""
    return lax.scan(lambda x, w: (lax.fori_loop(0, 5, lambda _, x: layer(x, w), x), None), x, weights)[0]


def attention(query: Any, key: Any, value: Any) -> Any:
    """Of [sequence, position, head, element]."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def loss(weights: Any, x: Any) -> Any:
    """The sum of what `scanned` gives."""
    return scanned(weights, x).sum()


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (layer, (X, WEIGHTS), PRODUCT),
        (
            lambda x, w: jnp.einsum("bij,bjk->bik", x, w),
            (f32((16, 128, 64)), f32((16, 64, 32))),
            2 * 16 * 128 * 64 * 32,
        ),
        # Two products of all pairs of positions; the softmax between them is 3 %.
        (attention, (f32((2, 128, 8, 64)),) * 3, 2 * 2 * 2 * 8 * 128 * 128 * 64),
        (scanned, (f32((12, 256, 256)), X), 12 * PRODUCT),
        # Backwards there are two products for each.
        (jax.grad(loss), (f32((12, 256, 256)), X), 3 * 12 * PRODUCT),
        (nested, (f32((7, 256, 256)), X), 5 * 7 * PRODUCT),
        (lambda x, w: lax.fori_loop(3, 100, lambda _, x: layer(x, w), x), (X, WEIGHTS), 97 * PRODUCT),
        (lambda w, x: lax.map(lambda x: x @ w, x), (WEIGHTS, f32((9, 128, 256))), 9 * PRODUCT),
        # The larger branch, in a loop.
        (
            lambda w, x: lax.scan(lambda x, w: (lax.cond(x[0, 0] > 0, lambda: layer(x, w), lambda: x), None), x, w)[0],
            (f32((12, 256, 256)), X),
            12 * PRODUCT,
        ),
        (
            lambda i, x, w: lax.switch(i, [lambda: x, lambda: x @ w @ w @ w, lambda: x @ w]),
            (jax.ShapeDtypeStruct((), jnp.int32), X, WEIGHTS),
            3 * PRODUCT,
        ),
        (jnp.fft.fft, (jax.ShapeDtypeStruct((64, 1024), jnp.complex64),), 5 * 64 * 1024 * 10),
        (jnp.fft.rfft, (f32((64, 1024)),), 5 * 64 * 1024 * 10 / 2),
        (lambda x, w: x @ w, (jax.ShapeDtypeStruct((64, 64), jnp.complex64),) * 2, 4 * 2 * 64**3),
        (lambda x: x.sum(0), (f32((1024, 512)),), 1023 * 512),
        (jnp.sort, (f32((64, 1024)),), 64 * 1024 * 10),
        (lambda x: jax.scipy.linalg.lu_factor(x)[0], (f32((512, 512)),), 2 / 3 * 512**3),
        (jax.scipy.linalg.cholesky, (f32((512, 512)),), 1 / 3 * 512**3),
        (lambda x: jnp.linalg.qr(x, mode="r"), (f32((1024, 512)),), 2 * 1024 * 512**2 - 2 / 3 * 512**3),
        (jax.scipy.linalg.solve_triangular, (f32((512, 512)), f32((512, 64))), 512 * 512 * 64),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_operations_by_hand(function: Callable[..., Any], arguments: tuple[Any, ...], expected: float) -> None:
    found = counted(function, *arguments)
    assert found["flops"] == pytest.approx(expected, rel=0.05)
    assert found["unknown"] == []


def convolution(**settings: Any) -> Callable[[Any, Any], Any]:
    """Of [image, row, column, channel] with [row, column, channel, result]."""
    return functools.partial(
        lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"), **{"window_strides": (1, 1), **settings}
    )


@pytest.mark.parametrize(
    ("settings", "kernel"),
    [
        ({"padding": "VALID"}, (3, 3, 16, 32)),
        ({"padding": "SAME"}, (3, 3, 16, 32)),
        ({"padding": "SAME", "window_strides": (2, 3)}, (3, 5, 16, 32)),
        ({"padding": "SAME", "rhs_dilation": (2, 2)}, (3, 3, 16, 32)),
        ({"padding": ((2, 2), (1, 3)), "lhs_dilation": (2, 2)}, (3, 3, 16, 32)),
        ({"padding": "SAME", "feature_group_count": 4}, (3, 3, 4, 32)),
        ({"padding": "SAME", "feature_group_count": 16}, (3, 3, 1, 16)),
    ],
    ids=["valid", "same", "strides", "dilated", "transposed", "grouped", "depthwise"],
)
def test_convolutions_by_hand(settings: dict[str, Any], kernel: tuple[int, ...]) -> None:
    function, shape = convolution(**settings), (8, 14, 14, 16)
    result = jax.eval_shape(function, f32(shape), f32(kernel))
    pads = settings["padding"]
    if isinstance(pads, str):
        spread = [(size - 1) * by + 1 for size, by in zip(kernel, settings.get("rhs_dilation", (1, 1)), strict=False)]
        pads = lax.padtype_to_pads(shape[1:3], spread, settings.get("window_strides", (1, 1)), pads)
    pairs = 1
    for axis in range(2):
        step, base, by = (settings.get(k, (1, 1))[axis] for k in ("window_strides", "lhs_dilation", "rhs_dilation"))
        reached = (
            o * step + k * by - pads[axis][0] for o in range(result.shape[axis + 1]) for k in range(kernel[axis])
        )
        # What is in the input, and neither padding nor between its elements.
        pairs *= sum(at % base == 0 and 0 <= at // base < shape[axis + 1] for at in reached)
    assert counted(function, f32(shape), f32(kernel))["flops"] == pytest.approx(
        2 * 8 * pairs * kernel[2] * kernel[3], rel=0.01
    )


def test_a_convolution_backwards() -> None:
    forward = convolution(padding="SAME")
    shapes = f32((8, 28, 28, 16)), f32((3, 3, 16, 32))
    backward = jax.grad(lambda x, w: (forward(x, w) ** 2).sum(), argnums=(0, 1))
    assert counted(backward, *shapes)["flops"] == pytest.approx(3 * counted(forward, *shapes)["flops"], rel=0.05)


def test_positions_of_a_window() -> None:
    draw = random.Random(0)
    for _ in range(300):
        input_, kernel, output = draw.randrange(1, 12), draw.randrange(1, 6), draw.randrange(1, 12)
        stride, low, spread, by = (
            draw.randrange(1, 5),
            draw.randrange(-3, 6),
            draw.randrange(1, 5),
            draw.randrange(1, 4),
        )
        reached = [place * stride + at * by - low for place in range(output) for at in range(kernel)]
        inside = sum(at % spread == 0 and 0 <= at // spread < input_ for at in reached)
        assert operations._positions(input_, kernel, output, stride, low, spread, by) == inside


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (layer, (X, WEIGHTS)),
        (attention, (f32((2, 128, 8, 64)),) * 3),
        (jax.grad(lambda w, x: layer(layer(x, w), w).sum()), (WEIGHTS, X)),
        (convolution(padding="SAME"), (f32((8, 28, 28, 16)), f32((3, 3, 16, 32)))),
        (jax.nn.softmax, (f32((512, 512)),)),
        (lambda x: (x.sum(0), x.max(1), x.argmax(1)), (f32((512, 512)),)),
        (lambda c, x, i: lax.dynamic_update_slice(c, x, (i, 0)), (f32((512, 64)), f32((1, 64)), 3)),
        (lambda c, i: lax.dynamic_slice(c, (i, 0), (1, 64)) * 2, (f32((512, 64)), 3)),
    ],
    ids=["layer", "attention", "gradient", "convolution", "softmax", "reductions", "update", "slice"],
)
def test_without_loops_xla_counts_the_same(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    made = compiled(function, *arguments)
    found, own = made.description.analysis, made.cost_analysis()
    assert found["flops"] == own["flops"]
    assert found["bytes_accessed"] == pytest.approx(own["bytes accessed"], rel=0.001)
    assert made.description.cost_analysis["flops"] == own["flops"]


def test_a_loop_costs_what_its_turns_cost_one_after_the_other() -> None:
    weights = f32((6, 256, 256))
    rolled = counted(jax.grad(loss, argnums=(0, 1)), weights, X)

    def written_out(weights: Any, x: Any) -> Any:
        for w in weights:
            x = layer(x, w)
        return x.sum()

    flat = counted(jax.grad(written_out, argnums=(0, 1)), weights, X)
    assert rolled["flops"] == pytest.approx(flat["flops"], rel=0.01)
    assert 0.5 < rolled["bytes_accessed"] / flat["bytes_accessed"] < 2


def test_of_an_array_that_a_loop_fills_only_the_parts_are_written() -> None:
    found = counted(
        lambda x: lax.fori_loop(0, 500, lambda i, c: c.at[i].set(x * i), jnp.zeros((500, 256))), f32((256,))
    )
    array = 4 * 500 * 256
    # Zeros, then what is written into them; and the row that each turn reads.
    assert 2 * array <= found["bytes_accessed"] < 5 * array


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        (
            lambda n, x, w: lax.fori_loop(0, n, lambda _, x: layer(x, w), x),
            (jax.ShapeDtypeStruct((), jnp.int32), X, WEIGHTS),
            "how often the loop jit(<lambda>)/while turns",
        ),
        (
            lambda x, w: lax.while_loop(lambda x: x.sum() < 9, lambda x: layer(x, w), x),
            (X, WEIGHTS),
            "how often the loop jit(<lambda>)/while turns",
        ),
        (jnp.linalg.svd, (f32((64, 64)),), "what lapack_sgesdd_ffi computes"),
    ],
    ids=["bound", "condition", "custom call"],
)
def test_what_is_not_known(function: Callable[..., Any], arguments: tuple[Any, ...], reason: str) -> None:
    found = counted(function, *arguments)
    assert (found["flops"], found["bytes_accessed"], found["unknown"]) == ("unknown", "unknown", [reason])


def test_a_part_of_a_program_that_is_not_known_is_told_once() -> None:
    found = counted(lambda x: (jnp.linalg.svd(x), jnp.linalg.svd(x + 1)), f32((8, 8)))
    assert found["unknown"] == ["what lapack_sgesdd_ffi computes"]


CALLS = """
HloModule jit_f

ENTRY %main (x: f32[64,32], w: f32[32,16], k: f32[3,3,8,4], i: f32[2,10,10,8]) -> f32[64,16] {
  %x = f32[64,32]{1,0} parameter(0)
  %w = f32[32,16]{1,0} parameter(1)
  %k = f32[3,3,8,4]{3,2,1,0} parameter(2)
  %i = f32[2,10,10,8]{3,2,1,0} parameter(3)
  %o = f32[2,8,8,4]{3,2,1,0} parameter(4)
  ROOT %call = RESULT custom-call(OPERANDS), custom_call_target="TARGET", ATTRIBUTES
}
"""
CONVOLUTION = "window={size=3x3}, dim_labels=b01f_01io->b01f"
PLACES = 2 * 2 * 8 * 8 * 3 * 3 * 8 * 4


@pytest.mark.parametrize(
    ("result", "operands", "target", "attributes", "flops", "bytes_"),
    [
        (
            "(f32[64,16]{1,0}, s8[4096]{0})",
            "%x, %w",
            "__cublas$gemm",
            'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
            '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}',
            2 * 64 * 32 * 16,
            4 * (64 * 32 + 32 * 16 + 64 * 16),
        ),
        ("(f32[2,8,8,4]{3,2,1,0}, u8[0]{0})", "%i, %k", "__cudnn$convForward", CONVOLUTION, PLACES, None),
        ("(f32[2,10,10,8]{3,2,1,0}, u8[0]{0})", "%o, %k", "__cudnn$convBackwardInput", CONVOLUTION, PLACES, None),
        ("(f32[3,3,8,4]{3,2,1,0}, u8[0]{0})", "%i, %o", "__cudnn$convBackwardFilter", CONVOLUTION, PLACES, None),
        ("f32[64,32]{1,0}", "%x", "Sharding", "metadata={}", 0, 0),
        # What the author of a kernel said of it.
        (
            "f32[64,16]{1,0}",
            "%x, %w",
            "tpu_custom_call",
            'backend_config={"custom_call_config":{"body":"...","cost_estimate":{"flops":"123","transcendentals":"0",'
            '"bytes_accessed":"456"}}}',
            123,
            456,
        ),
        ("f32[64,16]{1,0}", "%x, %w", "tpu_custom_call", 'backend_config={"custom_call_config":{}}', None, None),
        ("f32[64,16]{1,0}", "%x, %w", "mine", "metadata={}", None, None),
    ],
)
def test_custom_calls(
    result: str, operands: str, target: str, attributes: str, flops: int | None, bytes_: int | None
) -> None:
    text = CALLS.replace("RESULT", result).replace("OPERANDS", operands).replace("TARGET", target)
    found = totals.count(text.replace("ATTRIBUTES", attributes), 1, lambda exchange: None)
    assert found.flops == flops
    if bytes_ is not None or flops is None:
        assert found.bytes == bytes_
    assert found.unknown == (() if flops is not None else (f"what {target} computes",))


CHOICE = """
%first (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %one = f32[4]{0} all-reduce(%x), to_apply=%add
}

%second (x.1: f32[4]) -> f32[4] {
  %x.1 = f32[4]{0} parameter(0)
  ROOT %two = f32[4]{0} collective-permute(%x.1), source_target_pairs={{0,1}}
}

ENTRY %main (y: f32[4], i: s32[], p: pred[]) -> f32[4] {
  %y = f32[4]{0} parameter(0)
  %i = s32[] parameter(1)
  %constant = s32[] constant(INDEX)
  %truth = pred[] constant(INDEX)
  ROOT %choice = f32[4]{0} conditional(%WHICH, %y, %y), BRANCHES
}
"""
BRANCHES = "branch_computations={%first, %second}"
TRUTH = "true_computation=%first, false_computation=%second"


@pytest.mark.parametrize(
    ("index", "which", "branches", "kinds"),
    [
        ("0", "constant", BRANCHES, ["all-reduce"]),
        ("1", "constant", BRANCHES, ["collective-permute"]),
        # An index of no branch is that of the last.
        ("7", "constant", BRANCHES, ["collective-permute"]),
        ("-1", "constant", BRANCHES, ["collective-permute"]),
        ("0", "i", BRANCHES, ["all-reduce", "collective-permute"]),
        ("true", "truth", TRUTH, ["all-reduce"]),
        ("false", "truth", TRUTH, ["collective-permute"]),
        ("true", "i", TRUTH, ["all-reduce", "collective-permute"]),
    ],
)
def test_branches_that_never_run_do_not_count(index: str, which: str, branches: str, kinds: list[str]) -> None:
    text = CHOICE.replace("INDEX", index).replace("WHICH", which).replace("BRANCHES", branches)
    assert list(totals.count(text, 2, lambda exchange: 0.0).collectives) == kinds


def test_of_branches_the_larger_counts_for_each_figure() -> None:
    text = CHOICE.replace("INDEX", "0").replace("WHICH", "i").replace("BRANCHES", BRANCHES)
    seconds = {"all-reduce": 2.0, "collective-permute": 3.0}
    found = totals.count(text, 2, lambda exchange: seconds[exchange.kind])
    # The sum of the all-reduce, and the time of the permutation.
    assert (found.flops, found.seconds) == (4, 3.0)


SIZES = {"vocabulary": 1024, "width": 512, "layers": 8, "heads": 8, "kv_heads": 4, "head": 64, "hidden": 2048}


def test_a_train_step_of_a_transformer_over_layers_in_a_scan() -> None:
    sequences, length = 4, 256
    state, tokens = avals._state(SIZES), jax.ShapeDtypeStruct((sequences, length), jnp.int32)
    found = counted(lambda *given: jax.tree.leaves(model.train_step(*given)), state, tokens, f32(()))
    count, layers, width, hidden = sequences * length, SIZES["layers"], SIZES["width"], SIZES["hidden"]
    projections = 2 * width * SIZES["head"] * (SIZES["heads"] + SIZES["kv_heads"])
    perceptron = 3 * width * hidden
    forward = 2 * count * (layers * (projections + perceptron) + width * SIZES["vocabulary"])
    pairs = 2 * 2 * count * length * SIZES["heads"] * SIZES["head"] * layers
    # Backwards twice as much, and what a layer keeps nothing of, but for its last product, once more.
    again = 2 * count * layers * (projections + perceptron - width * hidden) + pairs
    assert found["flops"] == pytest.approx(3 * (forward + pairs) + again, rel=0.05)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert found["flops"] > 6 * parameters * count
    assert found["unknown"] == []
