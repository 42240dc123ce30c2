"""`stagec bench`: starts, calls by threads and buckets, and their spread.

Modules: `cli/bench.py`.
"""

import json
import math
from pathlib import Path

import pytest

from tests.building import checked, stagec

QUICK = ("--starts", "2", "--rounds", "3", "--seconds", "0.02")


def test_starts_and_calls_by_threads_and_buckets(zoo: Path) -> None:
    report = json.loads(checked("bench", zoo, "mlp", *QUICK, "--threads", "1", "2", "--json"))
    assert (report["kind"], report["bundle"]) == ("bench", "zoo")
    assert {"cpu", "cores", "load", "python", "jaxlib"} == report["machine"].keys()
    (found,) = report["functions"]
    assert {key: len(values) for key, values in found["starts"].items()} == {"imported": 2, "loaded": 2, "called": 2}
    assert all(0 < seconds < 60 for values in found["starts"].values() for seconds in values)
    asked = [(one["bucket"]["batch"], one["threads"]) for one in found["calls"]]
    assert sorted(asked) == [(1, 1), (1, 2), (4, 1), (4, 2)]
    for one in found["calls"]:
        shares = one["percentiles"]
        assert 0 < shares["50"] <= shares["90"] <= shares["99"] <= one["longest"]
        assert len(one["per_second"]) == 3
        # As many calls as threads make in their time; a thread that waits for the other makes fewer.
        assert one["calls"] <= one["threads"] * 3 * 0.02 / shares["50"] * 3 + 6
        low, _, high = sorted(one["per_second"])
        assert math.isclose(one["spread"], (high - low) / sorted(one["per_second"])[1])


def test_a_table_for_people(zoo: Path) -> None:
    words = ("--starts", "0", "--rounds", "1", "--seconds", "0.01", "--threads", "1")
    head, name, table, row = checked("bench", zoo, "mlp", "--bucket", "batch=4", *words).splitlines()
    assert head.startswith("zoo 0 on ")
    assert name == "mlp for cpu"
    assert table.split() == ["bucket", "threads", "calls/s", "spread", "p50", "p90", "p99", "longest", "calls"]
    assert row.startswith("  batch = 4        1  ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "there is no function 'nothing'; write one of "),
        (["mlp", "--bucket", "batch=9"], "mlp has no such bucket; its buckets are: batch=1, batch=4"),
        (["mlp", "--target", "tpu"], "no target 'tpu'; the bundle has cpu"),
    ],
)
def test_mistakes(zoo: Path, words: list[str], message: str) -> None:
    done = stagec("bench", zoo, *words, *QUICK)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
