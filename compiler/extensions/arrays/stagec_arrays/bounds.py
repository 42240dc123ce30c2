"""What is decided of a size: bounds of its value, and divisions. It holds for all sizes of its names from 1 on.

Facts are sizes that are 0 or more: of names, of constraints, and of each function and product in them. A size is at
least `c` if it is `c` and a sum of facts, each some times; the largest such `c` is a linear program. So a bound has a
proof, and what has none stays open: -inf or inf. stagec refuses a size that it cannot prove, as `jax.export` does;
compiler/extensions/arrays/tests/test_bounds.py compares the two.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from stagec.core.sizes.size import Call, Constraint, DimensionError, Factor, Monomial, Size

Interval: TypeAlias = tuple[float, float]
"""The least and the largest value: ints, or -inf and inf."""

_MOST_FACTS = 60
"""Facts of one decision. Those that are left out leave bounds wider, and never wrong."""
_MOST_CASES = 3
"""The most calls of max and min in one decision that examines both cases."""
_MOST_STEPS = 1000
"""Terms of a quotient: far more than a model's shapes have."""


@functools.lru_cache(16384)
def bounds(size: Size, constraints: tuple[Constraint, ...] = ()) -> Interval:
    """Return bounds of a size under these constraints."""
    size = without_equal_names(size, constraints)
    wide = _of_names(size, constraints)
    return _bounds(size, constraints, _of_operands(constraints)) if wide is None else wide


def contradiction(constraints: Sequence[Constraint]) -> tuple[int, str] | None:
    """Return the first constraint that provably contradicts those before it, and a sentence; None if there is none."""
    constraints = tuple(constraints[:_MOST_FACTS])
    if not _contradict(constraints):
        return None
    first = next(i for i in range(len(constraints)) if _contradict(constraints[: i + 1]))
    return first, f'no sizes fulfil "{constraints[first]}"' + (" and the constraints before it" if first else "")


def _contradict(constraints: tuple[Constraint, ...]) -> bool:
    facts, calls = _gathered(Size(()), constraints, _of_operands(constraints))
    return all(_lowest(Size(()), [*facts, *case]) == math.inf for case in _cases(calls))


def without_equal_names(size: Size, constraints: Sequence[Constraint]) -> Size:
    """Replace a name in a size by the equal expression from a constraint; names in calls stay."""
    for left, sign, right in constraints:
        match left.terms:
            case (((str(name),), 1),) if sign == "==" and name not in right.names:
                while any(name in factors for factors, _ in size.terms):
                    size = replaced(size, (name,), 1, right)
    return size


def replaced(size: Size, factors: Monomial, coefficient: int, by: Size) -> Size:
    """Return the size with `by` in place of each whole multiple of a term."""
    result = size
    for own, times in size.terms:
        rest = _without(own, factors)
        if rest is not None and times % coefficient == 0:
            result = result - Size(((own, times),)) + by * Size(((rest, times // coefficient),))
    return result


def divided(size: Size, by: Size) -> tuple[Size, Size] | None:
    """Return quotient and rest if both are sizes without a new call; None otherwise.

    The rest is 0, or a number where `by` is one. Raises DimensionError for a division by zero.
    """
    if not by.terms:
        raise DimensionError("division by zero")
    (leading, divisor), number = by.terms[0], by.constant
    quotient, rest = Size(()), size
    while rest.constant is None:
        factors, coefficient = rest.terms[0]
        partial = _without(factors, leading)
        if partial is None or coefficient % divisor or len(quotient.terms) == _MOST_STEPS:
            return None
        step = Size(((partial, coefficient // divisor),))
        quotient, rest = quotient + step, rest - step * by
    last = rest.constant
    if number is not None:
        return quotient + last // number, Size.of(last % number)
    return None if last else (quotient, rest)


def _without(factors: Monomial, divisor: Monomial) -> Monomial | None:
    """Return a product divided by another; None if that is not a product."""
    rest = list(factors)
    for factor in divisor:
        if factor not in rest:
            return None
        rest.remove(factor)
    return tuple(rest)


def _bounds(size: Size, constraints: tuple[Constraint, ...], inner: tuple[Constraint, ...]) -> Interval:
    facts, calls = _gathered(size, constraints, inner)
    cases = [[*facts, *case] for case in _cases(calls)]
    low, high = min(_lowest(size, case) for case in cases), max(-_lowest(-size, case) for case in cases)
    if low > high or math.inf in (low, -high):  # no sizes fulfil the constraints
        return -math.inf, math.inf
    return low, high


@functools.lru_cache(1024)
def _of_operands(constraints: tuple[Constraint, ...]) -> tuple[Constraint, ...]:
    """Return the constraints for the bounds of operands: only sums of names, so that the search ends."""
    linear = [constraint for constraint in constraints if _is_linear(constraint.left - constraint.right)]
    if len(linear) == len(constraints):
        return constraints
    for name in dict.fromkeys(name for constraint in constraints for name in sorted(constraint.names)):
        low, high = _bounds(Size.of(name), constraints, tuple(linear))
        linear += [Constraint(Size.of(name), ">=", Size.of(int(low)))] if low > 1 else []
        linear += [Constraint(Size.of(name), "<=", Size.of(int(high)))] if high < math.inf else []
    return tuple(linear)


def _of_names(size: Size, constraints: Sequence[Constraint]) -> Interval | None:
    """Return bounds of a sum of names if constraints have one name each; None for others."""
    names: dict[str, Interval] = {}
    for constraint in constraints:
        match constraint:
            case Constraint(Size(terms=(((str(name),), 1),)), sign, right) if right.constant is not None:
                low, high = names.get(name, (1, math.inf))
                number = right.constant
                low = max(low, number) if sign != "<=" else low
                names[name] = low, min(high, number) if sign != ">=" else high
            case _:
                return None
    least: float = 0
    most: float = 0
    for factors, coefficient in size.terms:
        match factors:
            case ():
                low, high = 1, 1
            case (str(name),):
                low, high = names.get(name, (1, math.inf))
            case _:
                return None
        ends = coefficient * low, coefficient * high
        least, most = least + min(ends), most + max(ends)
    return least, most


def _is_linear(size: Size) -> bool:
    return all(len(factors) < 2 and all(isinstance(factor, str) for factor in factors) for factors, _ in size.terms)


def _gathered(
    size: Size, constraints: Iterable[Constraint], inner: tuple[Constraint, ...]
) -> tuple[list[Size], list[Call]]:
    """Return the facts about all parts of a size and of constraints, and the calls of max and min among these."""
    facts: list[Size] = []
    for constraint in constraints:
        difference = constraint.left - constraint.right
        facts += [_whole(difference)] if constraint.sign != "<=" else []
        facts += [_whole(-difference)] if constraint.sign != ">=" else []
    products = dict.fromkeys(factors for expression in (size, *facts) for factors, _ in expression.terms if factors)
    calls: list[Call] = []
    for factors in (queue := list(products)):
        if len(facts) >= _MOST_FACTS:
            break
        if len(factors) == 1 and isinstance(factors[0], Call) and factors[0].name in ("max", "min"):
            calls.append(factors[0])
        for fact in _facts(factors, inner):
            facts.append(fact)
            for other, _ in fact.terms:
                if other and other not in products:
                    products[other] = None
                    queue.append(other)
    return facts, calls


def _whole(fact: Size) -> Size:
    """Return a fact divided by the common divisor of its coefficients; its number is rounded down, like sizes."""
    divisor = _divisor(fact)
    return Size(
        tuple((factors, coefficient // divisor) for factors, coefficient in fact.terms if coefficient // divisor)
    )


def _divisor(size: Size) -> int:
    return math.gcd(*(coefficient for factors, coefficient in size.terms if factors)) or 1


@functools.lru_cache(16384)
def _facts(factors: Monomial, constraints: tuple[Constraint, ...]) -> tuple[Size, ...]:
    """Return the facts about one product."""
    try:
        if len(factors) > 1:
            return tuple(_of_product(factors, constraints))
        (factor,) = factors
        return (Size.of(factor) - 1,) if isinstance(factor, str) else tuple(_of_call(factor, constraints))
    except DimensionError:  # too large
        return ()


def _of_product(factors: Monomial, constraints: tuple[Constraint, ...]) -> Iterator[Size]:
    """Each of two factors is off its bounds by 0 or more, and so is the product of both."""
    yield from _margins(factors, constraints)
    first, rest = factors[:1], factors[1:]
    for margin, other in itertools.product(_margins(first, constraints), _margins(rest, constraints)):
        yield margin * other
    if factors == first * len(factors) and len(factors) % 2 == 0:
        yield Size(((factors, 1),))


def _margins(factors: Monomial, constraints: tuple[Constraint, ...]) -> Iterator[Size]:
    size = Size(((factors, 1),))
    low, high = functools.reduce(_times, (_ends(factor, constraints) for factor in factors))
    if low > -math.inf:
        yield size - int(low)
    if high < math.inf:
        yield -size + int(high)


def _times(left: Interval, right: Interval) -> Interval:
    ends = [a * b if a and b else 0 for a in left for b in right]
    return min(ends), max(ends)


@functools.lru_cache(16384)
def _ends(factor: Factor, constraints: tuple[Constraint, ...]) -> Interval:
    """Return bounds of a name or a call by those of its operands."""
    if isinstance(factor, str):
        return bounds(Size.of(factor), constraints)
    left, right = bounds(factor.left, constraints), bounds(factor.right, constraints)
    if factor.name in ("max", "min"):
        choose = max if factor.name == "max" else min
        return choose(left[0], right[0]), choose(left[1], right[1])
    if right[0] <= 0 <= right[1]:  # it may be a division by zero
        return -math.inf, math.inf
    negative = right[1] < 0
    if negative:
        left, right = (-left[1], -left[0]), (-right[1], -right[0])
    if factor.name == "floordiv":
        return _quotient(left[0], right[left[0] >= 0]), _quotient(left[1], right[left[1] < 0])
    most = min(right[1] - 1, left[1] if left[0] >= 0 else math.inf)
    return (-most, 0) if negative else (0, most)


def _quotient(number: float, divisor: float) -> float:
    if abs(number) == math.inf:
        return number
    if divisor == math.inf:
        return 0 if number >= 0 else -1
    return int(number) // int(divisor)


def _of_call(call: Call, constraints: tuple[Constraint, ...]) -> Iterator[Size]:
    yield from _margins((call,), constraints)
    own, left, right = Size.of(call), call.left, call.right
    if call.name in ("max", "min"):
        sign = 1 if call.name == "max" else -1
        yield (own - left) * sign
        yield (own - right) * sign
        return
    low, high = bounds(right, constraints)
    if low <= 0 <= high:  # it may be a division by zero
        return
    # For a negative divisor, negate both operands: the quotient stays the same, and the rest changes its sign.
    sign = 1 if low > 0 else -1
    left, right = left * sign, right * sign
    quotient, rest = Size.of(call._replace(name="floordiv")), Size.of(call._replace(name="mod")) * sign
    yield from _same(left, right * quotient + rest)
    yield rest
    yield right - rest - 1
    exact = divided(left, right)
    if exact is not None:
        yield from _same(quotient, exact[0])
    if bounds(left, constraints)[0] >= 0:
        yield left - rest
        yield left - quotient


def _same(left: Size, right: Size) -> tuple[Size, Size]:
    return left - right, right - left


def _cases(calls: Sequence[Call]) -> Iterator[list[Size]]:
    """Yield the facts for each choice of the operand that is the extremum; those of other calls stay open."""
    for chosen in itertools.product((0, 1), repeat=min(len(calls), _MOST_CASES)):
        facts: list[Size] = []
        for call, which in zip(calls, chosen, strict=False):
            value, other = (call.left, call.right) if which == 0 else (call.right, call.left)
            facts += _same(Size.of(call), value)
            facts.append(value - other if call.name == "max" else other - value)
        yield facts


def _lowest(size: Size, facts: Sequence[Size]) -> float:
    """Return the largest number that is the size without a sum of facts, each 0 or more times.

    -inf if there is none, inf where the facts contradict each other. Rounded up to what a sum of integers can be.
    """
    columns = [dict(fact.terms) for fact in facts]
    wanted = dict(size.terms)
    products = dict.fromkeys(factors for row in (wanted, *columns) for factors in row if factors)
    table = [[*(column.get(factors, 0) for column in columns), wanted.get(factors, 0)] for factors in products]
    cost = [*(column.get((), 0) for column in columns), 0]
    cost_of_proof = _least_cost(table, cost)
    if cost_of_proof is None:
        return -math.inf
    top, bottom = cost_of_proof
    divisor = _divisor(size)
    return wanted.get((), 0) - top // (bottom * divisor) * divisor if bottom else math.inf


def _least_cost(rows: list[list[int]], cost: Sequence[int]) -> tuple[int, int] | None:
    """Return the least cost of numbers >= 0 that solve equations, as a fraction; None if there are none, (0, 0): -inf.

    rows: of each equation the coefficients and the sum. The simplex method in two phases, by Bland's rule. All entries
    are integers over one denominator, so divisions have no rest.
    """
    width = len(cost) - 1
    table = [row if row[-1] >= 0 else [-entry for entry in row] for row in rows]
    basis = [-1] * len(table)  # of a row without one the sum is a number that shall become 0
    table.append([-sum(column) for column in zip(*table, strict=True)] if table else [0] * (width + 1))
    table.append(list(cost))
    scale = 1

    def pivot(row: int, column: int) -> None:
        nonlocal scale
        if table[row][column] < 0:
            table[row] = [-entry for entry in table[row]]
        own, factor = table[row], table[row][column]
        for i, other in enumerate(table):
            if i != row:
                times = other[column]
                table[i] = [(a * factor - b * times) // scale for a, b in zip(other, own, strict=True)]
        basis[row], scale = column, factor

    def solved(goal: int) -> bool:
        """Make the entries of a row of costs 0 or more; False if the cost has no end."""
        while (column := next((i for i in range(width) if table[goal][i] < 0), None)) is not None:
            best = None
            for row in range(len(basis)):
                entry = table[row]
                if entry[column] > 0:
                    if best is None:
                        best = row
                        continue
                    apart = entry[-1] * table[best][column] - table[best][-1] * entry[column]
                    if apart < 0 or (apart == 0 and basis[row] < basis[best]):
                        best = row
            if best is None:
                return False
            pivot(best, column)
        return True

    solved(len(basis))
    if table[len(basis)][-1] != 0:
        return None
    for row in range(len(basis)):  # what is left of numbers that are 0
        if basis[row] == -1:
            column = next((i for i in range(width) if table[row][i]), None)
            if column is not None:
                pivot(row, column)
    if not solved(len(basis) + 1):
        return 0, 0
    return -table[-1][-1], scale
