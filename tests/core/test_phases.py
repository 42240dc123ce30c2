"""Seconds by phase."""

import itertools
import json
import time
from typing import Any

import pytest

from stagec.core.messages import phases


def recorded() -> tuple[dict[str, Any], list[str]]:
    told = json.loads(phases.report("compile", "m.f.cpu"))
    named = [name for name, _, _ in told["phases"] if name != phases.OTHER]
    return told, [name for name, _ in itertools.groupby(named)]


def test_an_instant_belongs_to_one_phase() -> None:
    @phases.phase("inner")
    def inner() -> None:
        time.sleep(0.01)

    phases.start()
    with phases.phase("outer"):
        time.sleep(0.01)
        inner()
        time.sleep(0.01)
    told, names = recorded()
    assert names == ["outer", "inner", "outer"]
    ends = [start + seconds for _, start, seconds in told["phases"]]
    assert [start for _, start, _ in told["phases"]] == pytest.approx([0, *ends[:-1]], abs=1e-4)
    assert ends[-1] == pytest.approx(told["seconds"], abs=1e-4)
    assert (told["kind"], told["command"], told["artifact"]) == ("profile", "compile", "m.f.cpu")
    assert abs(told["started"] - time.time()) < 60


def test_a_phase_told_afterwards_takes_the_place_of_others() -> None:
    phases.start()
    with phases.phase("export"):
        time.sleep(0.01)
        before = time.monotonic()
        time.sleep(0.006)
        phases.passed("trace", 0.006)  # of an inner function
        time.sleep(0.006)
        phases.passed("trace", time.monotonic() - before)
        time.sleep(0.006)
    told, names = recorded()
    assert names == ["export", "trace", "export"]
    assert sum(seconds for _, _, seconds in told["phases"]) == pytest.approx(told["seconds"], abs=1e-4)


def test_nothing_is_recorded_before_a_start() -> None:
    with phases.phase("import"):
        phases.passed("trace", 1)
    with pytest.raises(RuntimeError, match="call start before"):
        phases.report("compile", "m.f.cpu")
