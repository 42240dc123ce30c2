"""The sizes of the model: one of 100 million parameters, and a tiny one that trains in seconds on any CPU.

These functions return the abstract arguments (avals) of those in `model.py`; the manifests name them. No array is made.
"""

import functools

import jax
import jax.numpy as jnp

from examples.transformer import model

SIZES = {"vocabulary": 32_768, "width": 768, "layers": 12, "heads": 8, "kv_heads": 4, "head": 128, "hidden": 2_048}
TINY = {"vocabulary": 128, "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head": 16, "hidden": 128}
_RATE = jax.ShapeDtypeStruct((), jnp.float32)


def train_step() -> tuple:
    """32 sequences of 256 tokens."""
    return _state(SIZES), _tokens(32, 256), _RATE


def prefill() -> tuple:
    """16 prompts of `length` tokens, into caches for 2,048 tokens."""
    return _state(SIZES).params, _cache(SIZES, 16, 2_048), _tokens(16, *_length(2_048))


def decode() -> tuple:
    """One token for each of 16 sequences."""
    return _state(SIZES).params, _cache(SIZES, 16, 2_048), _tokens(16)


def tiny_train_step() -> tuple:
    """16 sequences of 64 tokens."""
    return _state(TINY), _tokens(16, 64), _RATE


def tiny_prefill() -> tuple:
    """Two prompts of `length` tokens, into caches for 128 tokens."""
    return _state(TINY).params, _cache(TINY, 2, 128), _tokens(2, *_length(128))


def tiny_decode() -> tuple:
    """One token for each of two sequences."""
    return _state(TINY).params, _cache(TINY, 2, 128), _tokens(2)


def _state(sizes: dict[str, int]) -> model.State:
    return jax.eval_shape(functools.partial(model.init, **sizes), jax.ShapeDtypeStruct((), jnp.uint32))


def _cache(sizes: dict[str, int], sequences: int, positions: int) -> model.Cache:
    shape = (sizes["layers"], sequences, positions, sizes["kv_heads"], sizes["head"])
    array = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return model.Cache(array, array, jax.ShapeDtypeStruct((), jnp.int32))


def _tokens(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _length(most: int) -> tuple:
    """A symbolic dimension; `buckets` in the manifest has its sizes."""
    return jax.export.symbolic_shape("length", constraints=[f"length <= {most}"])
