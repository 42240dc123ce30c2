"""Convolutions as products give what JAX's convolutions give, for drawn sizes and settings.

Modules: backends/gpu/convolutions.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jaxlib import _jax, xla_client

from stagec.backends.gpu import convolutions

LETTERS = "XYZ"


def products(function: Callable[..., Any], *args: Any) -> tuple[str, np.ndarray]:
    """Return the module of `function` with products in place of convolutions, and its result on a CPU."""
    module = jax.jit(function, keep_unused=True).lower(*args).compiler_ir("stablehlo")
    with module.context:
        assert convolutions.as_products(module) == 0
        module.operation.verify()
        text = str(module)
    device = jax.devices("cpu")[0]
    program = device.client.compile_and_load(text, _jax.DeviceList((device,)), xla_client.CompileOptions())
    arrays = [jax.device_put(arg, device) for arg in args]
    return text, np.asarray(program.execute_sharded(arrays).disassemble_into_single_device_arrays()[0][0])


def left(function: Callable[..., Any], *args: Any) -> int:
    """Return how many convolutions of `function` are left."""
    module = jax.jit(function, keep_unused=True).lower(*args).compiler_ir("stablehlo")
    with module.context:
        return convolutions.as_products(module)


def assert_equal(function: Callable[..., Any], *args: Any) -> str:
    """Assert that the products of `function` give what it gives itself; return their module."""
    text, result = products(function, *args)
    # A pass of XLA ends the process for some convolutions with groups of the batch.
    wanted = np.asarray(jax.jit(function, compiler_options={"xla_disable_hlo_passes": "algsimp"})(*args))
    assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
    kind = np.complex128 if np.iscomplexobj(wanted) else np.float64
    apart = np.abs(result.astype(kind) - wanted.astype(kind)).max()
    assert apart <= 1e-5 * max(1.0, float(np.abs(wanted.astype(kind)).max()))
    assert "stablehlo.convolution" not in text
    return text


def whole(rng: np.random.Generator, shape: Any, dtype: Any) -> jax.Array:
    """Small whole numbers: every order of their sum is exact in every type."""
    values = rng.integers(-3, 4, shape)
    return jnp.asarray(values + 1j * rng.integers(-3, 4, shape) if dtype == np.complex64 else values, dtype)


@st.composite
def cases(draw: Any) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]:
    """Settings of a convolution, and the shapes of its input and kernel, in drawn orders of dimensions."""
    rank = draw(st.integers(0, 3))
    few = st.integers(1, 3)

    def row(values: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(values, min_size=rank, max_size=rank))

    by_feature, by_batch = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (3, 1), (1, 2), (1, 3)]))
    features, out = draw(few), draw(few) * by_feature * by_batch
    sizes, kernel, spread, dilation = row(st.integers(1, 6)), row(few), row(few), row(few)
    strides, disjoint = row(few), draw(st.booleans())
    if disjoint:  # patches
        strides, dilation = kernel, [1] * rank
    padding = []
    for size, taps, lhs, rhs in zip(sizes, kernel, spread, dilation, strict=True):
        # The padded input has at least the extent of the kernel, so the result is not empty.
        short = max(0, (taps - 1) * rhs + 1 - ((size - 1) * lhs + 1))
        low = draw(st.integers(-1 if size * lhs > taps * rhs + 2 else 0, 2))
        padding.append((low, draw(st.integers(0, 2)) + short + max(0, -low)))
    letters = LETTERS[:rank]
    named = {"N": draw(few) * by_batch, "C": features * by_feature, **dict(zip(letters, sizes, strict=True))}
    weights = {"I": features, "O": out, **dict(zip(letters, kernel, strict=True))}
    orders = ["".join(draw(st.permutations(f"{ends}{letters}"))) for ends in ("NC", "IO", "NC")]
    order = [letters.index(name) for name in orders[1] if name in letters]  # JAX's, of settings
    chosen = {
        "window_strides": [strides[i] for i in order],
        "padding": [padding[i] for i in order],
        "lhs_dilation": [spread[i] for i in order],
        "rhs_dilation": [dilation[i] for i in order],
        "dimension_numbers": tuple(orders),
        "feature_group_count": by_feature,
        "batch_group_count": by_batch,
    }
    return chosen, tuple(named[c] for c in orders[0]), tuple(weights[c] for c in orders[1])


@settings(max_examples=25, deadline=None)
@given(cases(), st.sampled_from([np.float32, jnp.bfloat16, np.float16, np.complex64, np.int32]), st.booleans())
def test_products_give_what_the_convolution_gives(
    case: tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]], dtype: Any, few_slices: bool
) -> None:
    chosen, shape, kernel = case
    rng = np.random.default_rng(math.prod(shape))
    x, w = whole(rng, shape, dtype), whole(rng, kernel, dtype)
    with pytest.MonkeyPatch.context() as patch:
        if few_slices:  # products in a loop
            patch.setattr(convolutions, "_ROOM", 64)
        function = lambda x, w: jax.lax.conv_general_dilated(x, w, **chosen)  # noqa: E731
        assert_equal(function, x, w)


def test_gradients_are_products_of_few_slices() -> None:
    rng = np.random.default_rng(0)
    x, w = whole(rng, (2, 20, 20, 3), np.float32), whole(rng, (3, 3, 3, 4), np.float32)
    dims = ("NHWC", "HWIO", "NHWC")

    def convolved(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=dims)

    ones = jnp.ones(convolved(x, w).shape, np.float32)
    assert_equal(lambda x, w: jax.vjp(convolved, x, w)[1](ones)[0], x, w)
    text = assert_equal(lambda x, w: jax.vjp(convolved, x, w)[1](ones)[1], x, w)
    # The convolution itself and both gradients. Slices of that by the kernel are for its taps, not for each position.
    assert text.count("stablehlo.dot_general") == 3
    assert text.count("stablehlo.slice") == 9 + 9 + 9


@pytest.mark.parametrize("letters", ["NHWC", "NCHW"])
def test_patches_are_one_product_of_the_image_and_so_is_their_gradient(letters: str) -> None:
    rng = np.random.default_rng(0)
    sizes = {"N": 2, "H": 200, "W": 195, "C": 3}
    x, w = whole(rng, [sizes[name] for name in letters], np.float32), whole(rng, (16, 16, 3, 4), np.float32)

    def embedded(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (16, 16), "VALID", dimension_numbers=(letters, "HWIO", letters))

    text = assert_equal(embedded, x, w)
    assert (text.count("stablehlo.dot_general"), text.count("stablehlo.slice")) == (1, 1)
    ones = jnp.ones(embedded(x, w).shape, np.float32)
    text = assert_equal(lambda w: jax.vjp(lambda w: embedded(x, w), w)[1](ones)[0], w)
    assert text.count("stablehlo.dot_general") == 2


def test_large_slices_are_made_in_a_loop_unless_devices_share_them() -> None:
    def text(function: Callable[..., Any], devices: int) -> str:
        x, w = jax.ShapeDtypeStruct((8, 256, 256, 64), jnp.bfloat16), jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.bfloat16)
        jax.clear_caches()  # `as_products` changes the module that they keep
        module = jax.jit(function).lower(x, w).compiler_ir("stablehlo")
        with module.context:
            assert convolutions.as_products(module, devices) == 0
            module.operation.verify()
        return str(module)

    def convolved(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert "stablehlo.while" in text(convolved, 1)
    assert "stablehlo.while" not in text(convolved, 8)
    # In a function of one device, sizes are those of one device.
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    spec = jax.sharding.PartitionSpec()
    local = jax.shard_map(convolved, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    assert "stablehlo.while" in text(local, 8)


def test_a_depthwise_convolution_is_a_sum_and_no_product() -> None:
    rng = np.random.default_rng(0)
    x, w = whole(rng, (2, 8, 8, 6), jnp.bfloat16), whole(rng, (3, 3, 1, 12), jnp.bfloat16)
    dims = ("NHWC", "HWIO", "NHWC")
    text = assert_equal(
        lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims, feature_group_count=6),
        x,
        w,
    )
    assert "dot_general" not in text


def test_convolutions_in_loops_and_functions_are_replaced() -> None:
    rng = np.random.default_rng(0)
    x, w = whole(rng, (1, 9, 2), np.float32), whole(rng, (3, 2, 2), np.float32) / 4

    def step(_: Any, x: Any) -> Any:
        convolve = jax.jit(
            lambda x: jax.lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NXC", "XIO", "NXC"))
        )
        return convolve(x)

    assert_equal(lambda x: jax.lax.fori_loop(0, 2, step, x), x)


def test_the_precision_and_the_lines_of_the_model_stay() -> None:
    def model(x: Any, w: Any) -> Any:
        return jax.lax.conv(x, w, (1, 1), "SAME", precision="highest")

    module = jax.jit(model).lower(jnp.ones((1, 2, 4, 4)), jnp.ones((2, 2, 3, 3))).compiler_ir("stablehlo")
    with module.context:
        assert convolutions.as_products(module) == 0
    text = module.operation.get_asm(enable_debug_info=True)
    (product,) = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert "precision = [HIGHEST, HIGHEST]" in product
    (where,) = [
        line for line in text.splitlines() if line.startswith(f"{product.rpartition('loc(')[2].rstrip(')')} = ")
    ]
    assert "conv_general_dilated" in where


def test_what_would_be_too_many_slices_is_left() -> None:
    x, w = jnp.ones((1, 1, 40, 40)), jnp.ones((1, 1, 20, 20))
    assert left(lambda x, w: jax.lax.conv(x, w, (1, 1), "VALID"), x, w) == 1
