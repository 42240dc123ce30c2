"""Bundles: a mapping of functions. A function runs the executable that selection chooses for this machine."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from jaxlib import _jax

from stagec.bundle.archive import Archive
from stagec.core.messages.refusal import CallError, LoadError
from stagec.core.sizes.avals import parse_aval
from stagec.loader.function import Function
from stagec.loader.loaded import Loaded, Settings
from stagec.loader.once import Once
from stagec.loader.selection import Selection, nearest_refusal
from stagec.loader.variant import Variant
from stagec.pjrt.arrays import zeros

if TYPE_CHECKING:
    from stagec.trust.keys import Key


class Bundle(Mapping[str, Function]):
    """The functions of a bundle by name.

    name, version: as in the manifest.
    digest: SHA-256 (hex) of what it has, with its weights.
    target: the most demanding target whose executables run here; "" if there is none, and calls compile.

    `stagec.load` makes it. `bundle["predict"](params, x)` calls a function. `close`, or the end of a `with` statement,
    unloads it.
    """

    def __init__(self, archive: Archive, settings: Settings) -> None:
        """See `stagec.load`. archive: the bundle's file; closed with the bundle."""
        self._loaded = Loaded(archive, settings)
        index = archive.index
        self.name: str = index["name"]
        self.version: str = index["version"]
        self._families: dict[str, dict[str, str]] = {}  # names of artifacts, by function and variant
        for name, (function, variant) in index["functions"].variants.items():
            self._families.setdefault(function if variant else name, {})[variant] = name
        self._names = list(index["functions"])
        self._targets = list(index["targets"])
        self._variants, self._functions = Once(), Once()
        self._replaced: dict[str, str] = {}  # digests of arrays that are not the bundle's, by name
        self.digest = _digest(archive, self._replaced)
        self._executables = Once()  # by name of the artifact; those with other weights share it
        must_run = settings.selected_only and self._names
        if must_run and not any(self._variant(name).select().chosen for name in self._names):
            raise nearest_refusal(self.selections(), archive.path)

    @functools.cached_property
    def target(self) -> str:
        """The most demanding target whose executables run here; "" if there is none, and calls compile."""
        used = {selection.chosen.offer.target for selection in self.selections() if selection.chosen}
        return next((name for name in reversed(self._targets) if name in used), "")

    def _variant(self, name: str) -> Variant:
        """Return the variant that runs an artifact. The first request makes it: few functions of many are called."""
        return self._variants.get(name, lambda: Variant(self._loaded, name, self._executables.get(name, Once)))

    def _function(self, name: str) -> Function:
        def made() -> Function:
            return Function(name, {key: self._variant(artifact) for key, artifact in self._families[name].items()})

        return self._functions.get(name, made)

    def with_weights(
        self,
        path: str | os.PathLike[str],
        file: str | None = None,
        *,
        sha256: str | None = None,
        keys: Sequence[Key] | None = None,
        threshold: int = 1,
        signature: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    ) -> Bundle:
        """Return the same bundle with the arrays of another safetensors file. Both can be called; close both.

        They share the loaded executables and, on each device, the arrays with the same bytes. The file must have the
        names, dtypes and shapes of the file that it replaces. If it fits, it is read once now, for its digests (with
        `keys` twice), and mapped when a call first takes an array (or read into memory and compared with its digest, if
        the bundle was loaded with `map_weights=False`).

        path: the new file. Nobody may write into it while it is mapped: replace it by renaming.
        file: the file of weights that it replaces, as the manifest names it. None: the only one.
        sha256: the digest (hex) that the new file must have. None: any.
        keys, threshold: the keys that must have signed it, as for `load`. None: no signature is needed.
        signature: path of the signature, or several. None: `<path>.sig`, as `stagec sign --model-signing` writes it.

        Raises LoadError: "weights" with everything that is wrong with the file, "signature", "key", "cryptography".
        Raises CallError ("closed").

        >>> with stagec.load("model.aot") as bundle, bundle.with_weights("v2.safetensors") as second:
        ...     y = second["predict"](x)
        """
        import copy

        from stagec.loader import replacing  # most processes keep the weights that they load

        loaded = self._loaded
        archive = loaded.archive
        if archive is None:
            raise CallError("closed", f"{self.name}: the bundle was closed")
        if keys is None and (threshold != 1 or signature is not None):
            raise LoadError("key", f"{os.fspath(path)}: no key is given; say which ones you trust: keys=[...]")
        given = [signature] if isinstance(signature, str | os.PathLike) else signature or ()
        weights, digests = replacing.replaced(
            loaded.weights, archive, os.fspath(path), file, sha256, keys, threshold, [os.fspath(file) for file in given]
        )
        view = copy.copy(self)
        view._loaded = copy.copy(loaded)
        view._loaded.weights, view._loaded.lock = weights, threading.Lock()
        view._variants, view._functions = Once(), Once()
        view._replaced = {**self._replaced, **digests}
        view.digest = _digest(archive, view._replaced)
        return view

    def select(
        self,
        function: str,
        shapes: Sequence[Any] | None = None,
        devices: Sequence[_jax.Device] | None = None,
        **kwargs: Any,
    ) -> Selection:
        """Return every candidate for a call of `function`, and why the loader takes it or not. Load nothing.

        function: its name, or `FUNCTION-VARIANT`.
        shapes: the positional arguments, as trees of arrays, or of avals as in manifests ("f32[8,64]"). None: of any
            shapes.
        devices: the devices to run on. None: those of the bundle.
        kwargs: the keyword arguments, in the same form.
        Raises KeyError if there is no such function, CallError if structure or dtype of the arguments differ.
        """
        if function not in self._names and function in self._families:
            variants = ", ".join(self._families[function].values())
            raise CallError("static", f"{function} has variants; ask one of them: {variants}")
        if function not in self._names:
            raise self._unknown(function, self._names)
        asked = self._variant(function)
        flat = None if shapes is None else asked.shapes_of(tuple(map(_arrays, shapes)), _arrays(kwargs))
        return asked.select(flat, devices)

    def selections(self) -> list[Selection]:
        """Return the candidates for each variant of each function, of any shapes."""
        return [self._variant(name).select() for name in self._names]

    def preload(self, functions: Sequence[str] | None = None, threads: int | None = None) -> None:
        """Load the executables now, several at a time, so that no call waits for it.

        It loads and compiles what calls would, for all sizes, and puts the bound weights on the devices. An exported
        artifact with varying sizes and no executables beside it waits for a call.

        functions: names of functions, or `FUNCTION-VARIANT`. None: all functions that run here.
        threads: how many executables to load at a time. None: one for each core of this process.

        Raises KeyError if there is no such function, LoadError as a call would, CallError ("closed").

        >>> bundle = stagec.load("model.aot")
        >>> bundle.preload(["mlp"])
        """
        from concurrent.futures import ThreadPoolExecutor  # most processes load at a call

        if functions is None:
            asked = [variant for variant in map(self._variant, self._names) if variant.select().chosen]
        else:
            names = [
                name for function in functions for name in self._families.get(function, {function: function}).values()
            ]
            if unknown := [name for name in names if name not in self._names]:
                raise self._unknown(unknown[0], [*self._families, *self._names])
            asked = list(map(self._variant, names))
        loads = [load for variant in asked for load in variant.loads()]
        with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
            for done in [pool.submit(load) for load in loads]:
                done.result()

    def close(self) -> None:
        """Unload the bundle: close the file, and drop the executables. Later calls raise CallError ("closed").

        Calls that run in other threads end normally, and their results stay valid.
        """
        with self._loaded.lock:
            self._loaded.archive = None
            self._loaded.settings = self._loaded.settings._replace(files=None)
            self._loaded.weights.release()
            self._executables = Once()
            for variant in self._variants.made():
                variant.release()
        # XLA keeps what a thread without Python's lock let go of, such as mapped weights, until somebody asks for it.
        # JAX does when Python looks for garbage.
        _jax.collect_garbage()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __getitem__(self, name: str) -> Function:
        if name not in self._families:
            raise self._unknown(name, self._families)
        return self._function(name)

    def __getattr__(self, name: str) -> NoReturn:
        has = name in self.__dict__.get("_families", ())
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}" + f': write bundle["{name}"]' * has
        )

    def __contains__(self, name: object) -> bool:
        return name in self._families

    def _ipython_key_completions_(self) -> list[str]:
        """Return the names that IPython completes `bundle["` with."""
        return list(self._families)

    def _unknown(self, name: str, names: Collection[str]) -> KeyError:
        from stagec.core.messages.errors import nearest, show  # most processes need none

        # KeyError shows the `repr` of its string: without single quotes in the string, Python escapes nothing.
        return KeyError(f"the bundle {self.name} has no function {show(name)}: {nearest(str(name), names)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._families)

    def __len__(self) -> int:
        return len(self._families)

    def __repr__(self) -> str:
        return f"Bundle({self.name} {self.version}, target {self.target}: {', '.join(self)})"


def _digest(archive: Archive, replaced: Mapping[str, str]) -> str:
    """Return the digest of a bundle by its index, which has those of its members, and of arrays instead of its own."""
    others = "".join(f"\n{name} {digest}" for name, digest in sorted(replaced.items()))
    return hashlib.sha256(archive.encoded_index + others.encode()).hexdigest()


def _arrays(tree: Any) -> Any:
    """Replace each aval string of a tree by an array that takes no memory."""
    match tree:
        case str():
            return zeros(parse_aval(tree))
        case dict():
            return {key: _arrays(value) for key, value in tree.items()}
        case list():
            return [_arrays(value) for value in tree]
        case tuple():
            return tuple(map(_arrays, tree))
    return tree
