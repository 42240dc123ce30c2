"""Symbolic sizes: dimensions of arrays whose numbers are known when an artifact is called, as in `jax.export`.

A `Dim` is an expression over named sizes, of which each is at least 1 (https://docs.jax.dev/en/latest/export/shape_poly.html).
It is a `core.sizes.size.Size` and the constraints on its names, with Python's operators. A known value is an int.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from stagec.core.sizes.size import Call, Constraint, DimensionError, Size, parse as parse_size, parse_constraint
from stagec_arrays.bounds import Interval, bounds, contradiction, divided, replaced, without_equal_names

Shape: TypeAlias = tuple[Any, ...]
"""Sizes: ints, or `Dim` if they are symbolic."""


class InconclusiveDimension(ValueError):
    """A comparison of symbolic sizes that is true for some sizes and false for others, or that stagec cannot decide."""


@dataclass(frozen=True, eq=False)
class Dim:
    """A symbolic size.

    size: the expression. constraints: those on the names in it.
    """

    size: Size
    constraints: tuple[Constraint, ...] = ()

    def __str__(self) -> str:
        return str(self.size)

    __repr__ = __str__

    def __hash__(self) -> int:
        return hash(self._known)

    def __eq__(self, other: object) -> bool:
        """Whether they are one expression, so that they are equal for all sizes."""
        if isinstance(other, Dim):
            return self._known == other._known
        return isinstance(other, int | np.integer) and self._known == other

    @functools.cached_property
    def _known(self) -> Size | int:
        """The size in its normal form: equal for all sizes that the constraints make equal."""
        size = without_equal_names(self.size, self.constraints) if self.constraints else self.size
        number = size.constant
        return size if number is None else number

    @property
    def bounds(self) -> Interval:
        """The least and the largest value, as far as they are known; -inf and inf otherwise."""
        return bounds(self.size, self.constraints)

    def __index__(self) -> int:
        what = f"the symbolic size {self} is used as a number"
        raise TypeError(f"{what}: its number is known when the artifact is called; write an operation of sizes instead")

    __int__ = __float__ = __index__

    def __bool__(self) -> bool:
        low, high = self.bounds
        if low > 0 or high < 0:
            return True
        raise self._undecided("!= 0")

    def __add__(self, other: Any) -> Any:
        return self._with(Size.__add__, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._with(Size.__sub__, other)

    def __rsub__(self, other: Any) -> Any:
        return self._with(lambda own, other: other - own, other)

    def __mul__(self, other: Any) -> Any:
        return self._with(Size.__mul__, other)

    __rmul__ = __mul__

    def __neg__(self) -> Any:
        return self * -1

    def __pow__(self, exponent: Any) -> Any:
        if not isinstance(exponent, int | np.integer):
            return NotImplemented
        if exponent < 0:
            raise ValueError(f"{self}**{exponent}: the power of a size is 0 or more")
        return product([self] * int(exponent))

    def __floordiv__(self, other: Any) -> Any:
        return self._with(_quotient, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._with(lambda own, other: _quotient(other, own), other)

    def __mod__(self, other: Any) -> Any:
        return self._with(_rest, other)

    def __rmod__(self, other: Any) -> Any:
        return self._with(lambda own, other: _rest(other, own), other)

    def __divmod__(self, other: Any) -> Any:
        return (self // other, self % other) if isinstance(other, _SIZES) else NotImplemented

    def __rdivmod__(self, other: Any) -> Any:
        return (other // self, other % self) if isinstance(other, _SIZES) else NotImplemented

    def __lt__(self, other: Any) -> bool:
        return not self._at_least(other, "<") if isinstance(other, _SIZES) else NotImplemented

    def __gt__(self, other: Any) -> bool:
        return self._at_least(other + 1, ">", other) if isinstance(other, _SIZES) else NotImplemented

    def __le__(self, other: Any) -> bool:
        return not self._at_least(other + 1, "<=", other) if isinstance(other, _SIZES) else NotImplemented

    def __ge__(self, other: Any) -> bool:
        return self._at_least(other, ">=") if isinstance(other, _SIZES) else NotImplemented

    def _at_least(self, other: Any, sign: str, shown: Any = None) -> bool:
        low, high = _bounds(self - other)
        if low >= 0:
            return True
        if high < 0:
            return False
        raise self._undecided(f"{sign} {other if shown is None else shown}")

    def _undecided(self, comparison: str) -> InconclusiveDimension:
        what = f"whether {self} {comparison} depends on the sizes that the artifact is called with"
        return InconclusiveDimension(f"{what}; add a constraint that says it")

    def _with(self, function: Callable[[Size, Size], Size], other: Any) -> Any:
        if isinstance(other, Dim):
            constraints = self.constraints
            if other.constraints != constraints:
                constraints = tuple(dict.fromkeys((*constraints, *other.constraints)))
            return _made(function(self.size, other.size), constraints)
        if not isinstance(other, _SIZES):  # an array has operators for sizes
            return NotImplemented
        return _made(function(self.size, Size.of(int(other))), self.constraints)


_SIZES = (int, np.integer, Dim)


def _quotient(left: Size, right: Size) -> Size:
    exact = divided(left, right)
    return left.call("floordiv", right) if exact is None else exact[0]


def _rest(left: Size, right: Size) -> Size:
    exact = divided(left, right)
    return left.call("mod", right) if exact is None else exact[1]


def _made(size: Size, constraints: tuple[Constraint, ...]) -> Any:
    """Return a size, as an int if it is known. Equalities of products and calls rewrite it, as in JAX."""
    for constraint in constraints:
        left, sign, right = constraint
        if sign != "==" or len(left.terms) != 1 or size.constant is not None:
            continue
        ((factors, coefficient),) = left.terms
        if len(factors) == 1 and isinstance(factors[0], str):  # a name stays, as shapes of arguments have it
            continue
        size = replaced(size, factors, coefficient, right)
        match factors, coefficient, right.constant:
            case (Call("mod", dividend, divisor),), 1 | -1, 0 if divisor.constant is not None:
                size = replaced(size, (Call("floordiv", dividend, divisor),), divisor.constant, dividend)
    number = size.constant
    return Dim(size, constraints) if number is None else number


def _bounds(size: Any) -> Interval:
    return size.bounds if isinstance(size, Dim) else (size, size)


def at_least(size: Any, other: Any) -> bool:
    """Whether a size is known to be at least another; also False if it is undecided."""
    return _bounds(size - other)[0] >= 0


def larger(size: Any, other: Any) -> Any:
    """Return the larger of two sizes."""
    return _extremum("max", size, other)


def smaller(size: Any, other: Any) -> Any:
    """Return the smaller of two sizes."""
    return _extremum("min", size, other)


def _extremum(name: str, size: Any, other: Any) -> Any:
    low, high = _bounds(size - other)
    if low >= 0:
        return size if name == "max" else other
    if high <= 0:
        return other if name == "max" else size
    if isinstance(size, Dim):
        return size._with(lambda own, other: own.call(name, other), other)
    return other._with(lambda own, size: size.call(name, own), size)


def parse(text: str | int, constraints: Sequence[Constraint] = ()) -> Any:
    """Parse a size: an int, or a `Dim`. Raises ValueError."""
    return text if isinstance(text, int) else _made(parse_size(text), tuple(constraints))


def symbolic_shape(text: str, *, constraints: Sequence[str] = ()) -> Shape:
    """Return a shape with symbolic sizes: a `Dim` for each of them, an int for a known size.

    As `jax.export.symbolic_shape`.

    text: the sizes, such as "batch, 2*seq, 64".
    constraints: conditions on them, such as "batch >= 2" or "mod(seq, 8) == 0".

    Raises ValueError if it cannot parse them, or no sizes fulfil all constraints.

    >>> stagec_arrays.ShapeDtypeStruct(stagec_arrays.symbolic_shape("batch, 2*seq, 64"), "float32")
    ShapeDtypeStruct(f32[batch,2*seq,64])
    """
    from stagec.core.sizes.avals import parse_aval

    known = tuple(map(parse_constraint, constraints))
    if wrong := contradiction(known):
        raise DimensionError(wrong[1])
    return tuple(parse(size, known) for size in parse_aval(f"f32[{text.strip().strip('()')}]").shape)


def product(sizes: Sequence[Any]) -> Any:
    """Return the product of sizes."""
    result: Any = 1
    for size in sizes:
        result = result * size
    return result


def is_static(shape: Sequence[Any]) -> bool:
    """Whether all sizes are numbers."""
    return {int}.issuperset(map(type, shape))


def size_of(size: Any) -> Any:
    """Return a size as it stands in a shape: an int, or a `Dim`. It may be NumPy's integer.

    Raises TypeError for anything but a size, ValueError for a negative number.
    """
    if isinstance(size, Dim):
        return size
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise TypeError(f"a size is an integer, not {size!r}")
    number = int(size.__index__())
    if number < 0:
        raise ValueError(f"a size is 0 or more, not {number}")
    return number
