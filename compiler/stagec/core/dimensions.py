"""Symbolic dimensions: the expressions JAX accepts in a shape, read, brought to one spelling and evaluated.

An expression is built from integers and names with `+ - *`, `^` (a power), and `floordiv mod max min`, as in
`jax.export.symbolic_shape`. Written by a person it may also have parentheses, `//` and `%`; the canonical spelling has
none of these, so that JAX reads it. Internally an expression is a polynomial whose factors are names or calls.
"""

import ast
import functools
import keyword
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from stagec.core import expressions

FUNCTIONS: dict[str, Callable[[int, int], int]] = {
    "floordiv": operator.floordiv,
    "max": max,
    "min": min,
    "mod": operator.mod,
}
"""The functions of two arguments that JAX knows in dimension expressions."""

_Polynomial: TypeAlias = dict[tuple[str, ...], int]
"""Sum of terms: sorted factors (names and calls, as text) -> coefficient, never 0. The constant term has no factors."""

_HIGHEST_POWER = 8
_MOST_TERMS = 1000
"""Terms of one expression, and a bound on the work of multiplying two: far beyond what a model's shapes have."""
_HIGHEST_DEGREE = 64
"""Factors of one term: two nested powers."""
_LARGEST = 2**63
"""Numbers are below it: no dimension is larger."""
_DEEPEST = 100
"""Levels of parentheses, signs and calls: each takes a few of Python's own."""
_SIZE = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w+|[A-Za-z]", re.ASCII)
_CHARACTERS = re.compile(r"[A-Za-z0-9_+\-*/%^(), ]*")
_COMPARISONS = {ast.Eq: "==", ast.GtE: ">=", ast.LtE: "<=", ast.Gt: ">", ast.Lt: "<"}


class DimensionError(ValueError):
    """A dimension expression or constraint that stagec cannot read or evaluate; `str(error)` says why."""


def canonical_dimension(text: str) -> int | str:
    """Reads one dimension: an int where the expression is constant, else its canonical text, such as `2*batch+1`.

    Two expressions that differ in spacing, in the order of terms or in redundant parentheses have one canonical text.
    Raises DimensionError for anything else, negative constants included.
    """
    if _SIZE.fullmatch(text):  # nearly all are: a bundle of a thousand functions has tens of thousands
        return int(text)
    if _is_name(text):
        return text
    terms = _polynomial(_parse(text))
    if set(terms) <= {()}:
        size = terms.get((), 0)
        if size < 0:
            raise DimensionError(f"negative dimension {size}")
        return size
    return _text(terms)


def names_in(text: str) -> set[str]:
    """The names of the symbolic dimensions in a dimension expression or a constraint."""
    if _is_name(text):
        return {text}
    return {node.id for node in ast.walk(_parse(text)) if isinstance(node, ast.Name) and node.id not in FUNCTIONS}


def evaluate(text: str, sizes: Mapping[str, int]) -> int:
    """The value of a dimension expression with these sizes for its names; it may be negative.

    Raises DimensionError where a name has no size, or for a division by zero.
    """
    return evaluator(text)(sizes)


def compute(text: str, sizes: Mapping[str, Any], functions: Mapping[str, Callable[[Any, Any], Any]]) -> Any:
    """What `evaluate` does where sizes are no ints but what has their operators; functions: in place of FUNCTIONS."""
    return _value(_parse(text), sizes, functions)


def evaluator(text: str) -> Callable[[Mapping[str, int]], int]:
    """What `evaluate` does for an expression, read once for many sizes."""
    node = _parse(text)
    _polynomial(node)
    return functools.partial(_value, node)


def solve(equations: Iterable[tuple[int | str, int]], places: Iterable[str] = ()) -> dict[str, int]:
    """The size of each name, from pairs of a dimension and its size; each follows from a linear equation, as in JAX.

    places: what each of the dimensions is, for messages: `args[0].shape[1]`.
    Raises DimensionError where a name cannot be found, or where a dimension has another size than the others imply.
    """
    pairs = list(equations)
    where = list(places) or ["a dimension"] * len(pairs)
    sizes: dict[str, int] = {}
    texts = {(dim, size): _polynomial(_parse(dim)) for dim, size in pairs if isinstance(dim, str)}
    found = True
    while found:
        found = False
        for (text, size), terms in texts.items():
            unknown = names_in(text) - set(sizes)
            if len(unknown) == 1:
                (name,) = unknown
                solution = _solve_linear(terms, name, size, sizes)
                if solution is not None:
                    sizes[name] = solution
                    found = True
    missing = sorted({name for dim, _ in texts for name in names_in(dim)} - set(sizes))
    if missing:
        rows = zip(where, pairs, strict=True)
        given = ", ".join(f"{place} = {size} ({dim})" for place, (dim, size) in rows if isinstance(dim, str))
        raise DimensionError(f"{', '.join(missing)} cannot be found from {given}")
    for place, (dim, size) in zip(where, pairs, strict=True):
        value = dim if isinstance(dim, int) else evaluate(dim, sizes)
        if value != size:
            names = [] if isinstance(dim, int) else sorted(names_in(dim))
            solved = f" ({dim} with {', '.join(f'{name} = {sizes[name]}' for name in names)})" if names else ""
            raise DimensionError(f"{place} is {size}, {value} is wanted{solved}")
    return sizes


def _solve_linear(terms: _Polynomial, name: str, size: int, sizes: Mapping[str, int]) -> int | None:
    """The size of `name` for which the polynomial is `size`; None where it is not linear in it, or has no such size."""
    slope, constant = 0, 0
    for factors, coefficient in terms.items():
        others = list(factors)
        linear = name in others
        if linear:
            others.remove(name)
        if any(name in names_in(factor) for factor in others):
            return None
        value = coefficient
        for factor in others:
            value *= evaluate(factor, sizes)
        if linear:
            slope += value
        else:
            constant += value
    return (size - constant) // slope if slope and (size - constant) % slope == 0 else None


def canonical_constraint(text: str) -> str:
    """Brings a constraint to a form that JAX accepts: `A == B`, `A >= B` or `A <= B` with both sides canonical.

    `<` and `>` become `<=` and `>=`; the symbolic side of an equality comes first. Raises DimensionError.
    """
    left, sign, right = _sides(_parse(text))
    a, b = _polynomial(left), _polynomial(right)
    if sign == ">":
        sign, b = ">=", _sum(b, {(): 1})
    elif sign == "<":
        sign, a = "<=", _sum(a, {(): 1})
    elif sign == "==" and set(a) <= {()}:
        a, b = b, a
    return f"{_text(a)} {sign} {_text(b)}"


def constraint_holds(text: str, sizes: Mapping[str, int]) -> bool:
    """Whether a constraint is true with these sizes. Raises DimensionError where a name has no size."""
    left, sign, right = _sides(_parse(canonical_constraint(text)))
    compare = {"==": operator.eq, ">=": operator.ge, "<=": operator.le}[sign]
    return bool(compare(_value(left, sizes), _value(right, sizes)))


def _is_name(text: str) -> bool:
    """Whether an expression is a name and nothing more: most symbolic dimensions are, and need no parser."""
    return bool(_NAME.fullmatch(text)) and text not in FUNCTIONS and not keyword.iskeyword(text)


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
        level = [child for one in level for child in ast.iter_child_nodes(one)]
        if not level:
            return
    raise DimensionError(f"dimension expression nested deeper than {_DEEPEST} levels")


def _sides(node: ast.expr) -> tuple[ast.expr, str, ast.expr]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sign = _COMPARISONS.get(type(node.ops[0]))
        if sign is not None:
            return node.left, sign, node.comparators[0]
    raise DimensionError("a constraint compares two dimensions with ==, >= or <=")


def _polynomial(node: ast.expr) -> _Polynomial:
    """The one place that knows which syntax is allowed; `_value` evaluates the same trees."""
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return _sum({(): number})
        case ast.Name(id=name) if name not in FUNCTIONS and name != "_":
            return {(name,): 1}
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _polynomial(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _product({(): -1}, _polynomial(operand))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _sum(_polynomial(left), _polynomial(right))
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _sum(_polynomial(left), _product({(): -1}, _polynomial(right)))
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _product(_polynomial(left), _polynomial(right))
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as power)):
            if power > _HIGHEST_POWER:
                raise DimensionError(f"power {power} is over the limit of {_HIGHEST_POWER}")
            return _product(*[_polynomial(left)] * power)
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            return _call("floordiv", _polynomial(left), _polynomial(right))
        case ast.BinOp(left=left, op=ast.Mod(), right=right):
            return _call("mod", _polynomial(left), _polynomial(right))
        case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]) if name in FUNCTIONS:
            return _call(name, _polynomial(left), _polynomial(right))
    shown = ast.unparse(node).replace("**", "^")
    raise DimensionError(f'bad dimension expression "{shown}"')


def _sum(*polynomials: _Polynomial) -> _Polynomial:
    total: _Polynomial = {}
    for polynomial in polynomials:
        for factors, coefficient in polynomial.items():
            total[factors] = total.get(factors, 0) + coefficient
    if len(total) > _MOST_TERMS or any(abs(coefficient) >= _LARGEST for coefficient in total.values()):
        raise DimensionError(f"a dimension of more than {_MOST_TERMS} terms, or of 64 bits")
    return {factors: coefficient for factors, coefficient in total.items() if coefficient}


def _product(*polynomials: _Polynomial) -> _Polynomial:
    result: _Polynomial = {(): 1}
    for polynomial in polynomials:
        degree = sum(max(map(len, factor), default=0) for factor in (result, polynomial))
        if len(result) * len(polynomial) > _MOST_TERMS or degree > _HIGHEST_DEGREE:
            raise DimensionError(f"a product of more than {_MOST_TERMS} terms, or of a degree over {_HIGHEST_DEGREE}")
        terms: _Polynomial = {}
        for left, a in result.items():
            for right, b in polynomial.items():
                factors = tuple(sorted(left + right))
                terms[factors] = terms.get(factors, 0) + a * b
        result = _sum(terms)
    return result


def _call(name: str, left: _Polynomial, right: _Polynomial) -> _Polynomial:
    if name in ("floordiv", "mod") and not right:
        raise DimensionError("division by zero")
    if set(left) | set(right) <= {()}:
        return _sum({(): FUNCTIONS[name](left.get((), 0), right.get((), 0))})
    return {(f"{name}({_text(left)},{_text(right)})",): 1}


def _text(polynomial: _Polynomial) -> str:
    """Terms by falling degree, then by name; the constant last."""
    text = ""
    for factors, coefficient in sorted(polynomial.items(), key=lambda term: (-len(term[0]), term[0])):
        powers = [_power(factor, factors.count(factor)) for factor in sorted(set(factors))]
        number = [str(abs(coefficient))] if abs(coefficient) != 1 or not powers else []
        text += ("-" if coefficient < 0 else "+" if text else "") + "*".join(number + powers)
    return text or "0"


def _power(factor: str, exponent: int) -> str:
    return factor if exponent == 1 else f"{factor}^{exponent}"


def _value(
    node: ast.expr, sizes: Mapping[str, Any], functions: Mapping[str, Callable[[Any, Any], Any]] = FUNCTIONS
) -> Any:
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.Name(id=name):
            if name not in sizes:
                raise DimensionError(f'dimension "{name}" has no size')
            return sizes[name]
        case ast.UnaryOp(op=operation, operand=operand):
            return (
                -_value(operand, sizes, functions)
                if isinstance(operation, ast.USub)
                else _value(operand, sizes, functions)
            )
        case ast.BinOp(left=left, op=operation, right=right):
            return _apply(_OPERATIONS[type(operation)], _value(left, sizes, functions), _value(right, sizes, functions))
        case ast.Call(func=ast.Name(id=name), args=[left, right]):
            return _apply(functions[name], _value(left, sizes, functions), _value(right, sizes, functions))
    raise DimensionError(f'bad dimension expression "{ast.unparse(node)}"')


_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _apply(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    try:
        return function(left, right)
    except ZeroDivisionError:
        raise DimensionError("division by zero") from None
