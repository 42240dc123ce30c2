"""Files of weights beside a bundle: find, check and read them.

The index has name, size and SHA-256 of each, and where its arrays start. So a build writes a bundle without reading
their arrays: it needs only the result of `describe` for each file. Standard library only.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from stagec.bundle import index
from stagec.bundle.sources import in_pieces, sha256_of
from stagec.core.data import reading, strict_json
from stagec.core.data.reading import RegularFile
from stagec.core.messages.refusal import LoadError
from stagec.core.sizes.avals import Aval, num_bytes, parse_aval
from stagec.core.trees import json_shapes

Check: TypeAlias = Literal["load", "use", "never"]
"""When to compare the digest of a file: before anything else, before the first use of an array, or never."""
ByteRange: TypeAlias = tuple[int, int]
"""Where an array is in a file: its start and its size, in bytes."""
ALIGNMENT = 64
"""A CPU uses an array without a copy, if its address is a multiple of this many bytes."""
_COPIED_IN_SILENCE = 64 << 20
"""Bytes of a file that may be copied without a warning."""
_LARGEST = 2**28
"""Bytes of a description (256 MiB): more than the largest header of a safetensors file takes."""
_DESCRIPTION = json_shapes.shape({"sha256": json_shapes.sha256, "bytes": int, "arrays": {...: index.IN_FILE}})


class Outside(NamedTuple):
    """One array of such a file. start: where its bytes are, counted from the start of the file."""

    aval: Aval
    start: int


class Description(NamedTuple):
    """The facts about a file that a bundle needs. sha256: hex digest; size: bytes; arrays: by name."""

    sha256: str
    size: int
    arrays: Mapping[str, Outside]

    @staticmethod
    def from_json(text: bytes) -> Description:
        """Read what `describe` returned as JSON. Raises ValueError, naming the key at fault."""
        data = strict_json.parse(text, _LARGEST)
        _DESCRIPTION(data)
        arrays = {name: Outside(parse_aval(array["aval"]), array["start"]) for name, array in data["arrays"].items()}
        return Description(data["sha256"], data["bytes"], arrays)


def describe(path: str | Path) -> dict[str, Any]:
    """Return digest, size and arrays of the safetensors file at `path`; it is read once, piece by piece.

    Raises OSError, and ValueError for any other file.
    """
    from stagec.bundle import safetensors  # a loader reads none

    file = RegularFile(path)
    head = safetensors.head(file)
    arrays = {
        name: {"aval": str(tensor.aval), "start": safetensors.start_of(tensor)}
        for name, tensor in safetensors.read(path, file, head).items()
    }
    return {"sha256": sha256_of(file, len(head), head), "bytes": file.size, "arrays": arrays}


def copied(arrays: Mapping[str, Mapping[str, Any]]) -> str:
    """Say how many of `describe`'s arrays a CPU cannot use where they are in the file; "" if there are none."""
    starts = [array["start"] % ALIGNMENT for array in arrays.values()]
    what = f"{sum(map(bool, starts))} of {len(starts)} arrays do not start at a multiple of {ALIGNMENT} bytes"
    return f"{what}: a CPU copies them instead of sharing the file" if any(starts) else ""


def read_once(
    file: RegularFile,
    ranges: Iterable[ByteRange],
    take: Callable[[ByteRange, int, memoryview], object],
    head: bytes = b"",
) -> str:
    """Read a file piece by piece, give `take` the bytes of its arrays, and return the SHA-256 (hex) of the same bytes.

    take: gets the range of an array, an offset in it, and the bytes there. head: the start of the file, where it was
    read before. Raises OSError.
    """
    from concurrent.futures import ThreadPoolExecutor  # a bundle without such files must not wait for it

    state, read, left, begun = hashlib.sha256(head), len(head), deque(sorted(ranges)), list[ByteRange]()
    with ThreadPoolExecutor(1) as pool:
        for piece in in_pieces(file, read, file.size - read):
            hashed, view, end = pool.submit(state.update, piece), memoryview(piece), read + len(piece)
            while left and left[0][0] < end:
                begun.append(left.popleft())
            for start, size in begun:
                first, last = max(start, read), min(start + size, end)
                take((start, size), first - start, view[first - read : last - read])
            begun = [(start, size) for start, size in begun if start + size > end]
            hashed.result()
            read = end
    return state.hexdigest()


class Files:
    """The files of weights of one bundle, in the folder where they are deployed.

    names: those of the index, which are paths below the folder.
    """

    def __init__(self, archive_path: str, index: Mapping[str, Any], folder: str | Path | None, check: Check) -> None:
        """index: the bundle's index. folder: None is that of the bundle. check: when digests are compared.

        Raises ValueError for another `check`.
        """
        if check not in get_args(Check):
            raise ValueError(f"check_weights is {check!r}; write {', '.join(map(repr, get_args(Check)))}")
        self._listed: Mapping[str, Mapping[str, Any]] = index["weights_files"]
        self._archive_path, self._check = archive_path, check
        self._folder = Path(archive_path).parent if folder is None else Path(folder)
        self._arrays: dict[str, set[ByteRange]] = {}
        for entry in index["weights"].values():
            if "file" in entry:
                span = entry["start"], num_bytes(parse_aval(entry["aval"]))
                self._arrays.setdefault(entry["file"], set()).add(span)
        self._opened: dict[str, RegularFile] = {}
        self._checked: set[str] = set()
        self._told: set[str] = set()
        self._mapped: dict[str, memoryview] = {}
        self._copied: dict[str, Mapping[ByteRange, memoryview]] = {}
        self._lock = threading.Lock()

    @staticmethod
    def of_one(path: str, file: RegularFile, sha256: str, weights: Mapping[str, Mapping[str, Any]]) -> Files:
        """Return one open file with this digest and the name `path`.

        weights: its arrays, as in an index. Reading them, instead of mapping, compares the digest again.
        """
        files = Files(
            path, {"weights_files": {path: {"sha256": sha256, "bytes": file.size}}, "weights": weights}, "", "use"
        )
        files._opened[path] = file
        files._checked.add(path)
        return files

    @property
    def names(self) -> list[str]:
        """The names of all files."""
        return list(self._listed)

    def path(self, name: str) -> Path:
        """Return the path where a file should be."""
        return self._folder / name

    def open(self) -> None:
        """Open all files and compare their sizes, and their digests if `check` is "load".

        Raises LoadError ("weights") with what is wrong with any of them.
        """
        faults = [fault for name in self._listed if (fault := self._fault(name))]
        if not faults and self._check == "load":
            faults = list(self.differing())
        if faults:
            raise self._refusal(faults)

    def differing(self) -> Iterator[str]:
        """Compare the digests of all files now, several at a time; yield what is wrong. Raises OSError."""
        from concurrent.futures import ThreadPoolExecutor  # a bundle without such files must not wait for it

        with ThreadPoolExecutor() as pool:
            for name, fault in zip(self._listed, pool.map(self._difference, self._listed), strict=True):
                if fault:
                    yield fault
                else:
                    self._checked.add(name)

    def array(self, name: str, start: int, size: int, mapped: bool) -> memoryview:
        """Return the bytes of an array of a file, checked as this object was asked to.

        mapped: whether to map them instead of reading them. A misaligned array is read all the same: a CPU would copy
        it, and keep the mapping beside the copy.
        Raises LoadError ("weights").
        """
        with self._lock:
            try:
                return self._array(name, start, size, mapped)
            except OSError as error:
                raise self._refusal([self._other(name, f"it cannot be read: {error.strerror}")]) from error

    def _array(self, name: str, start: int, size: int, mapped: bool) -> memoryview:
        fault = self._fault(name)
        if fault:
            raise self._refusal([fault])
        file = self._opened[name]
        if not mapped and self._check != "never":
            # Read and check everything now, whatever was checked before, so that only checked bytes are used.
            if name not in self._copied:
                self._copied[name] = self._copies(name, file)
            return self._copied[name][start, size]
        if mapped and self._check != "never" and name not in self._checked:
            fault = self._difference(name)
            if fault:
                raise self._refusal([fault])
            self._checked.add(name)
        if mapped and start % ALIGNMENT:
            self._tell_of_copies(name)
        if not mapped or start % ALIGNMENT:
            return file.copy(start, size)
        if name not in self._mapped:
            self._mapped[name] = file.map()
        return self._mapped[name][start : start + size]

    def _tell_of_copies(self, name: str) -> None:
        """Warn once if much of a file is copied, because then each process has its own copy."""
        sizes = [size for start, size in self._arrays[name] if start % ALIGNMENT]
        if name in self._told or sum(sizes) <= _COPIED_IN_SILENCE:
            return
        import warnings

        self._told.add(name)
        what = f"{len(sizes)} of {len(self._arrays[name])} arrays, {sum(sizes) >> 20:,} MiB, do not start at a multiple"
        write = "save the file again, with each array at such a place; `stagec inspect` counts the others"
        warnings.warn(
            f"{self.path(name)}: {what} of {ALIGNMENT} bytes: they are copied into this process's memory; {write}",
            RuntimeWarning,
            stacklevel=2,
        )

    def _copies(self, name: str, file: RegularFile) -> Mapping[ByteRange, memoryview]:
        """Read a file once, piece by piece, and keep only its arrays, each at an address that a CPU can use."""
        spans, at = {}, 0
        for start, size in sorted(self._arrays[name]):
            spans[start, size] = at
            at += -(-size // ALIGNMENT) * ALIGNMENT
        memory = reading.memory(at)
        arrays = {(start, size): memory[at : at + size] for (start, size), at in spans.items()}

        def take(span: ByteRange, at: int, part: memoryview) -> None:
            arrays[span][at : at + len(part)] = part

        if read_once(file, arrays, take) != self._listed[name]["sha256"]:
            raise self._refusal([self._other(name, "it changed since, or its sha256 is another")])
        return {span: view.toreadonly() for span, view in arrays.items()}

    def _fault(self, name: str) -> str:
        """Open a file, unless it is, and compare its size; return what is wrong."""
        if name in self._opened:
            return ""
        try:
            file = RegularFile(self.path(name))
        except FileNotFoundError:
            return self._other(name, "there is no such file")
        except OSError as error:
            return self._other(name, f"it cannot be read: {error.strerror}")
        if file.size != self._listed[name]["bytes"]:
            return self._other(name, f"it has {file.size:,} bytes")
        self._opened[name] = file
        return ""

    def _difference(self, name: str) -> str:
        """Compare the digest of a file that is open; return what is wrong."""
        try:
            sha256 = sha256_of(self._opened[name])
        except OSError as error:
            return self._other(name, f"it cannot be read: {error.strerror}")
        return "" if sha256 == self._listed[name]["sha256"] else self._other(name, f"its sha256 is {sha256}")

    def _other(self, name: str, what: str) -> str:
        listed = self._listed[name]
        return f"{self.path(name)}: {what}; the bundle wants {listed['bytes']:,} bytes, sha256 {listed['sha256']}"

    def _refusal(self, faults: list[str]) -> LoadError:
        listed = "".join(f"\n  {fault}" for fault in faults)
        return LoadError(
            "weights", f"{self._archive_path}: weights beside the bundle are missing or are not the right ones:{listed}"
        )
