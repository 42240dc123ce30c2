"""The functions in which keys are crossed show every pair, and nothing is left out that JAX can do."""

from itertools import combinations
from typing import Any

import jax
import jax.export
import pytest

from tests.conformance.pairs import IMPOSSIBLE, SETTINGS, Pair, cases, crossed
from tests.conformance.programs import GRID, split
from tests.zoo.effects import read


def test_every_two_settings_meet() -> None:
    found = cases()
    missing = [
        (one, a, other, b)
        for one, other in combinations(SETTINGS, 2)
        for a in SETTINGS[one]
        for b in SETTINGS[other]
        if not any(case[one] == a and case[other] == b for case in found)
    ]
    assert {frozenset({(one, a), (other, b)}) for one, a, other, b in missing} == IMPOSSIBLE.keys()
    assert len({tuple(case.values()) for case in found}) == len(found) == len(crossed())


@pytest.mark.parametrize("pair", IMPOSSIBLE, ids=lambda pair: " ".join(dict(sorted(pair)).values()))
def test_what_is_impossible_is_refused_by_jax(pair: Pair) -> None:
    on = split(GRID, "data")
    options: Any = {"out_shardings": on} if ("shardings", "in, out") in pair else {}
    with pytest.raises(ValueError, match="ordered effects are not supported for more than 1 device"):
        jax.export.export(jax.jit(read, in_shardings=on, **options))(jax.ShapeDtypeStruct((4,), "float32"))
