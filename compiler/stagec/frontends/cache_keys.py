"""Keys of JAX's persistent compilation cache (https://docs.jax.dev/en/latest/persistent_compilation_cache.html).

Every name of JAX's own that this takes is here and in `patched`. `key_of` is for a build: what `jax.jit` would
compile, and what goes into its key. `choosing` is for a program that runs (`stagec.jax_cache`).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jaxlib import xla_client

from stagec.core.builds.jax_entries import COMPRESSION, Key
from stagec.frontends import patched


class UnknownKeyError(RuntimeError):
    """JAX makes its keys in a way that stagec does not know: another release."""


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

    Raises UnknownKeyError where the parts do not make JAX's key: another release may put them together otherwise.
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
        raise UnknownKeyError(f"JAX {jax.__version__} makes keys in a way that stagec does not know")
    return key


def key_of(compile_: Callable[[], Any]) -> tuple[Key, bool]:
    """Return the key of what `compile_` has JAX compile, and whether that calls back into Python.

    JAX compiles nothing.
    """

    def instead(before: Callable[..., Any]) -> Callable[..., Any]:
        from jax._src import compilation_cache  # a program that runs must start where a release has none

        def stop(
            backend: Any, computation: Any, devices: Any, compile_options: Any, host_callbacks: Any, *_: Any, **__: Any
        ) -> Any:
            key = recorded(lambda: compilation_cache.get_cache_key(computation, devices, compile_options, backend))
            if key.parts.get(COMPRESSION) == b"zlib":
                key = dataclasses.replace(key, zlib=compression())
            raise _Lowered(key, bool(host_callbacks))

        return stop

    with patched.COMPILE.by(instead):
        try:
            compile_()
        except _Lowered as result:
            return result.key, result.callbacks
    raise UnknownKeyError(f"JAX {jax.__version__} compiles in a way that stagec does not know")


def fingerprint() -> str:
    """Return the fingerprint of this process's devices that JAX has in its keys: 16 hexadecimal digits."""
    return f"{xla_client.get_topology_for_devices(jax.local_devices()).fingerprint():016x}"


def compression() -> str:
    """Return how JAX packs the files of entries here: "zlib" or "zstandard".

    With Python 3.14 it packs them with `compression.zstd`, and says zlib in its keys (jax/_src/compilation_cache.py of
    0.10.2 to 0.12.0).
    """
    from jax._src import compilation_cache

    packs = (getattr(compilation_cache, name, None) for name in ("zstd", "zstandard"))
    return "zstandard" if any(module is not None for module in packs) else "zlib"


def choosing(choose: Callable[[Key], str | None]) -> None:
    """Let JAX look its entries up by the names that `choose` gives for their keys; None: by JAX's own name.

    A server runs on, and compiles, with a release of JAX whose keys stagec does not know; a warning says so.
    """

    def changes_nothing(why: object) -> None:
        warnings.warn(f"stagec.jax_cache changes nothing: {why}", stacklevel=3)

    def instead(before: Callable[..., str]) -> Callable[..., str]:
        def get(*args: Any, **kwargs: Any) -> str:
            try:
                key = recorded(lambda: before(*args, **kwargs))
            except UnknownKeyError as error:
                changes_nothing(error)
                return before(*args, **kwargs)
            return choose(key) or key.name()

        return get

    try:
        with patched.KEY_PARTS.by(lambda before: before):
            patched.CACHE_KEY.forever(instead)
    except (ImportError, AttributeError) as error:
        changes_nothing(f"JAX {jax.__version__} makes keys in a way that stagec does not know: {error}")
