"""Every row of the table, on a sample of the programs."""

import jax
import pytest

import stagec
from tests.building import ROOT
from tests.conformance.members import (
    PARAMETERS,
    REFUSED,
    ROWS,
    SAMPLE,
    Parameter,
    Row,
    Staged,
    as_markdown,
    bits,
    info,
)
from tests.conformance.programs import programs

PROGRAMS = programs()


@pytest.fixture(scope="module")
def staged() -> dict[str, Staged]:
    return {name: Staged(PROGRAMS[name]) for name in SAMPLE}


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_member_is_as_in_jax(staged: dict[str, Staged], row: Row, name: str) -> None:
    row.check(staged[name])


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_a_parameter_of_jit_is_as_in_jax(parameter: Parameter) -> None:
    theirs = jax.jit(parameter.function, **parameter.options())
    ours = stagec.jit(parameter.function, **parameter.options())
    lowered = ours.lower(*parameter.args, **parameter.kwargs)
    assert info(lowered.args_info) == info(theirs.lower(*parameter.args, **parameter.kwargs).args_info)
    result = bits(ours(*parameter.args, **parameter.kwargs))
    assert result == bits(theirs(*parameter.args, **parameter.kwargs))


@pytest.mark.parametrize("name", REFUSED)
def test_a_parameter_that_means_nothing_ahead_of_time(name: str) -> None:
    with pytest.raises(TypeError, match=rf"jit\(\) does not take {name}: .{{20,}}"):
        stagec.jit(abs, **{name: None})


def test_the_table_is_up_to_date() -> None:
    assert (ROOT / "docs" / "conformance.md").read_text("utf-8") == as_markdown()
