"""Sizes of dimensions: the expressions JAX accepts in a shape, as polynomials that are read, computed with and printed.

A size is built from integers and names with `+ - *`, `^` (a power), and `floordiv mod max min`, as in
`jax.export.symbolic_shape`. Written by a person it may also have parentheses, `//` and `%`; the canonical spelling has
none of these, so that JAX reads it. Manifests and artifacts hold the spelling, everything else a `Size`.
"""

import ast
import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, Union

from stagec.core.sizes import expressions
from stagec.core.sizes.frozen import Frozen
from stagec.core.sizes.names import is_name

FUNCTIONS: dict[str, Callable[[int, int], int]] = {
    "floordiv": operator.floordiv,
    "max": max,
    "min": min,
    "mod": operator.mod,
}
"""What each of `names.FUNCTIONS` computes."""

_MOST_TERMS = 1000
"""Terms of one expression, and a bound on the work of multiplying two: far more than a model's shapes have."""
_HIGHEST_DEGREE = 64
"""Factors of one term, and the highest power."""
_LARGEST = 2**63
"""Numbers are below it: no dimension is larger."""
_DEEPEST = 100
"""Levels of parentheses, signs, products and calls: each takes a few of Python's levels."""
_CHARACTERS = re.compile(r"[A-Za-z0-9_+\-*/%^(), ]*")
_COMPARISONS = {ast.Eq: "==", ast.GtE: ">=", ast.LtE: "<=", ast.Gt: ">", ast.Lt: "<"}


class DimensionError(ValueError):
    """A dimension expression or constraint that stagec cannot read or evaluate; `str(error)` says why."""


class Call(NamedTuple):
    """A factor that is a function of two sizes; its name is a key of FUNCTIONS."""

    name: str
    left: "Size"
    right: "Size"

    def __str__(self) -> str:
        return f"{self.name}({self.left},{self.right})"


Factor: TypeAlias = Union[str, Call]  # noqa: UP007 # `Call` is not a type that `|` takes in a string annotation
"""A name or a call."""
Monomial: TypeAlias = tuple[Factor, ...]
"""A product of factors, sorted by their spelling; a power is a factor several times, and () is 1."""


class Size(Frozen):
    """An expression over named sizes: a sum of products. Two that are the same polynomial are equal.

    terms: each product with its coefficient, which is never 0, in the order in which they are printed: by falling
    degree, then by spelling. All operations raise DimensionError if the result is too large for a model.
    """

    terms: tuple[tuple[Monomial, int], ...]

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]) -> None:
        object.__setattr__(self, "terms", terms)

    def __eq__(self, other: object) -> bool:
        return self.terms == other.terms if type(other) is Size else NotImplemented

    def __hash__(self) -> int:
        return hash(self.terms)

    @staticmethod
    def of(value: "int | Factor") -> "Size":
        """Return a number, a name or a call as a size."""
        if isinstance(value, int):
            return _made({(): int(value)})
        return Size((((value,), 1),))

    @property
    def constant(self) -> int | None:
        """The value of a size that has no names; None for others."""
        if not self.terms:
            return 0
        factors, coefficient = self.terms[0]
        return None if factors else coefficient

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The names in it."""
        names: set[str] = set()
        for factors, _ in self.terms:
            for factor in factors:
                names |= {factor} if isinstance(factor, str) else factor.left.names | factor.right.names
        return frozenset(names)

    def __add__(self, other: "Size | int") -> "Size":
        return self._plus(other, 1)

    def __sub__(self, other: "Size | int") -> "Size":
        return self._plus(other, -1)

    def __neg__(self) -> "Size":
        return Size(tuple((factors, -coefficient) for factors, coefficient in self.terms))

    def _plus(self, other: "Size | int", sign: int) -> "Size":
        return _sum([(self, 1), (other if isinstance(other, Size) else Size.of(other), sign)])

    def __mul__(self, other: "Size | int") -> "Size":
        right = other if isinstance(other, Size) else Size.of(other)
        degree = sum(max((len(factors) for factors, _ in size.terms), default=0) for size in (self, right))
        _check_product(len(self.terms) * len(right.terms), degree)
        total: dict[Monomial, int] = {}
        for first, a in self.terms:
            for second, b in right.terms:
                factors = tuple(sorted(first + second, key=str)) if first and second else first or second
                total[factors] = total.get(factors, 0) + a * b
        return _made(total)

    def __pow__(self, exponent: int) -> "Size":
        return functools.reduce(operator.mul, [self] * exponent, Size.of(1))

    def call(self, name: str, other: "Size") -> "Size":
        """Return a call of a function of two sizes; a number if both are numbers."""
        if name in ("floordiv", "mod") and not other.terms:
            raise DimensionError("division by zero")
        left, right = self.constant, other.constant
        if left is not None and right is not None:
            return Size.of(FUNCTIONS[name](left, right))
        return Size.of(Call(name, self, other))

    def compute(self, sizes: Mapping[str, Any], functions: Mapping[str, Callable[[Any, Any], Any]] = FUNCTIONS) -> Any:
        """Return its value, in the order of operations of its spelling. sizes: anything that has Python's operators.

        Raises DimensionError where a name has no size, or for a division by zero.
        """
        total: Any = None
        for factors, coefficient in self.terms:
            value: Any = None
            negative = coefficient < 0 and total is None
            if abs(coefficient) != 1 or not factors:
                value = coefficient if negative else abs(coefficient)
            for factor, exponent in _powers(factors):
                power = _value(factor, sizes, functions)
                power = power if exponent == 1 else power**exponent
                value = (-power if negative else power) if value is None else value * power
            total = value if total is None else total - value if coefficient < 0 else total + value
        return 0 if total is None else total

    def __str__(self) -> str:
        return self._spelling

    __repr__ = __str__

    @functools.cached_property
    def _spelling(self) -> str:
        text = ""
        for factors, coefficient in self.terms:
            powers = [f"{factor}^{exponent}" if exponent > 1 else str(factor) for factor, exponent in _powers(factors)]
            number = [str(abs(coefficient))] if abs(coefficient) != 1 or not powers else []
            text += ("-" if coefficient < 0 else "+" if text else "") + "*".join(number + powers)
        return text or "0"


def _made(terms: Mapping[Monomial, int]) -> Size:
    if len(terms) > _MOST_TERMS or any(abs(coefficient) >= _LARGEST for coefficient in terms.values()):
        raise DimensionError(f"a dimension of more than {_MOST_TERMS} terms, or of 64 bits")
    kept = [(factors, coefficient) for factors, coefficient in terms.items() if coefficient]
    if len(kept) > 1:
        kept.sort(key=lambda term: (-len(term[0]), [*map(str, term[0])]))
    return Size(tuple(kept))


def _check_product(terms: int, degree: int) -> None:
    if terms > _MOST_TERMS or degree > _HIGHEST_DEGREE:
        raise DimensionError(f"a product of more than {_MOST_TERMS} terms, or of a degree over {_HIGHEST_DEGREE}")


def _sum(sizes: Iterable[tuple[Size, int]]) -> Size:
    """Return the sum of sizes, each some times."""
    total: dict[Monomial, int] = {}
    for size, times in sizes:
        for factors, coefficient in size.terms:
            total[factors] = total.get(factors, 0) + times * coefficient
    return _made(total)


def _powers(factors: Monomial) -> list[tuple[Factor, int]]:
    return [(factor, factors.count(factor)) for factor in dict.fromkeys(factors)]


def _value(factor: Factor, sizes: Mapping[str, Any], functions: Mapping[str, Callable[[Any, Any], Any]]) -> Any:
    if isinstance(factor, str):
        if factor not in sizes:
            raise DimensionError(f'dimension "{factor}" has no size')
        return sizes[factor]
    try:
        return functions[factor.name](factor.left.compute(sizes, functions), factor.right.compute(sizes, functions))
    except ZeroDivisionError:
        raise DimensionError("division by zero") from None


@functools.lru_cache(4096)
def parse(text: str) -> Size:
    """Read a size. Raises DimensionError."""
    return Size.of(text) if is_name(text) else _size(_parse(text))


class Constraint(NamedTuple):
    """A condition on sizes: sign is ==, >= or <=. JAX accepts its spelling."""

    left: Size
    sign: str
    right: Size

    def __str__(self) -> str:
        return f"{self.left} {self.sign} {self.right}"

    @property
    def names(self) -> frozenset[str]:
        """The names in it."""
        return self.left.names | self.right.names

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it is true with these sizes. Raises DimensionError where a name has no size."""
        compare = {"==": operator.eq, ">=": operator.ge, "<=": operator.le}[self.sign]
        return bool(compare(self.left.compute(sizes), self.right.compute(sizes)))


@functools.lru_cache(4096)
def parse_constraint(text: str) -> Constraint:
    """Read a constraint: `<` and `>` become `<=` and `>=`, and the symbolic side of an equality comes first.

    Raises DimensionError.
    """
    left, sign, right = _sides(_parse(text))
    a, b = _size(left), _size(right)
    if sign == ">":
        sign, b = ">=", b + 1
    elif sign == "<":
        sign, a = "<=", a + 1
    elif sign == "==" and a.constant is not None:
        a, b = b, a
    return Constraint(a, sign, b)


def canonical_dimension(text: str) -> int | str:
    """Reads one dimension: an int if the expression is constant, else its canonical string, such as `2*batch+1`.

    Two expressions that differ in spacing, in the order of terms or in redundant parentheses have one canonical string.
    Raises DimensionError for anything else, negative constants included.
    """
    if is_name(text):
        return text
    size = parse(text)
    number = size.constant
    if number is None:
        return str(size)
    if number < 0:
        raise DimensionError(f"negative dimension {number}")
    return number


def names_in(text: str) -> frozenset[str]:
    """The names of the symbolic dimensions in a dimension expression."""
    return parse(text).names


def evaluate(text: str, sizes: Mapping[str, int]) -> int:
    """The value of a dimension expression with these sizes for its names; it may be negative.

    Raises DimensionError where a name has no size, or for a division by zero.
    """
    return int(parse(text).compute(sizes))


class Solution(NamedTuple):
    """How a named size follows from a dimension: equation: its position. `slope * name + rest` is the dimension."""

    equation: int
    name: str
    slope: int
    rest: Size


def solutions(equations: Sequence[Size]) -> Iterator[Solution]:
    """Yield the solution for each name, from equations that are linear in one unknown name, as in JAX."""
    waiting, known = dict(enumerate(equations)), set[str]()
    progress = True
    while progress:
        progress = False
        for position, size in list(waiting.items()):
            unknown = size.names - known
            if len(unknown) > 1:
                continue
            if unknown:
                (name,) = unknown
                slope = dict(size.terms).get((name,), 0)
                rest = size - Size.of(name) * slope
                if not slope or name in rest.names:
                    continue
                known.add(name)
                progress = True
                yield Solution(position, name, slope, rest)
            del waiting[position]


def solve(equations: Iterable[tuple[int | str, int]], dimensions: Iterable[str] = ()) -> dict[str, int]:
    """The size of each name, from pairs of a dimension and its size; each follows from a linear equation, as in JAX.

    dimensions: the name of each one for messages, such as `args[0].shape[1]`; only errors use it.
    Raises DimensionError if a name cannot be found, or if a dimension has another size than the others imply.
    """
    pairs = list(equations)
    wanted = [(parse(dim), size) for dim, size in pairs if isinstance(dim, str)]
    sizes: dict[str, int] = {}
    for solution in solutions([dim for dim, _ in wanted]):
        sizes[solution.name] = (wanted[solution.equation][1] - solution.rest.compute(sizes)) // solution.slope
    missing = sorted(frozenset().union(*(dim.names for dim, _ in wanted)) - set(sizes))
    if missing:
        rows = zip(_named(dimensions, pairs), pairs, strict=True)
        given = ", ".join(f"{name} = {size} ({dim})" for name, (dim, size) in rows if isinstance(dim, str))
        raise DimensionError(f"{', '.join(missing)} cannot be found from {given}")
    for position, (dim, size) in enumerate(pairs):
        value = dim if isinstance(dim, int) else evaluate(dim, sizes)
        if value != size:
            names = [] if isinstance(dim, int) else sorted(names_in(dim))
            solved = f" ({dim} with {', '.join(f'{name} = {sizes[name]}' for name in names)})" if names else ""
            raise DimensionError(f"{_named(dimensions, pairs)[position]} is {size}; expected {value}{solved}")
    return sizes


def _named(dimensions: Iterable[str], pairs: Sequence[object]) -> Sequence[str]:
    return list(dimensions) or ["a dimension"] * len(pairs)


def _parse(text: str) -> ast.expr:
    if not text.strip():
        raise DimensionError("empty dimension")
    if not _CHARACTERS.fullmatch(re.sub("[=<>]=|[<>]", "", text)):
        raise DimensionError(f'bad dimension expression "{text}"')
    try:
        body = expressions.parse(text.replace("^", "**"))
    except ValueError:
        raise DimensionError(f'bad dimension expression "{text[:80]}"') from None
    _check_depth(body)
    return body


def _check_depth(node: ast.AST) -> None:
    level: list[ast.AST] = [node]
    for _ in range(_DEEPEST):
        level = [child for parent in level for child in _below(parent)]
        if not level:
            return
    raise DimensionError(f"dimension expression nested deeper than {_DEEPEST} levels")


def _below(node: ast.AST) -> Iterable[ast.AST]:
    """Return the parts of a node; a sum has its terms, however many."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        return [term for term, _ in _terms(node)]
    return ast.iter_child_nodes(node)


def _terms(node: ast.expr) -> Iterator[tuple[ast.expr, int]]:
    """Yield the terms of a sum, the last one first, with 1 or -1 for its sign."""
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        yield node.right, 1 if isinstance(node.op, ast.Add) else -1
        node = node.left
    yield node, 1


def _sides(node: ast.expr) -> tuple[ast.expr, str, ast.expr]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sign = _COMPARISONS.get(type(node.ops[0]))
        if sign is not None:
            return node.left, sign, node.comparators[0]
    raise DimensionError("a constraint compares two dimensions with ==, >= or <=")


def _size(node: ast.expr) -> Size:
    """The only code that knows the allowed syntax."""
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return Size.of(number)
        case ast.Name(id=name) if name not in FUNCTIONS and name != "_":
            return Size.of(name)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _size(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_size(operand)
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            return _sum((_size(term), sign) for term, sign in _terms(node))
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _size(left) * _size(right)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as power)):
            if power > _HIGHEST_DEGREE:
                raise DimensionError(f"power {power} is over the limit of {_HIGHEST_DEGREE}")
            return _size(left) ** power
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            return _size(left).call("floordiv", _size(right))
        case ast.BinOp(left=left, op=ast.Mod(), right=right):
            return _size(left).call("mod", _size(right))
        case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]) if name in FUNCTIONS:
            return _size(left).call(name, _size(right))
    shown = ast.unparse(node).replace("**", "^")
    raise DimensionError(f'bad dimension expression "{shown}"')
