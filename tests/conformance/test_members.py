"""Every row of the table, on every program that it applies to."""

from collections.abc import Callable

import jax
import jax.export
import jax.stages
import pytest

import stagec
from stagec.frontends.common.jit import JAXS_OWN
from stagec.stages.lowering import CALLING_CONVENTIONS
from tests.building import ROOT
from tests.conformance.members import OF_EXPORT, OF_PARAMETERS, OF_STAGES, REFUSED, ROWS, Row, as_markdown
from tests.conformance.programs import Program, parameters, programs
from tests.conformance.staged import Pair, pair

PROGRAMS, PARAMETERS = programs(), parameters()
BY_NAME = {row.name: row for row in ROWS}
MEMBERS = [(row, name) for name in PROGRAMS for row in ROWS if row.applies(name)]


@pytest.fixture(scope="module")
def staged() -> Callable[[str, Program], Pair]:
    """Each program is staged once."""
    found: dict[str, Pair] = {}

    def stage(name: str, program: Program) -> Pair:
        return found.setdefault(name, pair(name, program))

    return stage


@pytest.mark.pinned(but=4, by="name")  # what takes time is to stage the programs
@pytest.mark.parametrize(("row", "name"), MEMBERS, ids=[f"{row.name}-{name}" for row, name in MEMBERS])
def test_a_member_is_as_in_jax(
    staged: Callable[[str, Program], Pair], row: Row, name: str, record_property: Callable[[str, object], None]
) -> None:
    record_property("row", row.name)
    ours, theirs = staged(name, PROGRAMS[name])
    assert row.view(ours) == row.view(theirs)


@pytest.mark.parametrize("stage", ["Wrapped", "Traced", "Lowered", "Compiled", "Exported"])
def test_no_member_of_jaxs_class_is_forgotten(staged: Callable[[str, Program], Pair], stage: str) -> None:
    ours, theirs = (getattr(side, stage.lower()) for side in staged("scalars", PROGRAMS["scalars"]))
    members = {name for name in dir(theirs) if not name.startswith("_")} | ({"__call__"} if callable(theirs) else set())
    compared = {row.name.partition("(")[0] for row in ROWS}
    assert [name for name in members if not hasattr(ours, name)] == []
    jaxs_own = {f"Traced.{name}" for name in JAXS_OWN}
    assert sorted(f"{stage}.{name}" for name in members if f"{stage}.{name}" not in {*compared, *jaxs_own}) == []


def test_no_name_of_jaxs_modules_is_forgotten() -> None:
    assert {name for name in dir(jax.export) if not name.startswith("_")} <= {*OF_EXPORT}
    assert {name for name in dir(jax.stages) if not name.startswith("_")} <= {*OF_STAGES}
    assert (CALLING_CONVENTIONS[0], CALLING_CONVENTIONS[-1]) == (9, 10)  # as the table says
    assert not hasattr(stagec.jit(abs, frontend="jax").trace(1.0), "no_such_member")


@pytest.mark.parametrize("member", OF_PARAMETERS)
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_of_jit_is_as_in_jax(
    staged: Callable[[str, Program], Pair], name: str, member: str, record_property: Callable[[str, object], None]
) -> None:
    record_property("row", f"jit({name})")
    ours, theirs = staged(f"jit({name})", PARAMETERS[name])
    assert BY_NAME[member].view(ours) == BY_NAME[member].view(theirs)


@pytest.mark.parametrize("name", REFUSED)
def test_a_parameter_that_means_nothing_ahead_of_time(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    record_property("row", f"jit({name})")
    with pytest.raises(TypeError, match=rf"jit\(\) does not take {name}: .{{20,}}"):
        stagec.jit(abs, **{name: None})  # type: ignore[arg-type]


def test_the_table_is_up_to_date() -> None:
    assert (ROOT / "docs" / "conformance.md").read_text("utf-8") == as_markdown()
