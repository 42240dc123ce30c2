"""Reference implementations of custom calls: what NumPy, SciPy and JAX make of the same."""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from compiler.extensions.insight.tests.test_emulation import normal, run


def call(result: str, operands: dict[str, np.ndarray], target: str, given: np.ndarray, **attributes: str) -> Any:
    """Run one custom call; return its first result, which has the shape and dtype of `given`."""
    names = {"float32": "f32", "complex64": "c64", "int32": "s32"}
    types = {}
    for name, x in operands.items():
        order = ",".join(map(str, reversed(range(x.ndim))))
        types[name] = f"{names[str(x.dtype)]}[{','.join(map(str, x.shape))}]" + (f"{{{order}}}" if order else "")
    lines = [f"  %{name} = {type_} parameter({i})" for i, (name, type_) in enumerate(types.items())]
    words = "".join(f", {key}={value}" for key, value in attributes.items())
    passed = ", ".join(f"%{name}" for name in operands)
    lines.append(f'  %made = {result} custom-call({passed}), custom_call_target="{target}"{words}')
    if result.startswith("("):
        alone = result[1:].partition("}")[0] + "}"
        lines.append(f"  ROOT %first = {alone} get-tuple-element(%made), index=0")
    text = "HloModule m\nENTRY %e {\n" + "\n".join(lines) + "\n}"
    if not result.startswith("("):
        text = text.replace("  %made", "  ROOT %made")
    return run(text, *operands.values(), results=[given])[0]


GELU: Callable[[Any], Any] = jax.nn.gelu


@pytest.mark.parametrize(
    ("epilogue", "activation"),
    [("DEFAULT", None), ("RELU", jax.nn.relu), ("GELU", GELU), ("BIAS_GELU", GELU), ("BIAS", None)],
)
@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul"])
def test_products(target: str, epilogue: str, activation: Callable[[Any], Any] | None) -> None:
    a, b, c, bias = normal(3, 5, 4), normal(3, 6, 5), normal(3, 4, 6), normal(6)
    dims = {"lhs_contracting_dimensions": ["1"], "rhs_contracting_dimensions": ["2"]}
    dims |= {"lhs_batch_dimensions": ["0"], "rhs_batch_dimensions": ["0"]}
    config = {"alpha_real": 0.5, "beta": 2, "alpha_imag": 0, "epilogue": epilogue, "dot_dimension_numbers": dims}
    operands = {"a": a, "b": b, "c": c, **({"bias": bias} if "BIAS" in epilogue else {})}
    wanted = 0.5 * np.einsum("zki,zjk->zij", a, b) + 2 * c + (bias if "BIAS" in epilogue else 0)
    wanted = np.asarray(activation(wanted) if activation else wanted)
    given = {"backend_config": json.dumps({"gemm_backend_config": config})}
    result = call("(f32[3,4,6]{2,1,0}, s8[64]{0})", operands, target, wanted.astype(np.float32), **given)
    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)


CONVOLUTIONS = [
    ("size=3x3 pad=1_1x1_1", (1, 1), ((1, 1), (1, 1)), (1, 1), 1),
    ("size=3x2 stride=2x1 pad=0_1x1_0", (2, 1), ((0, 1), (1, 0)), (1, 1), 1),
    ("size=3x3 pad=2_1x0_0 rhs_dilate=2x1", (1, 1), ((2, 1), (0, 0)), (2, 1), 1),
    ("size=3x3 stride=2x2 pad=1_1x1_1", (2, 2), ((1, 1), (1, 1)), (1, 1), 2),
]


@pytest.mark.parametrize(("window", "strides", "pads", "dilation", "groups"), CONVOLUTIONS)
def test_convolutions_and_their_derivatives(
    window: str, strides: tuple[int, int], pads: Any, dilation: tuple[int, int], groups: int
) -> None:
    size = tuple(map(int, window.split(maxsplit=1)[0].removeprefix("size=").split("x")))
    x, w = normal(2, 9, 8, 4), normal(6, *size, 4 // groups)

    def convolve(x: Any, w: Any) -> Any:
        numbers = ("NHWC", "OHWI", "NHWC")
        options: dict[str, Any] = {"rhs_dilation": dilation, "feature_group_count": groups}
        return lax.conv_general_dilated(x, w, strides, pads, dimension_numbers=numbers, **options)

    y, pull = jax.vjp(convolve, x, w)
    cotangents = normal(*y.shape)
    by_x, by_w = pull(jnp.asarray(cotangents))
    given = {
        "window": f"{{{window}}}",
        "dim_labels": "b01f_o01i->b01f",
        "backend_config": json.dumps({"cudnn_conv_backend_config": {"conv_result_scale": 2, "side_input_scale": 0}}),
        **({"feature_group_count": str(groups)} if groups > 1 else {}),
    }
    for target, operands, wanted in (
        ("__cudnn$convForward", {"x": x, "w": w}, y),
        ("__cudnn$convBackwardInput", {"y": cotangents, "w": w}, by_x),
        ("__cudnn$convBackwardFilter", {"x": x, "y": cotangents}, by_w),
    ):
        type_ = f"f32[{','.join(map(str, wanted.shape))}]{{3,2,1,0}}"
        result = call(f"({type_}, u8[0]{{0}})", operands, target, np.asarray(wanted), **given)
        np.testing.assert_allclose(result, 2 * np.asarray(wanted), rtol=1e-4, atol=1e-4, err_msg=target)


def test_a_convolution_with_what_follows() -> None:
    x, w, bias, side = normal(2, 5, 5, 4), normal(6, 3, 3, 4), normal(6), normal(2, 5, 5, 6)
    config = {"conv_result_scale": 1, "side_input_scale": 0.5, "activation_mode": "kRelu"}
    given = {
        "window": "{size=3x3 pad=1_1x1_1}",
        "dim_labels": "b01f_o01i->b01f",
        "backend_config": json.dumps({"cudnn_conv_backend_config": config}),
    }
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "OHWI", "NHWC"))
    wanted = np.maximum(np.asarray(y) + 0.5 * side + bias, 0)
    operands = {"x": x, "w": w, "bias": bias, "side": side}
    type_ = "(f32[2,5,5,6]{3,2,1,0}, u8[0]{0})"
    result = call(type_, operands, "__cudnn$convBiasActivationForward", wanted, **given)
    np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)


def test_a_product_with_scales() -> None:
    a, b, scale = normal(4, 5), normal(5, 3), np.float32(2)
    dims = {"lhs_contracting_dimensions": ["1"], "rhs_contracting_dimensions": ["0"]}
    given = {"backend_config": json.dumps({"gemm_backend_config": {"beta": 0, "dot_dimension_numbers": dims}})}
    operands = {"a": a, "b": b, "s": np.asarray(scale), "t": np.asarray(scale)}
    result = call("(f32[4,3]{1,0}, s8[64]{0})", operands, "__cublas$lt$matmul$f8", (a @ b), **given)
    np.testing.assert_allclose(result, 4 * a @ b, rtol=1e-5, atol=1e-5)


def test_the_largest_elements() -> None:
    x = np.float32([[1, 5, 5, -2, np.inf, 0], [0, 0, 3, 0, 0, 0]])
    values = call("(f32[2,3]{1,0}, s32[2,3]{1,0})", {"x": x}, "__gpu$TopK", x[:, :3])
    np.testing.assert_array_equal(values, [[np.inf, 5, 5], [3, 0, 0]])


def test_pivots_are_a_permutation() -> None:
    pivots = np.int32([2, 2, 3, 3])
    wanted = np.arange(4, dtype=np.int32)
    for i, j in enumerate(pivots):
        wanted[[i, j]] = wanted[[j, i]]
    result = call("s32[4]{0}", {"p": pivots}, "cu_lu_pivots_to_permutation", wanted)
    np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize("lower", [True, False])
def test_triangles(lower: bool) -> None:
    x, y = normal(4, 4) + 4 * np.eye(4, dtype=np.float32), normal(4, 2)
    a = np.tril(x) if lower else np.triu(x)
    given = json.dumps({"left_side": True, "lower": lower, "unit_diagonal": False, "transpose_a": "TRANSPOSE"})
    type_ = "(f32[4,2]{1,0}, s8[0]{0})"
    result = call(type_, {"a": x, "b": y}, "__cublas$triangularSolve", y, backend_config=given)
    np.testing.assert_allclose(result, np.linalg.solve(a.T, y), rtol=1e-4, atol=1e-5)
    name = f"InvertDiagBlocks{'Lower' if lower else 'Upper'}Triangular"
    result = call("f32[1,4,4]{2,1,0}", {"a": x[None]}, name, x[None])
    np.testing.assert_allclose(result[0], np.linalg.inv(a), rtol=1e-4, atol=1e-5)


def test_factors_of_matrices() -> None:
    x = normal(6, 4)
    definite = x.T @ x + np.eye(4, dtype=np.float32)
    lower = np.linalg.cholesky(definite)
    result = call(
        "(f32[4,4]{0,1}, s32[])", {"a": definite}, "cusolver_potrf_ffi", lower, backend_config="{lower = true}"
    )
    np.testing.assert_allclose(np.tril(result), lower, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.tril(call("f32[4,4]{1,0}", {"a": definite}, "Cholesky", lower)), lower, rtol=1e-4)
    vectors = "(f32[4,4]{0,1}, f32[4]{0}, s32[])"
    given = {"backend_config": "{algorithm = 0 : ui8, lower = true}"}
    result = call(vectors, {"a": definite}, "cusolver_syevd_ffi", lower, **given)
    values = np.linalg.eigvalsh(definite)
    np.testing.assert_allclose(definite @ result, result * values, rtol=1e-3, atol=1e-3)


def test_halves_of_complex_numbers() -> None:
    a, b = normal(3), normal(3)
    together = call("c64[3]{0}", {"a": a, "b": b}, "X64Combine", (a + 1j * b).astype(np.complex64))
    np.testing.assert_array_equal(together, a + 1j * b)
    np.testing.assert_array_equal(call("f32[3]{0}", {"x": together}, "X64SplitLow", a), a)
    np.testing.assert_array_equal(call("f32[3]{0}", {"x": together}, "X64SplitHigh", a), b)


def test_memory_in_which_nothing_is_gives_no_number() -> None:
    assert np.isnan(call("f32[3]{0}", {}, "AllocateBuffer", normal(3))).all()
