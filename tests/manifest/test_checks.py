"""Constraints that contradict each other, against all sizes that there are for small numbers."""

import pytest
from hypothesis import given, strategies as st

from stagec.core.sizes.size import parse_constraint
from stagec.manifest.checks import contradiction

SIZES = range(1, 200)
SMALL = st.integers(-9, 9)
SIDES = st.one_of(SMALL.map(str), st.tuples(SMALL, SMALL).map(lambda pair: f"{pair[0]}*n + {pair[1]}"))
CONSTRAINTS = st.tuples(SIDES, st.sampled_from([">=", "<=", "==", ">", "<"]), SIDES).map(" ".join)


@given(st.lists(CONSTRAINTS, min_size=1, max_size=4))
def test_of_one_name(written: list[str]) -> None:
    constraints = list(map(parse_constraint, written))
    ends = [i + 1 for i in range(len(constraints))]
    first = next((n for n in ends if not any(all(c.holds({"n": size}) for c in constraints[:n]) for size in SIZES)), 0)
    found = contradiction(constraints)
    assert (found[0] + 1 if found else 0) == first


@pytest.mark.parametrize("written", [["n >= m", "m >= n + 1"], ["n*n <= 0"], ["mod(n,4) == 5"]])
def test_of_several_names_buckets_say_it(written: list[str]) -> None:
    assert contradiction(list(map(parse_constraint, written))) is None
