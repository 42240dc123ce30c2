"""Keys of JAX's persistent compilation cache (https://docs.jax.dev/en/latest/persistent_compilation_cache.html).

Every name of JAX's own that this takes is here and in `patched`. `lowered` is for a build: what `jax.jit` would
compile, and what goes into its key. `choosing` is for a program that runs (`stagec.jax_cache`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax._src import compilation_cache
from jaxlib import xla_client

from stagec.core.builds.jax_entries import Key
from stagec.core.sizes import size
from stagec.frontends import patched
from stagec.frontends.evaluation import KEY_IMPLEMENTATIONS


class _Lowered(Exception):
    """What JAX was about to compile: its key, and whether it calls back into Python."""

    def __init__(self, key: Key, callbacks: bool) -> None:
        super().__init__("lowered")
        self.key, self.callbacks = key, callbacks


class _Bytes:
    """What is hashed, in the place of a hash."""

    def __init__(self) -> None:
        self.value = b""

    def update(self, data: bytes) -> None:
        self.value += data


def recorded(get: Callable[[], str]) -> Key:
    """Return the key that `get` asks JAX for, in its parts.

    Raises RuntimeError where the parts do not make JAX's key: another release of JAX may put them together otherwise.
    """
    parts: dict[str, bytes] = {}

    def keeping(before: Callable[..., None]) -> Callable[..., None]:
        def log(hashed: Any, name: str, update: Callable[[Any], None]) -> None:
            part = _Bytes()
            update(part)
            parts[name] = part.value
            before(hashed, name, update)

        return log

    with patched.KEY_PARTS.by(keeping):
        name = get()
    key = Key(name.rpartition("-")[0], parts)
    if key.name() != name:
        raise RuntimeError(f"JAX {jax.__version__} makes keys in a way that stagec does not know")
    return key


def lowered(compile_: Callable[[], Any]) -> tuple[Key, bool]:
    """Return the key of what `compile_` has JAX compile, and whether that calls back into Python.

    JAX compiles nothing.
    """

    def instead(before: Callable[..., Any]) -> Callable[..., Any]:
        def stop(
            backend: Any, computation: Any, devices: Any, compile_options: Any, host_callbacks: Any, *_: Any, **__: Any
        ) -> Any:
            key = recorded(lambda: compilation_cache.get_cache_key(computation, devices, compile_options, backend))
            raise _Lowered(key, bool(host_callbacks))

        return stop

    with patched.COMPILE.by(instead):
        try:
            compile_()
        except _Lowered as result:
            return result.key, result.callbacks
    raise RuntimeError(f"JAX {jax.__version__} compiles in a way that stagec does not know")


def in_bucket(tree: Any, bucket: Mapping[str, int]) -> Any:
    """Return abstract arguments with the sizes of a bucket in the places of symbolic dimensions."""

    def static(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct) or all(isinstance(dim, int) for dim in leaf.shape):
            return leaf
        shape = [dim if isinstance(dim, int) else size.evaluate(str(dim), bucket) for dim in leaf.shape]
        return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=leaf.weak_type)

    return jax.tree.map(static, tree)


def zeros(leaf: Any) -> Any:
    """Return an array in the place of what stands for one; it takes no memory until somebody reads it."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.zeros(leaf.shape, leaf.dtype)
    words = jax.eval_shape(jax.random.key_data, leaf)
    implementation = KEY_IMPLEMENTATIONS[str(leaf.dtype)]
    return jax.random.wrap_key_data(jax.numpy.zeros(words.shape, words.dtype), impl=implementation)


def fingerprint() -> str:
    """Return the fingerprint of this process's devices that JAX has in its keys: 16 hexadecimal digits."""
    return f"{xla_client.get_topology_for_devices(jax.local_devices()).fingerprint():016x}"


def choosing(choose: Callable[[Key], str | None]) -> None:
    """Let JAX look its entries up by the names that `choose` gives for their keys; None: by JAX's own name."""

    def instead(before: Callable[..., str]) -> Callable[..., str]:
        def get(*args: Any, **kwargs: Any) -> str:
            key = recorded(lambda: before(*args, **kwargs))
            return choose(key) or key.name()

        return get

    patched.CACHE_KEY.forever(instead)
