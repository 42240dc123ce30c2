"""What is decided of sizes, beside JAX's `shape_poly`, and at many numbers.

Modules: `stagec_arrays/bounds.py`.
"""

import contextlib
import itertools
import math
import operator
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from stagec.core.sizes.size import Constraint, DimensionError, Size, parse, parse_constraint
from stagec_arrays import dims
from stagec_arrays.bounds import bounds, contradiction, divided

NAMES = ("a", "b", "c")
CONSTRAINTS: Sequence[Sequence[str]] = (
    (),
    (),
    (),
    ("a >= 4",),
    ("a >= b",),
    ("mod(a,8) == 0",),
    ("a <= 10", "b >= 3"),
    ("a == 2*b",),
    ("a+b >= 7",),
    ("floordiv(a,2) >= 3",),
    ("max(a,b) <= 9",),
    ("a*b >= 12",),
    ("2*a == 3*b",),
)
GRID = [dict(zip(NAMES, sizes, strict=True)) for sizes in itertools.product([1, 2, 3, 5, 6, 8, 9, 16], repeat=3)]


def drawn(random: random.Random, depth: int) -> str:
    """Return an expression."""
    if depth == 0 or random.random() < 0.15:
        return random.choice(NAMES) if random.random() < 0.65 else str(random.randint(0, 9))
    if random.random() < 0.6:
        return f"({drawn(random, depth - 1)} {random.choice('+--*')} {drawn(random, depth - 1)})"
    name = random.choice(["max", "min", "mod", "mod", "floordiv"])
    second = drawn(random, depth - 1) if random.random() < 0.5 else random.choice(["2", "3", "5", "7", "-2"])
    return f"{name}({drawn(random, depth - 1)}, {second})"


def values(size: Size, constraints: Sequence[Constraint]) -> list[int]:
    """Return its values at all numbers of the grid for which the constraints hold."""
    known = []
    for sizes in GRID:
        if all(constraint.holds(sizes) for constraint in constraints):
            try:
                known.append(int(size.compute(sizes)))
            except DimensionError:
                continue  # a division by zero
    return known


def decision(low: float, high: float) -> bool | None:
    """Return whether a size is >= 0; None where bounds leave it open."""
    return True if low >= 0 else False if high < 0 else None


@pytest.mark.parametrize("seed", range(2))
def test_bounds_hold_at_all_sizes(seed: int) -> None:
    source = random.Random(seed)
    decided = 0
    for _ in range(400):
        text, texts = drawn(source, 3), source.choice(CONSTRAINTS)
        constraints = tuple(map(parse_constraint, texts))
        try:
            size = parse(text)
        except DimensionError:
            continue
        low, high = bounds(size, constraints)
        known = values(size, constraints)
        assert not known or low <= min(known) <= max(known) <= high, (text, texts, low, high)
        decided += low > -math.inf or high < math.inf
    assert decided > 200


@pytest.mark.filterwarnings("ignore:divide by zero")  # JAX evaluates with NumPy's numbers
@pytest.mark.parametrize("seed", range(2))
def test_decisions_are_those_of_jax(seed: int) -> None:
    """Never another one, and values are the same. Of some 40 sizes that JAX leaves open or bounds, one more is decided.

    JAX decides more of single products with a call in which a division by zero is possible: of 5,000, one.
    """
    export = pytest.importorskip("jax.export")
    from jax._src.export import shape_poly
    from jax.errors import InconclusiveDimensionOperation

    source, counts = random.Random(seed), Counter[str]()
    for _ in range(600):
        text, texts = drawn(source, 3), source.choice(CONSTRAINTS)
        constraints = tuple(map(parse_constraint, texts))
        sizes = dict(zip(NAMES, source.choices(range(1, 40), k=3), strict=True))
        try:
            size = parse(text)
            (theirs,) = export.symbolic_shape(str(size), scope=export.SymbolicScope(texts))
            precision = shape_poly.BoundsPrecision.BEST
            low, high = (theirs,) * 2 if isinstance(theirs, int) else shape_poly._bounds_decision(theirs, precision)
        except (ValueError, AssertionError, InconclusiveDimensionOperation):
            continue  # a division by zero, or by what may be 0: JAX decides nothing
        counts["drawn"] += 1
        ours, jaxs = decision(*bounds(size, constraints)), decision(low, high)
        assert None in (ours, jaxs) or ours == jaxs, (text, texts)
        counts["more"] += ours is not None and jaxs is None
        counts["less"] += ours is None and jaxs is not None
        if not isinstance(theirs, int) and all(constraint.holds(sizes) for constraint in constraints):
            with contextlib.suppress(ZeroDivisionError, DimensionError):
                assert int(theirs._evaluate(sizes)) == size.compute(sizes)
    assert counts["drawn"] > 400
    assert counts["less"] <= 2 < counts["more"], counts


@pytest.mark.parametrize("seed", range(2))
def test_equal_sizes_are_those_of_jax(seed: int) -> None:
    """What JAX knows to be equal is equal, and what is equal is so at all numbers."""
    export = pytest.importorskip("jax.export")
    from jax.errors import InconclusiveDimensionOperation

    source, equal = random.Random(seed), 0
    for _ in range(600):
        first, texts = drawn(source, 2), source.choice(CONSTRAINTS)
        # Often the same in another spelling.
        others = f"({first})*2-({first})", f"floordiv(6*({first}), 6)", f"2*b+({first})-a", drawn(source, 1)
        second = source.choice(others)
        constraints = tuple(map(parse_constraint, texts))
        scope = export.SymbolicScope(texts)
        try:
            theirs = [export.symbolic_shape(str(parse(text)), scope=scope)[0] for text in (first, second)]
            sizes = dict(zip(NAMES, named(constraints), strict=True))
            own = [of_python(text, sizes) for text in (first, second)]
        except (ValueError, InconclusiveDimensionOperation):
            continue
        if theirs[0] == theirs[1]:
            assert own[0] == own[1], (first, second, texts)
        if own[0] == own[1]:
            equal += 1
            assert hash(own[0]) == hash(own[1])
            assert set(values(parse(first) - parse(second), constraints)) <= {0}, (first, second, texts)
    assert equal > 100


def named(constraints: Sequence[Constraint]) -> list[Any]:
    """Return the names as sizes of arrays."""
    return [dims.parse(name, constraints) for name in NAMES]


def of_python(text: str, sizes: dict[str, Any]) -> Any:
    """Return an expression computed with Python's operators, as a function of arrays does."""
    functions = {
        "floordiv": operator.floordiv,
        "mod": operator.mod,
        "max": dims.larger,
        "min": dims.smaller,
    }
    return parse(text).compute(sizes, functions)


@pytest.mark.parametrize(
    ("text", "constraints", "low", "high"),
    [
        ("mod(a,7)-mod(b,5)", (), -4, 6),
        ("mod(a,-7)", (), -6, 0),
        ("b-floordiv(b,2)", (), 1, math.inf),
        ("floordiv(a,-2)", (), -math.inf, -1),
        ("a*b-a", (), 0, math.inf),
        ("a^2", (), 1, math.inf),
        ("max(a,b)+min(a,b)-a-b", (), 0, 0),
        ("mod(a,7)+7*floordiv(a,7)-a", (), 0, 0),
        ("min(b,5)-min(b,2)", (), 0, 3),
        ("a-b", ("a >= b",), 0, math.inf),
        ("a-c", ("a >= b", "b >= c+2"), 2, math.inf),
        ("a", ("max(a,b) <= 9",), 1, 9),
        ("2*a", ("2*a >= 3",), 4, math.inf),
        ("2*a-2*b+1", ("2*a >= 2*b-1",), 1, math.inf),
        ("floordiv(a,b-3)", (), -math.inf, math.inf),
        ("mod(a,b-3)", ("b >= 4",), 0, math.inf),
        ("a", ("a >= 5", "b >= 9", "b <= 3"), 5, math.inf),
        ("b", ("5*b+15 == c", "floordiv(b,b) >= 3"), -math.inf, math.inf),
    ],
)
def test_bounds(text: str, constraints: Sequence[str], low: float, high: float) -> None:
    assert bounds(parse(text), tuple(map(parse_constraint, constraints))) == (low, high)


@pytest.mark.parametrize(
    ("constraints", "first"),
    [
        (("b >= 8", "b <= 4"), 1),
        (("b >= 8", "a >= b", "c >= 1", "a <= 4"), 3),
        (("mod(b,8) == 0", "b <= 4"), 1),
        (("a == 2*b", "a == 3*b"), 1),
        (("floordiv(b,2) >= 3", "b <= 4"), 1),
        (("max(a,b) <= 3", "a >= 4"), 1),
        (("a+b <= 1",), 0),
        (("b == 5", "b == 6"), 1),
        (("5 >= 6",), 0),
        (("b >= 8", "b <= 8"), None),
        (("mod(b,8) == 0", "b <= 8"), None),
        (("max(a,b) <= 3", "a >= 3"), None),
        ((), None),
    ],
)
def test_constraints_that_no_sizes_fulfil(constraints: Sequence[str], first: int | None) -> None:
    found = contradiction(tuple(map(parse_constraint, constraints)))
    assert (found and found[0]) == first
    with contextlib.nullcontext() if first is None else pytest.raises(ValueError, match=r"^no sizes fulfil "):
        dims.symbolic_shape("a,b,c", constraints=constraints)


@pytest.mark.parametrize("seed", range(2))
def test_constraints_that_some_sizes_fulfil_do_not_contradict_each_other(seed: int) -> None:
    source, refused = random.Random(seed), 0
    for _ in range(150):
        signs = source.choices(["==", ">=", "<="], k=2)
        try:
            constraints = [parse_constraint(f"{drawn(source, 2)} {s} {drawn(source, 1)}") for s in signs]
            fulfilled = any(all(one.holds(sizes) for one in constraints) for sizes in GRID)
        except DimensionError:
            continue
        if contradiction(constraints):
            refused += 1
            assert not fulfilled, constraints
    assert refused > 10


def test_what_is_not_decided_is_refused() -> None:
    a, b, _ = named(())
    for undecided in (
        lambda: a % 7 - b % 5 >= 0,
        lambda: a >= b,
        lambda: a > 1,
        lambda: a < 2,
        lambda: a <= b,
        lambda: bool(a - 1),
        lambda: bool(a % 2),
    ):
        with pytest.raises(dims.InconclusiveDimension, match=r"^whether .* depends on the sizes .*; add a constraint"):
            undecided()
    assert a > 0
    assert not a < 1
    assert a * b >= b
    assert a + 1
    with pytest.raises(dims.InconclusiveDimension, match=r"^whether a < b\+1 depends on"):
        assert a < b + 1


@pytest.mark.parametrize(
    ("text", "by", "quotient", "rest"),
    [
        ("4*a+5", "2", "2*a+2", "1"),
        ("a*b+b", "b", "a+1", "0"),
        ("a^2-b^2", "a-b", "a+b", "0"),
        ("a^2-b^2+1", "a-b", None, None),
        ("3*a", "2", None, None),
        ("-6*a-1", "3", "-2*a-1", "2"),
        ("max(a,b)*c", "max(a,b)", "c", "0"),
        ("0", "a", "0", "0"),
    ],
)
def test_divisions_without_a_call(text: str, by: str, quotient: str | None, rest: str | None) -> None:
    parts = divided(parse(text), parse(by))
    assert (parts and tuple(map(str, parts))) == (None if quotient is None else (quotient, rest))
