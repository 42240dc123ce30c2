"""Sizes: what is written and computed is read, and names are solved.

Modules: `core/sizes/size.py`.
"""

import pytest
from hypothesis import assume, given, settings, strategies as st

from stagec.core.sizes.size import DimensionError, Size, parse, solve


@st.composite
def written(draw: st.DrawFn, depth: int = 4) -> Size:
    """Draw a size that is computed, as functions compute those of their results."""
    if depth == 0:
        return Size.of(draw(st.sampled_from(["a", "b", "c"]) | st.integers(-(2**62), 2**62)))
    left = draw(written(draw(st.integers(0, depth - 1))))
    right = draw(written(draw(st.integers(0, depth - 1))))
    return draw(
        st.sampled_from([lambda: left + right, lambda: left - right, lambda: left * right, lambda: -left])
        | st.integers(0, 64).map(lambda power: lambda: left**power)
        | st.sampled_from(["max", "min", "mod", "floordiv"]).map(lambda name: lambda: left.call(name, right))
    )()


@settings(deadline=None)
@given(st.data())
def test_what_is_written_is_read(data: st.DataObject) -> None:
    try:
        size = data.draw(written())
    except DimensionError:
        assume(False)
    assert parse(str(size)) == size


@pytest.mark.parametrize("text", ["a^18", "a^64", "max(a,2)^9*b^3", "(a+b+c+d)^8", "(a+1)^64", "2*(a+b+c)^20-1"])
def test_high_powers_and_long_sums_are_read(text: str) -> None:
    export = pytest.importorskip("jax.export")
    size = parse(text)
    assert parse(str(size)) == size
    (theirs,) = export.symbolic_shape(str(size))
    assert parse(str(theirs).replace(" ", "")) == size


def test_what_is_too_large_is_refused() -> None:
    for text in ("a^65", "a^33*a^32", "(a+b+c+d)^64", "2^63"):
        with pytest.raises(DimensionError, match=r"over the limit of 64|more than 1000 terms"):
            parse(text)


def test_names_are_solved_in_any_order() -> None:
    equations: list[tuple[int | str, int]] = [("2*a+b", 11), (4, 4), ("b", 3), ("floordiv(a,2)*b", 6), ("-c+a", 1)]
    assert solve(equations) == {"a": 4, "b": 3, "c": 3}
    with pytest.raises(DimensionError, match=r"^x is 5; expected 4 \(2\*a with a = 2\)$"):
        solve([("2*a", 5)], ["x"])
    with pytest.raises(DimensionError, match=r"^a, b cannot be found from x = 6 \(a\*b\), y = 2 \(mod\(a,3\)\)$"):
        solve([("a*b", 6), ("mod(a,3)", 2)], ["x", "y"])
