"""Weights of a bundle: its arrays for bound arguments, so that callers leave these arguments out."""

from __future__ import annotations

import functools
import hashlib
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stagec.bundle.archive import Archive
from stagec.core.messages.refusal import CallError, LoadError
from stagec.core.sizes.avals import num_bytes, parse_aval
from stagec.core.trees.tree import Tree
from stagec.pjrt.arrays import AbstractArray, DeviceArray, dtype_of, put

if TYPE_CHECKING:
    from stagec.bundle.external import Files
    from stagec.core.messages.calls import Call


class Weight:
    """An array of a bundle that is bound to an argument.

    shape, dtype: of the array.

    It is mapped from the file when a call first takes it, and checked by then. It is on each device once, for all
    functions. On a CPU the device's memory is the mapping itself: processes that load the same file share it, and see
    what is written into it. Where it is not mapped it is read into memory, and what was checked is what is used.
    """

    def __init__(self, aval: str, read: Callable[[], bytes | memoryview], sha256: str = "") -> None:
        """read: returns the bytes of the array, checked; it is not called after `release`.

        sha256: their digest (hex), if it is known.
        """
        parsed = parse_aval(aval)
        self.shape = tuple(map(int, parsed.shape))
        self.dtype = dtype_of(parsed)
        self._read: Callable[[], bytes | memoryview] | None = read
        self._sha256 = sha256
        self._arrays: list[DeviceArray] = []
        self._owners: weakref.WeakSet[Weights] = weakref.WeakSet()
        self._lock = threading.Lock()

    def on(self, aval: AbstractArray) -> DeviceArray:
        """Return the array as it lies on devices by the sharding and layout of `aval`.

        Raises LoadError ("digest", "weights") when the file does not have it, CallError ("closed") after `release`.
        """
        with self._lock:
            for array in self._arrays:
                if array.aval.lies_as(aval):
                    return array
            values = np.frombuffer(self._bytes(), self.dtype).reshape(self.shape)
            self._arrays.append(put(values, aval.sharding, layout=aval.layout))
            return self._arrays[-1]

    def has(self, sha256: str) -> bool:
        """Whether its bytes have this digest. Raises CallError ("closed") after `release`."""
        with self._lock:
            try:
                self._sha256 = self._sha256 or hashlib.sha256(self._bytes()).hexdigest()
            except LoadError:  # its file is gone or damaged, which a call would say
                return False
            return self._sha256 == sha256

    def keep(self, owner: Weights) -> None:
        """Let one more bundle use it. Raises CallError ("closed") after `release`."""
        with self._lock:
            if self._read is None:
                raise CallError("closed", "the bundle was closed")
            self._owners.add(owner)

    def release(self, owner: Weights) -> None:
        """Let go of the file and of the arrays when no other bundle uses them; calls keep them until they end."""
        with self._lock:
            self._owners.discard(owner)
            if not self._owners:
                self._read = None
                self._arrays.clear()

    def _bytes(self) -> bytes | memoryview:
        if self._read is None:
            raise CallError("closed", "the bundle was closed")
        return self._read()


class Weights:
    """The weights of a bundle. Replaced weights of the same bundle may share some of them.

    by_name: as functions bind them. mapped: whether they are mapped, and not read into memory.
    """

    def __init__(self, by_name: Mapping[str, Weight], mapped: bool) -> None:
        """Raises CallError ("closed") if one of them was released."""
        self.by_name, self.mapped = by_name, mapped
        for weight in by_name.values():
            weight.keep(self)

    @staticmethod
    def from_archive(archive: Archive, mapped: bool = True, files: Files | None = None) -> Weights:
        """Return the weights of a bundle. mapped: as for this class.

        files: those beside the bundle; None: in its folder, each opened and checked when it is used.
        """
        if files is None and archive.index["weights_files"]:
            from stagec.bundle.external import Files

            files = Files(archive.path, archive.index, None, "use")
        by_name = {}
        for name, entry in archive.index["weights"].items():
            if files is not None and "file" in entry:
                by_name[name] = in_file(files, entry, mapped)
            else:
                read = functools.partial(archive.map if mapped else archive.copy, entry["member"])
                by_name[name] = Weight(entry["aval"], read, archive.index["members"][entry["member"]]["sha256"])
        return Weights(by_name, mapped)

    def release(self) -> None:
        """Release those that nobody shares."""
        for weight in self.by_name.values():
            weight.release(self)


def in_file(files: Files, entry: Mapping[str, Any], mapped: bool, sha256: str = "") -> Weight:
    """Return the weight of an entry of the index for a file beside the bundle. sha256: its digest, if it is known."""
    span = entry["file"], entry["start"], num_bytes(parse_aval(entry["aval"]))
    return Weight(entry["aval"], functools.partial(files.array, *span, mapped), sha256)


class Bound:
    """The arguments of one function that callers may leave out.

    weights: number of the leaf -> its weight.
    """

    def __init__(
        self,
        name: str,
        in_tree: Tree,
        bind: Sequence[Mapping[str, Any]],
        weights: Mapping[str, Weight],
        usage: Callable[[], Call],
    ):
        """bind: as in the index, which was checked: whole arguments are bound, each of their leaves.

        usage: returns how to call the function, for messages.
        """
        self.weights = {entry["leaf"]: weights[entry["weight"]] for entry in bind}
        self._name = name
        self._usage = usage
        positional, keyword = in_tree.children
        self._count = len(positional.children)
        self._args: dict[int, Any] = {}
        self._kwargs: dict[str, Any] = {}
        first = 0
        for top, bound, keys in ((positional, self._args, range(self._count)), (keyword, self._kwargs, keyword.keys)):
            for key, tree in zip(keys, top.children, strict=True):
                leaves = range(first, first + tree.num_leaves)
                first += tree.num_leaves
                if leaves and first - 1 in self.weights:
                    # Every function accepts the replacement for a node of the model's own type.
                    bound[key] = tree.unflatten([self.weights[leaf] for leaf in leaves])

    def fill(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return all arguments of a call: the caller's, and bound ones for those that the caller left out.

        Positional arguments are all given, or all but the bound ones. Raises CallError ("structure").
        """
        kwargs = {**self._kwargs, **kwargs}
        if not self._args or len(args) == self._count:
            return args, kwargs
        left = self._count - len(self._args)
        if len(args) != left:
            usage = self._usage()
            bound = ", ".join(usage.path(f"args[{i}]") for i in self._args)
            what = f"expected {left} positional arguments without the bound {bound}, or {self._count} with it"
            raise CallError("structure", f"{self._name}: {what}; {len(args)} are given{usage.after()}")
        given = iter(args)
        return tuple(self._args[i] if i in self._args else next(given) for i in range(self._count)), kwargs
