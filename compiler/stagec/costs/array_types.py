"""Array types as HLO text writes them: dtype, sizes and layout (https://openxla.org/xla/tiled_layout)."""

from __future__ import annotations

import re
from typing import NamedTuple

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
_TILES = re.compile(r"T((?:\([\d,*]+\))+)")


class NotStatic(ValueError):
    """A type that is not an array of static sizes."""


class Array(NamedTuple):
    """An array type. order: dimensions from the minor one; tiles: of the layout, the outer one first."""

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...]
    tiles: tuple[tuple[int, ...], ...] = ()

    @property
    def plain(self) -> str:
        """The type without its layout."""
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def physical(self) -> tuple[int, ...]:
        """Sizes in memory, from the major dimension."""
        return tuple(self.dims[axis] for axis in reversed(self.order))


def array(type_: str) -> Array:
    """Read an array type. Raises NotStatic for any other."""
    match = _ARRAY.fullmatch(type_)
    if match is None:
        raise NotStatic(f"{type_} is not an array of a static size")
    dtype, dims, order, rest = match.groups()
    sizes = _numbers(dims)
    tiles = _TILES.search(rest or "")
    read = tuple(map(_numbers, tiles[1][1:-1].split(")("))) if tiles and "*" not in tiles[1] else ()
    return Array(dtype, sizes, _numbers(order) if order is not None else tuple(reversed(range(len(sizes)))), read)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
