"""When a device would run instructions: the estimate that `<name>.timeline.json` shows.

Modules: `costs/hlo.py`, `stagec_insight/schedule.py`, `stagec_insight/timelines.py`,
`stagec_insight/commands/timeline.py`.
"""

import json
from textwrap import dedent

import pytest

from stagec.backends.compilation import Hardware
from stagec.bundle.description import Description
from stagec.costs import hlo
from stagec_insight import timelines
from stagec_insight.schedule import COMPUTE, COPIES, LINKS, Event, Rates, schedule

RATES = Rates(flops=1000, bandwidth=1e9)
"""An operation on 1,000 numbers takes a second."""


def run(body: str, more: str = "", seconds: float | None = 3.0) -> tuple[list[Event], float]:
    text = f"HloModule m, is_scheduled=true\n{dedent(more)}\nENTRY %main (a: f32[1000]) -> f32[1000] {{\n{body}\n}}\n"
    return schedule(hlo.parse(text), 2, lambda _: seconds, RATES)


def told(events: list[Event]) -> list[tuple[str, str, float, float]]:
    return [(one.track, one.name, round(one.at, 3), round(one.seconds, 3)) for one in events if one.seconds > 1e-3]


OVERLAPPED = """\
  %a = f32[1000]{0} parameter(0)
  %start = f32[1000]{0} all-reduce-start(%a), replica_groups={{0,1}}, to_apply=%sum
  %b = f32[1000]{0} multiply(%a, %a), metadata={op_name="jit(f)/mul"}
  %done = f32[1000]{0} all-reduce-done(%start)
  ROOT %c = f32[1000]{0} add(%b, %done)"""
SUM = """
    %sum (x: f32[], y: f32[]) -> f32[] {
      %x = f32[] parameter(0)
      %y = f32[] parameter(1)
      ROOT %s = f32[] add(%x, %y)
    }
    """


def test_an_exchange_goes_on_beside_what_is_computed() -> None:
    events, ended = run(OVERLAPPED, SUM)
    assert told(events) == [
        (LINKS, "start", 0, 3),
        (COMPUTE, "b", 0, 1),
        (COMPUTE, "wait for start", 1, 2),
        (COMPUTE, "c", 3, 1),
    ]
    assert round(ended, 3) == 4
    multiplied = next(one for one in events if one.name == "b")
    assert (multiplied.model_name, multiplied.flops, multiplied.bytes) == ("jit(f)/mul", 1000, 12000)


def test_an_exchange_that_is_not_overlapped_stops_the_device() -> None:
    body = OVERLAPPED.replace("all-reduce-start", "all-reduce").replace("all-reduce-done(%start)", "negate(%start)")
    events, _ = run(body, SUM)
    assert [row[:2] for row in told(events)] == [
        (LINKS, "start"),
        (COMPUTE, "start"),  # the sums
        (COMPUTE, "wait for start"),
        (COMPUTE, "b"),
        (COMPUTE, "done"),
        (COMPUTE, "c"),
    ]


def test_an_exchange_of_unknown_length_takes_none() -> None:
    assert round(run(OVERLAPPED, SUM, None)[1], 3) == 2


def test_copies_wait_for_each_other() -> None:
    events, _ = run(
        """\
  %a = f32[1000000000]{0} parameter(0)
  %one = (f32[1000000000]{0}, f32[1000000000]{0}, u32[]) copy-start(%a)
  %two = (f32[1000000000]{0}, f32[1000000000]{0}, u32[]) copy-start(%a)
  %b = f32[1000000000]{0} copy-done(%one)
  ROOT %c = f32[1000000000]{0} copy-done(%two)"""
    )
    # A copy reads four gigabytes and writes them.
    assert sorted(told(events)) == [
        (COMPUTE, "wait for one", 0, 8),
        (COMPUTE, "wait for two", 8, 8),
        (COPIES, "one", 0, 8),
        (COPIES, "two", 8, 8),
    ]


def test_copies_have_what_is_left_of_the_memory() -> None:
    events, ended = run(
        """\
  %a = f32[1000]{0} parameter(0)
  %big = f32[500000000]{0} iota(), iota_dimension=0
  %start = (f32[500000000]{0}, f32[500000000]{0}, u32[]) copy-start(%big)
  %b = f32[1000]{0} multiply(%a, %a)
  %c = f32[1000]{0} add(%b, %b)
  %done = f32[500000000]{0} copy-done(%start)
  ROOT %d = f32[1000]{0} slice(%done), slice={[0:1000]}"""
    )
    # The array is written in two seconds, and copied in four, of which two are beside what is computed.
    assert told(events) == [
        (COMPUTE, "big", 0, 2),
        (COPIES, "start", 2, 4),
        (COMPUTE, "b", 2, 1),
        (COMPUTE, "c", 3, 1),
        (COMPUTE, "wait for start", 4, 2),
    ]
    assert round(ended, 3) == 6


LOOP = """
    %body (p: (s32[], f32[1000])) -> (s32[], f32[1000]) {
      %p = (s32[], f32[1000]{0}) parameter(0)
      %i = s32[] get-tuple-element(%p), index=0
      %v = f32[1000]{0} get-tuple-element(%p), index=1
      %w = f32[1000]{0} multiply(%v, %v)
      ROOT %t = (s32[], f32[1000]{0}) tuple(%i, %w)
    }
    %condition (p: (s32[], f32[1000])) -> pred[] {
      %p = (s32[], f32[1000]{0}) parameter(0)
      ROOT %yes = pred[] constant(true)
    }
    """


@pytest.mark.parametrize(("noted", "length", "more"), [('"5"', 5, [("turns 2 to 5 of loop", 1, 4)]), ("", 1, [])])
def test_a_loop_is_its_first_turn_and_the_rest(noted: str, length: int, more: list[tuple[str, float, float]]) -> None:
    config = f'backend_config={{"known_trip_count":{{"n":{noted}}}}}' if noted else ""
    events, _ = run(
        f"""\
  %a = f32[1000]{{0}} parameter(0)
  %n = s32[] constant(0)
  %t = (s32[], f32[1000]{{0}}) tuple(%n, %a)
  %loop = (s32[], f32[1000]{{0}}) while(%t), condition=%condition, body=%body, {config}
  ROOT %c = f32[1000]{{0}} get-tuple-element(%loop), index=1""",
        LOOP,
    )
    assert [row[1:] for row in told(events)] == [("loop", 0, length), ("w", 0, 1), *more]
    assert events[0].turns == (length if noted else None)


def test_the_trace_says_that_it_is_an_estimate() -> None:
    description = Description._make([None] * len(Description._fields))._replace(nr_devices=1, device_assignment=None)
    text = f"HloModule m\nENTRY %main (a: f32[1000]) -> f32[1000] {{\n{OVERLAPPED}\n}}\n"
    trace = json.loads(timelines.of("f for t", text, description, Hardware("H", flops=1e6, bandwidth=1e9)))
    process, *tracks = (event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M")
    assert process.startswith("ESTIMATE of f for t on one H, by peak rates: 2.0")
    assert tracks == ["compute (estimate)", "links (estimate)", "copies (estimate)"]
    slices = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
    assert slices["b"]["args"] == {"operation": "jit(f)/mul", "flops": 1000, "bytes": 12000}
    assert slices["c"]["ts"] >= slices["b"]["ts"] + slices["b"]["dur"]
    nothing = json.loads(timelines.of("f for t", text, description, Hardware("haswell")))
    assert [event["args"]["name"] for event in nothing["traceEvents"]] == [
        "NO ESTIMATE of f for t: the peak rates of haswell are not known"
    ]
