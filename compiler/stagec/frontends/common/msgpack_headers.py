"""The arrays of a flax checkpoint in msgpack, without their data.

flax.serialization stores a tree of dicts; an array is an extension of type 1 that has its shape, its dtype's name and
its bytes, a numpy scalar one of type 3, a complex number one of type 2. An array of more than 1 GiB is a dict with its
shape and flat chunks (https://github.com/google/flax/blob/main/flax/serialization.py). The msgpack package reads values
but no headers of extensions (https://github.com/msgpack/msgpack/blob/master/spec.md), so those are read here.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WINDOW = 1 << 16
"""Bytes of the longest value that is not an extension: a name, or shape and dtype."""
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
"""First byte of an extension -> bytes of its length."""
_FIXED = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
"""First byte of an extension -> its length."""
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_CHUNKED = "__msgpack_chunked_array__"


@dataclass(frozen=True)
class Array:
    """An array's shape and dtype. dtype: numpy's name."""

    shape: tuple[int, ...]
    dtype: str


def read(path: Path) -> Any:
    """Return the tree of a file: dicts and lists, with an `Array` for each array, numbers, strings and None as such.

    Raises ValueError if the file is something else or not whole, and ImportError without msgpack.
    """
    if not path.stat().st_size:
        raise ValueError("it is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(data)
        try:
            tree = reader.node()
        except RecursionError:
            raise ValueError("it is nested too deep") from None
        if reader.at != len(data):
            raise ValueError(f"something follows after byte {reader.at:,}")
        return tree


class _Reader:
    """A file, and the byte that is read next."""

    def __init__(self, data: mmap.mmap) -> None:
        import msgpack

        self._msgpack = msgpack
        self._data = data
        self.at = 0

    def node(self) -> Any:
        """Read the value that begins here."""
        first = self._byte()
        if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
            pairs = self._value("read_map_header")
            tree = {self._value(): self.node() for _ in range(pairs)}
            return self._whole(tree) if _CHUNKED in tree else tree
        if 0x90 <= first <= 0x9F or first in (0xDC, 0xDD):
            return [self.node() for _ in range(self._value("read_array_header"))]
        if first in _EXTENSIONS or first in _FIXED:
            return self._extension(first)
        return self._value()

    def _extension(self, first: int) -> Any:
        size = _EXTENSIONS.get(first, 0)
        length = int.from_bytes(self._data[self.at + 1 : self.at + 1 + size], "big") if size else _FIXED[first]
        self.at += 1 + size
        kind = self._byte()
        self.at += 1
        end = self.at + length
        if end > len(self._data):
            raise ValueError(f"it ends at byte {len(self._data):,}, in the middle of an array")
        if kind == _COMPLEX:
            value: Any = Array((), "complex64")
        elif kind in (_ARRAY, _SCALAR):
            if self._value("read_array_header") != 3:
                raise ValueError(f"there is no array at byte {self.at:,}")
            shape, dtype = self._value(), self._value()
            value = Array(_sizes(shape), str(dtype))
        else:
            raise ValueError(f"byte {self.at - 1:,} is an extension of type {kind}, which flax does not write")
        self.at = end
        return value

    def _whole(self, tree: dict[Any, Any]) -> Array:
        """Return the array that stands in chunks."""
        shape, chunks = tree.get("shape"), tree.get("chunks")
        if not isinstance(shape, dict) or not isinstance(chunks, dict) or not isinstance(chunks.get("0"), Array):
            raise ValueError("the chunks of an array are damaged")
        return Array(_sizes(list(shape.values())), chunks["0"].dtype)

    def _byte(self) -> int:
        if self.at >= len(self._data):
            raise ValueError(f"it ends at byte {len(self._data):,}, in the middle of its tree")
        return self._data[self.at]

    def _value(self, method: str = "unpack") -> Any:
        """Let msgpack read one value that is not an extension, or the header of a container."""
        unpacker = self._msgpack.Unpacker(strict_map_key=False)
        unpacker.feed(self._data[self.at : self.at + _WINDOW])
        try:
            value = getattr(unpacker, method)()
        except self._msgpack.OutOfData:
            raise ValueError(f"it is cut off, or a name is too long, at byte {self.at:,}") from None
        except (self._msgpack.UnpackException, ValueError) as error:
            raise ValueError(f"byte {self.at:,} is not msgpack ({error or type(error).__name__})") from None
        self.at += unpacker.tell()
        return value


def _sizes(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"an array has the shape {shape!r}")
    return tuple(shape)
