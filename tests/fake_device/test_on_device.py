"""`tools/on_device` on a fake device: its steps, its table, and what it does where a device fails or hangs."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.building import ROOT
from tests.fake_device import fake
from tools.on_device import steps
from tools.on_device.preparing import prepare

pytestmark = pytest.mark.skipif(bool(fake.missing()), reason=fake.missing())


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return fake.install(tmp_path_factory.mktemp("fake"))


@pytest.fixture(scope="module")
def folder(device: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `prepare` builds, small, and compiled for the fake."""
    out = tmp_path_factory.mktemp("prepared") / "folder"
    what = str(fake.HERE / "device.toml")
    size = prepare(out, what, size=64, golden=["sorting"], kernels=[], compile_=fake.compiler(device))
    assert size < 2**20
    return out


def run(
    folder: Path, out: Path, device: dict[str, str], names: Sequence[str], *words: str, **variables: str
) -> tuple[int, list[dict[str, Any]]]:
    """Run steps; return the exit status and the rows."""
    command = [ROOT / "tools" / "on_device", "run", folder, "--output", out, *words, "--steps", *names]
    done = fake.run(*command, environment=device, **variables)
    rows: list[dict[str, Any]] = json.loads((out / "on_device.json").read_text())["rows"]
    table = (out / "on_device.md").read_text().splitlines()
    assert len(table) == 2 + len(rows), done.stderr
    return done.returncode, rows


def test_steps_on_a_device_that_works(folder: Path, device: dict[str, str], tmp_path: Path) -> None:
    names = ["describe", "load", "golden", "memory", "jax", "jax_cache", "failures", "pallas", "several"]
    status, rows = run(folder, tmp_path, device, names)
    assert [row for row in rows if row["verdict"] in (steps.FAILED, steps.WRONG)] == []
    assert (status, list(dict.fromkeys(row["step"] for row in rows))) == (0, names)
    assert {row["step"] for row in rows if row["verdict"] == steps.SKIPPED} == {"pallas", "several"}
    loaded = {row["what"] for row in rows if (row["step"], row["measured"]) == ("load", "loaded")}
    assert loaded == {"layer", "product", "sorting", "stream", "update"}
    (checked,) = (row for row in rows if row["step"] == "golden")
    assert (checked["what"], checked["measured"]) == ("sorting", "0")


def test_a_device_that_fails_costs_its_steps_alone(folder: Path, device: dict[str, str], tmp_path: Path) -> None:
    status, rows = run(folder, tmp_path, device, ["load", "golden", "pallas"], failure="memory-at-load")
    by_step = {name: [row for row in rows if row["step"] == name] for name in ("load", "golden", "pallas")}
    assert status == 1
    # The client is there, and each executable has a row of its own.
    assert [row["verdict"] for row in by_step["load"]] == [steps.OK] + [steps.FAILED] * 5
    assert {row["measured"].partition(":")[0] for row in by_step["load"][1:] + by_step["golden"]} == {"memory"}
    assert {row["verdict"] for row in by_step["pallas"]} == {steps.SKIPPED}


def test_a_device_that_hangs_is_left(folder: Path, device: dict[str, str], tmp_path: Path) -> None:
    started = time.monotonic()
    status, rows = run(folder, tmp_path, device, ["load", "golden"], "--minutes", "0.1", failure="hang")
    assert time.monotonic() - started < 60
    assert (status, [row["verdict"] for row in rows]) == (1, [steps.FAILED, steps.SKIPPED])
    assert rows[0]["measured"].startswith("it took longer than 6 s")
    assert rows[1]["measured"] == "0.1 minutes are over"


def test_a_step_that_ends_its_process_says_why(folder: Path, device: dict[str, str], tmp_path: Path) -> None:
    status, (row,) = run(folder, tmp_path, device, ["memory"], failure="no-driver")
    assert (status, row["what"], row["verdict"]) == (1, "the whole step", steps.FAILED)
    assert "finds no NVIDIA device it can use" in row["measured"]


def test_code_is_compiled_with_results_of_autotuning(folder: Path, device: dict[str, str], tmp_path: Path) -> None:
    """What XLA timed is a file of the test. In test_fake_driver.py XLA times kernels itself."""
    _, rows = run(folder, tmp_path, device, ["autotune"], compiler="1", autotuning=str(fake.timed(tmp_path)))
    finds, faster = "XLA finds all results, by the text of kernels", "no slower with results"
    assert [(row["what"], row["expected"]) for row in rows] == [
        ("stagec autotune", "results for product and layer"),
        *((name, expected) for name in ("product", "layer") for expected in (finds, faster)),
    ]
    assert rows[0]["measured"] == "1: gemm"
    # Chance decides here which of two times is the shorter.
    assert {row["verdict"] for row in rows if row["expected"] != faster} == {steps.OK}
    written = (tmp_path / "device.autotune.textproto").read_text()
    for name in ("product", "layer"):
        spec = json.loads((tmp_path / f"tuned.{name}.spec").read_text())
        assert spec["target"]["autotuning_results"] == written


def test_results_that_are_wrong_or_missing(folder: Path, device: dict[str, str], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("version: 3 results { result { gemm {} } }")
    status, (row,) = run(folder, tmp_path, device, ["autotune"], compiler="1", autotuning=str(wrong))
    assert (status, row["what"], row["verdict"]) == (1, "stagec autotune", steps.FAILED)
    assert "results[0]: device does not say properties and a version of cuDNN" in row["measured"]
    status, (row,) = run(folder, tmp_path, device, ["autotune"], compiler="1")
    assert (status, row["measured"], row["verdict"]) == (1, "XLA timed nothing", steps.WRONG)


def test_times_are_measured_and_say_nothing(folder: Path, device: dict[str, str], tmp_path: Path) -> None:
    """A CPU is slower than the device's roofline, and the rows say by how much."""
    status, rows = run(folder, tmp_path, device, ["roofline", "start"])
    assert [(row["what"], row["verdict"]) for row in rows] == [
        *((name, steps.WRONG) for name in steps.TIMED),
        ("layer", steps.OK),
    ]
    assert status == 1
    assert all(row["measured"].endswith("x") and row["raw"]["ratio"] > 2 for row in rows[:-1])
