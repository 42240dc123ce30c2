"""The benchmarks run, on a workspace of few functions; what they measure there says nothing."""

import asyncio
import importlib.metadata
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import pytest

from benchmarks import chart, clients, edits, overhead, serving
from benchmarks.measuring import Options, Row, as_table, interleaved, ratio
from benchmarks.published import __main__ as published, llama
from tests.building import ROOT

ROWS = [
    Row("a build", "a script", 0.75, 1.0, {"build": [3.0, 2.0], "script": [4.0, 4.0]}),
    Row("a call", "", 0.0000123, None, {"call": [0.0000123]}, "s", "1 round"),
    Row("<slow>", "jit", 250.0, 1.0),
]
TABLE = """\
| benchmark | against | measured | target | seconds, median |
| --- | --- | --- | --- | --- |
| a build | a script | 0.750x | <= 1.00x | build 2.50, script 4.00 |
| a call (1 round) | - | 0.000012 s | reported | call 0.000012 |
| <slow> | jit | 250x | <= 1.00x |  |
"""


def test_rounds_are_interleaved_and_compared_one_by_one() -> None:
    calls, times = [], iter([1.0, 2.0, 3.0, 2.0, 9.0, 3.0])

    def measure(name: str) -> float:
        calls.append(name)
        return next(times)

    seconds = interleaved(3, {"a": lambda: measure("a"), "b": lambda: measure("b")})
    assert calls == ["a", "b"] * 3
    assert seconds == {"a": [1.0, 3.0, 9.0], "b": [2.0, 2.0, 3.0]}
    assert ratio(seconds, "a", "b") == 1.5


def test_the_table() -> None:
    assert as_table(ROWS) == TABLE


def test_the_chart_shows_the_results() -> None:
    folder = ROOT / "benchmarks"
    rows = [Row(**row) for row in json.loads((folder / "results.json").read_text("utf-8"))["cold_start"]]
    shown = (folder / "results.svg").read_text("utf-8")
    assert shown == chart.as_svg(rows), "run: ./bazelw run //benchmarks -- cold_start"
    picture = ElementTree.fromstring(shown)
    lengths = [int(bar.attrib["width"]) for bar in picture.iterfind("{http://www.w3.org/2000/svg}rect")]
    seconds = next(row.seconds for row in rows if row.name == "process start to first result, model")
    medians = [median(seconds[way]) for way in ("jit", "exported", "cached", "serialized", "stagec")]
    assert lengths == pytest.approx([280 * median for median in medians], abs=1)
    assert {f"{median:.2f} s" for median in medians} <= set(picture.itertext())


def test_what_a_function_and_a_build_cost_is_a_line() -> None:
    cpu = {
        f"{way} of {count}": [start + each * count]
        for way, start, each in (("build", 4.0, 0.5), ("script", 1.0, 0.25))
        for count in overhead.COUNTS
    }
    seconds = {way: [used[0] / 2] for way, used in cpu.items()} | {"build of 80": [21.0]}
    function, build, *sizes = overhead.rows(seconds, cpu)
    assert (round(function.ratio, 6), round(build.ratio, 6), build.unit) == (2, 4, "s")
    assert [row.target for row in sizes[::2]] == [None, None, 1.4, 1.35]
    assert (sizes[-2].ratio, sizes[-1].ratio) == (2, 44 / 21)


def test_an_edit_runs_the_actions_that_it_must(tmp_path: Path) -> None:
    rows = edits.measure(Options(tmp_path, rounds=1, sizes=(1, 3, 3)))
    nothing = "0 compile actions"
    assert [(row.target, row.note) for row in rows] == [(0.2, ""), (0.1, nothing), (None, nothing)]
    assert all(len(seconds) == 1 and seconds[0] > 0 for row in rows for seconds in row.seconds.values())


def test_clients_ask_a_server(tmp_path: Path) -> None:
    bundle = serving.bundle("mlp", tmp_path)
    with serving.started("stagec", "mlp", bundle, tmp_path) as (port, process):
        request = serving.request_of("mlp", "stagec")
        assert serving.first_answer(port, request) > 0
        told = asyncio.run(clients.load(port, 4, 0.5, request))
        assert serving.cpu_seconds(process)[process] > 0
        assert (told["failed"], told["per_second"] > 4, told["p50"] <= told["p99"]) == (0, True, True)
        told = asyncio.run(clients.load(port, 1, 0.1, request.replace(b"models/mlp", b"models/plm")))
        assert told["failed"] > 0


def test_they_need_no_package_that_only_tests_have() -> None:
    """Bazel runs them in the environment that builds have."""
    lock = (ROOT / "compiler" / "requirements.lock").read_text("utf-8")
    kept = set(re.findall(r"^([\w.-]+)==", lock, re.MULTILINE))
    known = importlib.metadata.packages_distributions()
    other = [name for name, of in known.items() if not kept & {each.lower().replace("_", "-") for each in of}]
    assert {"pytest", "hypothesis"} <= set(other)
    program = (
        "import importlib, json, sys; sys.modules |= dict.fromkeys(json.loads(sys.argv[1]))\n"
        "from benchmarks.__main__ import BENCHMARKS\n"
        "for name in BENCHMARKS: importlib.import_module(f'benchmarks.{name}')\n"
    )
    subprocess.run([sys.executable, "-c", program, json.dumps(other)], check=True)


def test_the_page_has_the_figures_that_were_measured() -> None:
    results = json.loads((ROOT / "benchmarks" / "results.json").read_text("utf-8"))
    seconds = {row["name"]: row["seconds"] for rows in results.values() for row in rows}
    measured = [
        (seconds["process start to first result, model"], "stagec", "serialized"),
        (seconds["tree: call, device arrays"], "call, device arrays", "jit, device arrays"),
        (seconds["edit one of 100 functions"], "build", "script"),
    ]
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    cells = re.findall(r"^\| [^|]+ \| ([\d.]+) (m?s) \| ([\d.]+) (m?s) \|$", page, re.MULTILINE)
    assert len(cells) == len(measured)
    for (ours, our_unit, theirs, their_unit), (of, *sides) in zip(cells, measured, strict=True):
        for shown, unit, side in zip((ours, theirs), (our_unit, their_unit), sides, strict=True):
            assert float(shown) == float(f"{median(of[side]) * {'s': 1, 'ms': 1000}[unit]:.2g}"), side


def test_attention_of_the_published_steps_is_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of queries at a time gives what all at a time give."""
    monkeypatch.setattr(llama, "PIECE", 4)
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(k, (2, 12, heads, 8)) for k, heads in zip(keys, (4, 2, 2), strict=True))
    whole = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    assert jnp.allclose(llama._attend(query, key, value), whole, atol=1e-6)
    sizes = {"vocabulary": 32, "width": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head": 8, "hidden": 32}
    state, loss = jax.eval_shape(llama.train_step, *llama._avals(sizes, 2, 12))
    assert (loss.shape, state) == ((), llama._avals(sizes, 2, 12)[0])


def test_the_table_of_published_times() -> None:
    made = published.table({name: (1.0, 2 * known.seconds) for name, known in published.TIMES.items()})
    assert made.startswith(
        "| step | published | roofline, ratio | timeline, ratio |\n| --- | --- | --- | --- |\n| Llama "
    )
    assert made.count(" s, 2.00 |\n") == len(published.TIMES)
    _, _, rest = published.PAGE.read_text().partition("<!-- published -->\n")
    shown = rest.partition("<!-- end -->\n")[0]
    ratios = [float(ratio) for ratio in re.findall(r" s, ([\d.]+) \|", shown)]
    assert len(ratios) == 2 * len(published.TIMES)
    assert all(0.5 <= ratio <= 2 for ratio in ratios), "an estimate that is off by more has to leave the page"
