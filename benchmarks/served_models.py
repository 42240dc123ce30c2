"""Models that servers are compared with: in JAX, and the same in ONNX."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

WIDTHS = (784, 1024, 1024, 10)
IMAGE, PATCH, WIDTH, HEADS, LAYERS, CLASSES = 224, 16, 192, 3, 12, 1000
"""ViT-Ti/16."""
PATCHES = (IMAGE // PATCH) ** 2
CACHE, VOCABULARY, HEAD = (6, 128, 4), 4096, 64
"""Of the decoder: layers, positions and heads of the cache; tokens; elements of a head."""
SHAPES: dict[str, tuple[int, ...]] = {"mlp": (WIDTHS[0],), "vit": (IMAGE, IMAGE, 3), "decode": (), "small": (16,)}
"""Of one row of the argument."""
DTYPES = {"mlp": np.float32, "vit": np.float32, "decode": np.int32, "small": np.float32}


def weights(model: str) -> dict[str, Any]:
    """Return the weights of a model by name, drawn at random."""
    draw = np.random.default_rng(0).standard_normal

    def drawn(*shape: int) -> Any:
        return (draw(shape) / math.sqrt(shape[0])).astype(np.float32)

    if model == "small":
        return {"w1": drawn(16, 24), "b1": drawn(24), "w2": drawn(24, 5)}
    if model == "mlp":
        pairs = itertools.pairwise(WIDTHS)
        layers = [{f"w{i}": drawn(*pair), f"b{i}": drawn(pair[1])} for i, pair in enumerate(pairs)]
        return {name: array for layer in layers for name, array in layer.items()}
    if model == "decode":
        width = CACHE[2] * HEAD
        made = {"embed": drawn(VOCABULARY, width)}
        for i in range(CACHE[0]):
            made |= {f"qkv{i}": drawn(width, 3 * width), f"out{i}": drawn(width, width)}
            made |= {f"up{i}": drawn(width, 4 * width), f"down{i}": drawn(4 * width, width)}
        return made
    patch = PATCH * PATCH * 3
    made = {"embed": drawn(patch, WIDTH), "position": drawn(PATCHES, WIDTH), "head": drawn(WIDTH, CLASSES)}
    for i in range(LAYERS):
        shapes = {
            "qkv": (WIDTH, 3 * WIDTH),
            "out": (WIDTH, WIDTH),
            "up": (WIDTH, 4 * WIDTH),
            "down": (4 * WIDTH, WIDTH),
        }
        made |= {f"{name}{i}": drawn(*shape) for name, shape in shapes.items()}
    return made


def small(params: dict[str, Any], x: Any) -> Any:
    """Return f32[batch,5] of f32[batch,16]."""
    import jax.numpy as jnp

    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]


def mlp(params: dict[str, Any], x: Any) -> Any:
    """Return f32[batch,10] of f32[batch,784]."""
    import jax

    for i in range(len(WIDTHS) - 1):
        x = (jax.nn.relu(x) if i else x) @ params[f"w{i}"] + params[f"b{i}"]
    return x


def vit(params: dict[str, Any], images: Any) -> Any:
    """Return f32[batch,1000] of f32[batch,224,224,3]; norms have no weights, and tokens are averaged."""
    import jax
    import jax.numpy as jnp

    side, depth = IMAGE // PATCH, WIDTH // HEADS

    def norm(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)

    x = images.reshape(-1, side, PATCH, side, PATCH, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, PATCHES, PATCH**2 * 3)
    x = x @ params["embed"] + params["position"]
    for i in range(LAYERS):
        q, k, v = jnp.moveaxis((norm(x) @ params[f"qkv{i}"]).reshape(-1, PATCHES, 3, HEADS, depth), 2, 0)
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(depth))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(-1, PATCHES, WIDTH)
        x = x + mixed @ params[f"out{i}"]
        x = x + jax.nn.relu(norm(x) @ params[f"up{i}"]) @ params[f"down{i}"]
    return norm(x.mean(1)) @ params["head"]


def empty_cache() -> dict[str, Any]:
    """Return what a decoder has seen before the first token."""
    zeros = np.zeros((*CACHE, HEAD), np.float32)
    return {"keys": zeros, "values": zeros, "length": np.int32(0)}


def decode(params: dict[str, Any], cache: dict[str, Any], tokens: Any) -> tuple[Any, dict[str, Any]]:
    """Return f32[1,vocabulary] of i32[1] and what came before, and the cache with it."""
    import jax
    import jax.numpy as jnp

    keys, values, at = cache["keys"], cache["values"], cache["length"]
    x = params["embed"][tokens]
    seen = jnp.arange(CACHE[1]) <= at
    for i in range(CACHE[0]):
        q, k, v = jnp.split((x @ params[f"qkv{i}"]).reshape(1, 1, 3 * CACHE[2], HEAD), 3, axis=2)
        keys = jax.lax.dynamic_update_slice(keys, k, (i, at, 0, 0))
        values = jax.lax.dynamic_update_slice(values, v, (i, at, 0, 0))
        scores = jnp.where(seen, jnp.einsum("hd,phd->hp", q[0, 0], keys[i]) / math.sqrt(HEAD), -jnp.inf)
        x = x + jnp.einsum("hp,phd->hd", jax.nn.softmax(scores), values[i]).reshape(1, -1) @ params[f"out{i}"]
        x = x + jax.nn.relu(x @ params[f"up{i}"]) @ params[f"down{i}"]
    return x @ params["embed"].T, {"keys": keys, "values": values, "length": at + 1}


def onnx_model(model: str) -> bytes:
    """Return the same model for onnxruntime."""
    from onnx import TensorProto, helper, numpy_helper

    arrays, nodes = weights(model), []
    constants: dict[str, Any] = {"one": np.ones(WIDTH, np.float32)}

    def op(kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"value{len(nodes)}"
        nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def reshape(x: str, *shape: int) -> str:
        name = f"shape{len(nodes)}"
        constants[name] = np.array(shape, np.int64)
        return op("Reshape", x, name)

    def norm(x: str) -> str:
        return op("LayerNormalization", x, "one", epsilon=1e-6)

    x = "x"
    if model == "mlp":
        for i in range(len(WIDTHS) - 1):
            x = op("Gemm", op("Relu", x) if i else x, f"w{i}", f"b{i}")
    else:
        side, depth = IMAGE // PATCH, WIDTH // HEADS
        constants |= {"scale": np.array(1 / math.sqrt(depth), np.float32), "axis": np.array([1], np.int64)}
        x = op("Transpose", reshape(x, -1, side, PATCH, side, PATCH, 3), perm=[0, 1, 3, 2, 4, 5])
        x = op("Add", op("MatMul", reshape(x, -1, PATCHES, PATCH**2 * 3), "embed"), "position")
        for i in range(LAYERS):
            qkv = op(
                "Transpose",
                reshape(op("MatMul", norm(x), f"qkv{i}"), -1, PATCHES, 3, HEADS, depth),
                perm=[2, 0, 3, 1, 4],
            )
            for number in range(3):
                constants[f"number{number}"] = np.array(number, np.int64)
            q, k, v = (op("Gather", qkv, f"number{number}", axis=0) for number in range(3))
            scores = op("Mul", op("MatMul", q, op("Transpose", k, perm=[0, 1, 3, 2])), "scale")
            mixed = op("Transpose", op("MatMul", op("Softmax", scores), v), perm=[0, 2, 1, 3])
            x = op("Add", x, op("MatMul", reshape(mixed, -1, PATCHES, WIDTH), f"out{i}"))
            x = op("Add", x, op("MatMul", op("Relu", op("MatMul", norm(x), f"up{i}")), f"down{i}"))
        x = op("MatMul", norm(op("ReduceMean", x, "axis", keepdims=0)), "head")
    graph = helper.make_graph(
        nodes,
        model,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *SHAPES[model]])],
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in {**arrays, **constants}.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return made.SerializeToString()  # type: ignore[no-any-return]
