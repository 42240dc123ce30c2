"""Keys of JAX's persistent compilation cache (https://docs.jax.dev/en/latest/persistent_compilation_cache.html).

Every name of JAX's own that this takes is here and in `patched`. `key_of` is for a build: what `jax.jit` would
compile, and what goes into its key. `choosing` is for a program that runs (`stagec.jax_cache`).
"""

from __future__ import annotations

import dataclasses
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jaxlib import xla_client

from stagec.frontends.common import patched
from stagec.jaxcache.jax_entries import COMPRESSION, Key


class UnknownKeyError(RuntimeError):
    """JAX makes its keys in a way that stagec does not know: another release."""


class _Lowered(Exception):
    """The program that JAX was about to compile: its key, and whether it calls back into Python."""


def recorded(get: Callable[[], str]) -> Key:
    """Return the key that `get` asks JAX for, in its parts.

    Raises UnknownKeyError if the parts do not make JAX's key: another release may combine them differently.
    """
    parts: dict[str, bytes] = {}

    def keeping(before: Callable[..., None], hashed: Any, name: str, update: Callable[[Any], None]) -> None:
        part: list[bytes] = []
        update(types.SimpleNamespace(update=part.append))  # instead of a hash
        parts[name] = b"".join(part)
        before(hashed, name, update)

    with patched.KEY_PARTS.by(keeping):
        name = get()
    key = Key(name.rpartition("-")[0], parts)
    # The hash is over the parts in a row. Another release may add one that no callback saw, or order them differently.
    if key.name() != name:
        raise UnknownKeyError(f"JAX {jax.__version__} makes keys in a way that stagec does not know")
    return key


def key_of(compile_: Callable[[], Any]) -> tuple[Key, bool]:
    """Return the key of the program that `compile_` makes JAX compile, and whether it calls back into Python.

    JAX compiles nothing.
    """
    from jax._src import compilation_cache  # a running program must start even if a release has none

    def stop(
        _: Any,
        backend: Any,
        computation: Any,
        devices: Any,
        compile_options: Any,
        host_callbacks: Any,
        *__: Any,
        **___: Any,
    ) -> Any:
        key = recorded(lambda: compilation_cache.get_cache_key(computation, devices, compile_options, backend))
        if key.parts.get(COMPRESSION) == b"zlib":
            key = dataclasses.replace(key, zlib=compression())
        raise _Lowered(key, bool(host_callbacks))

    # JAX has done all that it does before it compiles, so these are the inputs that a program will look the entry up
    # by.
    with patched.COMPILE.by(stop):
        try:
            compile_()
        except _Lowered as result:
            key, calls_back = result.args
            return key, calls_back
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


def choosing(choose: Callable[[Key], str | None], open_: Callable[..., Any]) -> bool:
    """Let JAX look its entries up by the names that `choose` gives for their keys; None: by JAX's own name.

    open_: is given JAX's function that opens the cache of a path, and its arguments, and returns what JAX then asks.
    A server runs on, and compiles, with a release of JAX whose keys stagec does not know; a warning says so, and the
    result is False.
    """

    def changes_nothing(why: object) -> None:
        warnings.warn(f"stagec.jax_cache changes nothing: {why}", stacklevel=3)

    def get(before: Callable[..., str], *args: Any, **kwargs: Any) -> str:
        try:
            key = recorded(lambda: before(*args, **kwargs))
        except UnknownKeyError as error:
            changes_nothing(error)
            return before(*args, **kwargs)
        return choose(key) or key.name()

    try:
        with patched.KEY_PARTS.by(lambda before, *args: before(*args)):
            patched.CACHE.forever(open_)
            patched.CACHE_KEY.forever(get)
    except (ImportError, AttributeError) as error:
        changes_nothing(f"JAX {jax.__version__} makes keys in a way that stagec does not know: {error}")
        return False
    return True
