"""Baselines: what executables took when somebody accepted it, and what has grown since.

Modules: `cli/baseline.py`, `audit/measurements.py`.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.building import build_model, checked, stagec

MANIFEST = """
[manifest]
name = "m"
version = "1"
[functions.layer]
entry = "model:layer"
args = ["f32[n,4]", "f32[4,6]"]
buckets = { n = [2] }
targets = ["cpu-avx2"]
"""
BEFORE = "import jax.numpy as jnp\ndef layer(x, w):\n    return x @ w\n"
AFTER = "import jax.numpy as jnp\ndef layer(x, w):\n    return jnp.sort(x @ w, axis=0), jnp.sin(w).sum()\n"
SECOND = '[functions.other]\nentry = "model:layer"\nargs = ["f32[2,4]", "f32[4,6]"]\ntargets = ["cpu-avx2"]\n'


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = build_model(tmp_path_factory.mktemp("before"), MANIFEST, BEFORE)
    checked("baseline", bundle, bundle.with_name("m.baseline.json"), "--update")
    return bundle.with_name("m.baseline.json")


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("grown"), MANIFEST + SECOND, AFTER)


def test_a_metric_is_a_line_in_a_stable_order(before: Path) -> None:
    text = before.read_text()
    lines = text.splitlines()
    assert {'   "flops": 96,', '    "dot": 1'} <= set(lines)
    assert [line.strip() for line in lines if line.startswith("   ") and line[3] == '"'] == sorted(
        line.strip() for line in lines if line.startswith("   ") and line[3] == '"'
    )
    found = json.loads(text)["executables"]["layer.cpu-avx2.n2"]
    assert found["arrays"] == {"argument w f32[4,6]": 96, "argument x f32[2,4]": 32, "result result f32[2,6]": 48}
    again = before.with_name("again.json")
    checked("baseline", before.with_name("m.aot"), again, "--update")
    assert again.read_text() == text


def test_what_has_not_grown_passes(before: Path) -> None:
    assert checked("baseline", before.with_name("m.aot"), before) == "m: 1 executable, 0 failed\n"


def test_what_has_grown_fails_and_is_told(before: Path, grown: Path) -> None:
    done = stagec("baseline", grown, before, "--accept", "bazel run //m:m.update_baseline")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "FAILED  layer.cpu-avx2.n2"
    assert lines[1].split() == ["before", "after", "change", "allowed"]
    rows = {line.split()[0]: line for line in lines[2:] if line.endswith("FAILED")}
    assert {"flops", "peak_memory"} <= rows.keys()
    assert re.fullmatch(r"  flops +96 +\d+ +\+\d+\.\d% +\+0%  FAILED", rows["flops"])
    (operations,) = (line for line in lines if "new operations" in line)
    assert {"1 sort", "1 sine"} & set(re.split(r": |, ", operations.strip()))
    (arrays,) = (line for line in lines if "new arrays" in line)
    assert "result result[1] f32[] (4 bytes)" in arrays
    assert lines[-5:] == [
        "  StableHLO: another module",
        "FAILED  other.cpu-avx2",
        "  it is not in the baseline",
        "m: 2 executables, 2 failed",
        "to accept what they take now: bazel run //m:m.update_baseline",
    ]


def test_tolerances_of_a_function(before: Path, grown: Path, tmp_path: Path) -> None:
    checked("baseline", grown, tmp_path / "b.json", "--update")
    document = json.loads((tmp_path / "b.json").read_text())
    document["executables"]["layer.cpu-avx2.n2"] = json.loads(before.read_text())["executables"]["layer.cpu-avx2.n2"]
    (tmp_path / "b.json").write_text(json.dumps(document))
    metrics = ("peak_memory", "flops", "bytes_accessed", "executable_size")
    high = dict.fromkeys(metrics, "100000%")
    assert stagec("baseline", grown, tmp_path / "b.json").returncode == 1
    told = checked("baseline", grown, tmp_path / "b.json", "--tolerances", json.dumps({"layer": high}))
    assert "m: 2 executables, 0 failed" in told
    by_kind = json.dumps({"layer": {**high, "operations": 0}})
    done = stagec("baseline", grown, tmp_path / "b.json", "--tolerances", by_kind)
    assert re.search(r"\n  operations\.sine +0 +1 +\+1 +\+0  FAILED\n", done.stdout)


def test_the_plan_has_the_tolerances(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(MANIFEST + '[functions.layer.baseline]\npeak_memory = "2%"\nflops = 1e3\n')
    plan = json.loads(checked("action", "plan", "m.toml", "--json", cwd=tmp_path))
    assert plan["tolerances"] == {"layer": {"peak_memory": "2%", "flops": 1000}}
    (tmp_path / "m.toml").write_text(MANIFEST + '[functions.layer.baseline]\npeak_memory = "2 %%"\n')
    assert stagec("action", "plan", "m.toml", cwd=tmp_path).stderr == dedent("""\
        m.toml: functions.layer.baseline.peak_memory: "2 %%" is not a share
          write for example "2%", "64KiB" or 10
        """)


def conflict(text: str) -> str:
    return text.replace('   "flops"', '<<<<<<< mine\n   "flops"')


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda text: text.replace('"m"', '"n"'), 'it is the baseline of the manifest "n", and this is "m"'),
        (conflict, "it has the marks of a merge that is not resolved"),
        (lambda text: text[:-9], r"not a baseline: .*"),
        (lambda text: text.replace('"flops": 96', '"flops": "many"'), r"not a baseline: executables\..*flops.*"),
        (
            lambda text: text.replace('"format": 1', '"format": 9'),
            "not a baseline: its format is 9, and this stagec reads 1: .*",
        ),
    ],
)
def test_another_or_a_damaged_baseline(before: Path, tmp_path: Path, edit: Callable[[str], str], what: Any) -> None:
    path = tmp_path / "b.json"
    path.write_text(edit(before.read_text()))
    done = stagec("baseline", before.with_name("m.aot"), path, "--accept", "ACCEPT")
    assert done.returncode == 2
    assert re.fullmatch(rf"{re.escape(str(path))}: {what}\n  write a new one: ACCEPT\n", done.stderr)


def test_no_baseline_and_no_inventory(before: Path, tmp_path: Path) -> None:
    bundle = shutil.copy(before.with_name("m.aot"), tmp_path)
    done = stagec("baseline", bundle, tmp_path / "b.json", "--accept", "ACCEPT")
    path = tmp_path / "b.json"
    assert (done.returncode, done.stderr) == (2, f"{path}: there is no baseline\n  write the first one: ACCEPT\n")
    done = stagec("baseline", bundle, path, "--update")
    assert (done.returncode, path.exists()) == (2, False)
    assert done.stderr.startswith("layer.cpu-avx2.n2: its inventory is not there\n  build it with this stagec")
