"""How often loops turn, read in the text of programs that carry no note of the compiler, as those for TPUs."""

import pytest

from stagec.costs import totals

LOOP = """
HloModule jit_f

%inside (p: s32[], q: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  %q = s32[] parameter(1)
  ROOT %sum.1 = s32[] add(%p, %q)
}

%body (state: (s32[], f32[4], s32[], s32[])) -> (s32[], f32[4], s32[], s32[]) {
  %state = (s32[]{:T(128)}, f32[4]{0}, s32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %copy.i = s32[]{:T(128)S(6)} copy(%i)
  %x = f32[4]{0} get-tuple-element(%state), index=1
  %most = s32[]{:T(128)} get-tuple-element(%state), index=2
  %step = s32[]{:T(128)} get-tuple-element(%state), index=3
  %one = s32[]{:T(128)} constant(STEP)
  %next = s32[]{:T(128)} NEXT
  %twice = f32[4]{0} add(%x, %x)
  ROOT %out = (s32[]{:T(128)}, f32[4]{0}, s32[]{:T(128)}, s32[]{:T(128)}) tuple(%next, %twice, %most, %step)
}

%condition (state.1: (s32[], f32[4], s32[], s32[])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, f32[4]{0}, s32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %most.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=2
  %end = s32[]{:T(128)} constant(END)
  ROOT %less = pred[]{:T(512)} compare(COMPARED), direction=DIRECTION
}

ENTRY %main (y: f32[4], n: s32[]) -> f32[4] {
  %y = f32[4]{0} parameter(0)
  %n = s32[] parameter(1)
  %start = s32[]{:T(128)} constant(START)
  %copy.start = s32[]{:T(128)} copy(%start)
  %limit = s32[]{:T(128)} constant(7)
  %by = s32[]{:T(128)} constant(2)
  %tuple = (s32[]{:T(128)}, f32[4]{0}, s32[]{:T(128)}, s32[]{:T(128)}) tuple(%FIRST, %y, %LIMIT, %by)
  %while = (s32[]{:T(128)}, f32[4]{0}, s32[]{:T(128)}, s32[]{:T(128)}) while(%tuple), condition=%condition, body=%body
  ROOT %result = f32[4]{0} get-tuple-element(%while), index=1
}
"""
SETTINGS = {
    "START": "0",
    "END": "10",
    "STEP": "1",
    "NEXT": "add(%copy.i, %one)",
    "COMPARED": "%i.1, %end",
    "DIRECTION": "LT",
    "FIRST": "copy.start",
    "LIMIT": "limit",
}


def flops(text: str) -> float | None:
    """The operations of a program on one device."""
    return totals.count(text, 1, lambda exchange: 0.0).flops


def turns(**settings: str) -> float | None:
    """How often the loop turns; its body has four operations, and one for the counter, its condition has one."""
    text = LOOP
    for name, value in {**SETTINGS, **settings}.items():
        text = text.replace(name, value)
    found = flops(text)
    return None if found is None else (found - 1) / (4 + 1 + 1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 10),
        ({"START": "3"}, 7),
        ({"STEP": "3"}, 4),
        ({"DIRECTION": "LE"}, 11),
        ({"START": "12"}, 0),
        ({"START": "20", "STEP": "-1", "END": "1", "DIRECTION": "GE"}, 20),
        ({"START": "20", "END": "2", "NEXT": "subtract(%i, %step)", "DIRECTION": "GT"}, 9),
        ({"DIRECTION": "NE", "STEP": "5"}, 2),
        # The other way around, and with a bound and a step that are elements of the state.
        ({"COMPARED": "%end, %i.1", "DIRECTION": "GT"}, 10),
        ({"COMPARED": "%i.1, %most.1"}, 7),
        ({"COMPARED": "%i.1, %most.1", "NEXT": "add(%step, %i)"}, 4),
        ({"NEXT": "fusion(%i, %one), kind=kLoop, calls=%inside"}, 10),
    ],
)
def test_turns(settings: dict[str, str], expected: int | None) -> None:
    assert turns(**settings) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"FIRST": "n"},
        {"LIMIT": "n", "COMPARED": "%i.1, %most.1"},
        {"STEP": "-1"},
        {"STEP": "0"},
        {"DIRECTION": "NE", "STEP": "3"},
        {"DIRECTION": "EQ"},
        {"NEXT": "multiply(%i, %one)"},
    ],
)
def test_what_is_decided_while_it_runs(settings: dict[str, str]) -> None:
    assert turns(**settings) is None


def test_the_note_of_xla_is_taken() -> None:
    noted = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    for name, value in {**SETTINGS, "FIRST": "n"}.items():
        noted = noted.replace(name, value)
    assert flops(noted) == 5 * (4 + 1 + 1) + 1


def test_a_loop_in_a_loop_knows_what_the_outer_one_does_not_change() -> None:
    outer = """
%turn (given: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {
  %given = (s32[], f32[4]{0}, s32[]) parameter(0)
  %j = s32[] get-tuple-element(%given), index=0
  %z = f32[4]{0} get-tuple-element(%given), index=1
  %bound = s32[] get-tuple-element(%given), index=2
  %none = s32[] constant(0)
  %two = s32[] constant(2)
  %inner = (s32[], f32[4]{0}, s32[], s32[]) tuple(%none, %z, %bound, %two)
  %while.1 = (s32[], f32[4]{0}, s32[], s32[]) while(%inner), condition=%condition, body=%body
  %z.1 = f32[4]{0} get-tuple-element(%while.1), index=1
  %kept = s32[] get-tuple-element(%while.1), index=2
  %one.1 = s32[] constant(1)
  %j.1 = s32[] add(%j, %one.1)
  ROOT %given.1 = (s32[], f32[4]{0}, s32[]) tuple(%j.1, %z.1, %kept)
}

%more (given.2: (s32[], f32[4], s32[])) -> pred[] {
  %given.2 = (s32[], f32[4]{0}, s32[]) parameter(0)
  %j.2 = s32[] get-tuple-element(%given.2), index=0
  %three = s32[] constant(3)
  ROOT %less.1 = pred[] compare(%j.2, %three), direction=LT
}

ENTRY %main (y: f32[4]) -> f32[4] {
  %y = f32[4]{0} parameter(0)
  %zero = s32[] constant(0)
  %limit = s32[] constant(7)
  %tuple = (s32[], f32[4]{0}, s32[]) tuple(%zero, %y, %limit)
  %while = (s32[], f32[4]{0}, s32[]) while(%tuple), condition=%more, body=%turn
  ROOT %result = f32[4]{0} get-tuple-element(%while), index=1
}
"""
    text = LOOP[: LOOP.index("ENTRY")] + outer
    for name, value in {**SETTINGS, "COMPARED": "%i.1, %most.1"}.items():
        text = text.replace(name, value)
    assert flops(text) == 3 * (7 * (4 + 1 + 1) + 1 + 1 + 1) + 1
