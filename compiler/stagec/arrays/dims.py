"""Symbolic sizes: dimensions of arrays whose numbers are known when an artifact is called, as in `jax.export`.

A `Dim` is an expression over named sizes, of which each is at least 1 (https://docs.jax.dev/en/latest/export/shape_poly.html).
Its arithmetic is that of `core.dimensions`, which gives equal expressions one spelling.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from stagec.core import dimensions

Shape: TypeAlias = tuple[Any, ...]
"""Sizes: ints, and `Dim` where they are symbolic."""


class InconclusiveDimension(ValueError):
    """A comparison of symbolic sizes that is true for some sizes and false for others."""


@dataclass(frozen=True, eq=False)
class Dim:
    """A symbolic size.

    text: the expression, in its canonical spelling. constraints: canonical ones that hold of the names in it.
    """

    text: str
    constraints: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        """Whether they are equal for all sizes."""
        return isinstance(other, Dim) and self.text == other.text

    def __index__(self) -> int:
        what = f"the symbolic size {self} is used as a number"
        raise TypeError(f"{what}: its number is known when the artifact is called; write an operation of sizes instead")

    __int__ = __float__ = __index__

    def __bool__(self) -> bool:
        return self >= 1 or self != 0

    def __add__(self, other: Any) -> Any:
        return self._with("({})+({})", self, other)

    def __radd__(self, other: Any) -> Any:
        return self._with("({})+({})", other, self)

    def __sub__(self, other: Any) -> Any:
        return self._with("({})-({})", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._with("({})-({})", other, self)

    def __mul__(self, other: Any) -> Any:
        return self._with("({})*({})", self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._with("({})*({})", other, self)

    def __neg__(self) -> Any:
        return self._with("-({})", self)

    def __floordiv__(self, other: Any) -> Any:
        if isinstance(other, int | Dim) and (exact := self._divided(other)) is not None:
            return exact
        return self._with("floordiv({},{})", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._with("floordiv({},{})", other, self)

    def __mod__(self, other: Any) -> Any:
        if isinstance(other, int | Dim) and self._divided(other) is not None:
            return 0
        found = self._with("mod({},{})", self, other)
        return 0 if isinstance(found, Dim) and f"{found.text} == 0" in self.constraints else found

    def __rmod__(self, other: Any) -> Any:
        return self._with("mod({},{})", other, self)

    def __lt__(self, other: Any) -> bool:
        return not self >= other if isinstance(other, _SIZES) else NotImplemented

    def __gt__(self, other: Any) -> bool:
        return bool(self >= other + 1) if isinstance(other, _SIZES) else NotImplemented

    def __le__(self, other: Any) -> bool:
        return not self > other if isinstance(other, _SIZES) else NotImplemented

    def __ge__(self, other: Any) -> bool:
        if not isinstance(other, _SIZES):
            return NotImplemented
        difference = self - other
        low, high = _bounds(difference)
        if low >= 0:
            return True
        if high < 0:
            return False
        what = f"whether {self} >= {other} depends on the sizes that the artifact is called with"
        raise InconclusiveDimension(f"{what}; add a constraint that says it")

    def max(self, other: Any) -> Any:
        """Return the larger of the two."""
        with contextlib.suppress(InconclusiveDimension):
            return max(self, other)
        return self._with("max({},{})", self, other)

    def _divided(self, other: Any) -> Any:
        """Return the quotient where `other` divides the expression for all sizes; None where it may not."""
        parts = re.split(r"(?=[+-])", self.text) if "(" not in self.text else []
        quotients = [_divide_term(part, str(other)) for part in parts if part]
        if not quotients or None in quotients:
            return None
        return _made("+".join(f"({part})" for part in quotients), self.constraints)

    def _with(self, form: str, *operands: Any) -> Any:
        if not all(isinstance(one, _SIZES) for one in operands):  # an array has operators for sizes
            return NotImplemented
        known = [one.constraints for one in operands if isinstance(one, Dim)]
        constraints = tuple(dict.fromkeys(text for texts in known for text in texts))
        return _made(form.format(*(one if isinstance(one, Dim) else int(one) for one in operands)), constraints)


_SIZES = (int, np.integer, Dim)


def _made(text: str, constraints: tuple[str, ...]) -> Any:
    try:
        found = dimensions.canonical_dimension(text)
    except dimensions.DimensionError as error:
        number = re.fullmatch(r"negative dimension (-\d+)", str(error))  # sizes may be so, of a slice's end
        if number is None:
            raise ValueError(str(error)) from None
        return int(number[1])
    return found if isinstance(found, int) else Dim(found, constraints)


def _divide_term(term: str, divisor: str) -> str | None:
    """Return `4*a*b` divided by `2` or `a`; None where that is no whole expression."""
    sign, factors = ("-" if term.startswith("-") else ""), term.lstrip("+-").split("*")
    if divisor.isdigit():
        number = int(factors[0]) if factors[0].isdigit() else 1
        rest = factors[1:] if factors[0].isdigit() else factors
        return None if number % int(divisor) else sign + "*".join([str(number // int(divisor)), *rest])
    wanted = divisor.split("*")
    if wanted[0].isdigit():
        inner = _divide_term(term, wanted[0])
        return None if inner is None else _divide_term(inner, "*".join(wanted[1:]))
    for name in wanted:
        if name not in factors:
            return None
        factors.remove(name)
    return sign + ("*".join(factors) or "1")


def _bounds(size: Any) -> tuple[float, float]:
    """Return the least and the largest value of an expression, where each name is 1 or more; infinite if not known.

    Constraints on one name bound it. A constraint `A >= B` also bounds what is A - B but for a number.
    """
    if not isinstance(size, Dim):
        return size, size
    low, high = -math.inf, math.inf
    for constraint in size.constraints:
        left, sign, right = constraint.split(" ")
        difference = _made(f"({left})-({right})", ())
        for factor in (1, -1):
            apart = size - factor * difference
            if isinstance(apart, int):  # size = factor * difference + apart
                if sign == "==":
                    return apart, apart
                if (sign == ">=") == (factor == 1):
                    low = max(low, apart)
                else:
                    high = min(high, apart)
    least, most = _interval(size)
    return max(low, least), min(high, most)


def _interval(size: Dim) -> tuple[float, float]:
    """Return bounds of an expression by those of its names."""
    if "(" in size.text or "^" in size.text:
        return (0 if re.fullmatch(r"(mod|max)\(.*\)", size.text) else -math.inf), math.inf
    low = high = 0.0
    for term in filter(None, re.split(r"(?=[+-])", size.text)):
        sign, least, most = (-1 if term.startswith("-") else 1), 1.0, 1.0
        for factor in term.lstrip("+-").split("*"):
            a, b = (float(factor),) * 2 if factor.isdigit() else _of_name(factor, size.constraints)
            least, most = least * a, most * b
        low, high = (low + least, high + most) if sign == 1 else (low - most, high - least)
    return low, high


def _of_name(name: str, constraints: tuple[str, ...]) -> tuple[float, float]:
    low, high = 1.0, math.inf
    for constraint in constraints:
        left, sign, right = constraint.split(" ")
        if left == name and right.isdigit():
            low = max(low, int(right)) if sign in (">=", "==") else low
            high = min(high, int(right)) if sign in ("<=", "==") else high
    return low, high


def parse(text: str | int, constraints: Sequence[str] = ()) -> Any:
    """Return a size from its text: an int, or a `Dim`. constraints: canonical ones. Raises ValueError."""
    return text if isinstance(text, int) else _made(text, tuple(constraints))


def symbolic_shape(text: str, *, constraints: Sequence[str] = ()) -> Shape:
    """Return a shape from text such as "batch, 2*seq, 64": a `Dim` for each symbolic size.

    As `jax.export.symbolic_shape`. constraints: such as "batch >= 2" or "mod(seq, 8) == 0". Raises ValueError.
    """
    from stagec.core.avals import parse_aval

    known = tuple(map(dimensions.canonical_constraint, constraints))
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
    """Return a size as it stands in a shape: an int, or a `Dim`. Raises TypeError for what is no size, and ValueError.

    A number may be of NumPy's.
    """
    if isinstance(size, Dim):
        return size
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise TypeError(f"a size is an integer, not {size!r}")
    number = int(size.__index__())
    if number < 0:
        raise ValueError(f"a size is 0 or more, not {number}")
    return number
