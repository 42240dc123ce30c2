"""`tools/on_device` on a fake device: its steps, its table, and what it does where a device fails or hangs."""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stagec.hardware import autotuning
from tests.building import ROOT
from tests.fake_device import fake
from tools.on_device import steps
from tools.on_device.__main__ import _told
from tools.on_device.preparing import prepare

pytestmark = pytest.mark.skipif(bool(fake.missing()), reason=fake.missing())


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return fake.install(tmp_path_factory.mktemp("fake"))


@pytest.fixture(scope="module")
def folder(device: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `prepare` builds, small, and compiled for the fake."""
    out = tmp_path_factory.mktemp("prepared") / "folder"
    compile_ = fake.compiler(device)
    what = [str(fake.HERE / "device.toml")]
    size = prepare(out, what, size=64, golden=["sorting", "shapes"], kernels=[], programs=[], compile_=compile_)
    assert size < 2**20
    assert json.loads((out / "device" / "lost.json").read_text()) == {}
    return out


FILES = {"on_device.md", "on_device.json", "on_device.log"}


def run(
    folder: Path, out: Path, device: dict[str, str], names: Sequence[str], *words: str, **variables: str
) -> tuple[int, list[dict[str, Any]]]:
    """Run steps; return the exit status and the rows."""
    command = [ROOT / "tools" / "on_device", "run", folder, "--output", out, *words, "--steps", *names]
    done = fake.run(*command, environment=device, **variables)
    rows: list[dict[str, Any]] = json.loads((out / "on_device.json").read_text())["rows"]
    table = (out / "on_device.md").read_text().splitlines()
    described = {"device.toml"} if "describe" in names else set()
    assert {path.name for path in out.iterdir()} == FILES | described
    assert len(table) == 2 + len(rows), done.stderr
    return done.returncode, rows


def test_steps_on_a_device_that_works(folder: Path, device: dict[str, str], tmp_path: Path) -> None:
    names = ["describe", "load", "golden", "memory", "jax", "jax_cache", "failures", "pallas", "several"]
    status, rows = run(folder, tmp_path, device, names)
    assert [row for row in rows if row["verdict"] in (steps.FAILED, steps.WRONG)] == []
    assert (status, list(dict.fromkeys(row["step"] for row in rows))) == (0, names)
    assert {row["step"] for row in rows if row["verdict"] == steps.SKIPPED} == {"pallas", "several"}
    loaded = {row["what"] for row in rows if (row["step"], row["measured"]) == ("load", "loaded")}
    assert loaded == {"convolved", "gradient", "layer", "product", "shapes", "sorting", "stream", "update"}
    checked = {row["what"]: row["measured"] for row in rows if row["step"] == "golden"}
    assert checked == {"shapes": "0", "sorting": "0"}


def test_a_device_that_fails_costs_its_steps_alone(folder: Path, device: dict[str, str], tmp_path: Path) -> None:
    status, rows = run(folder, tmp_path, device, ["load", "golden", "pallas"], failure="memory-at-load")
    by_step = {name: [row for row in rows if row["step"] == name] for name in ("load", "golden", "pallas")}
    assert status == 1
    # The client is there, and each executable has a row of its own.
    assert [row["verdict"] for row in by_step["load"]] == [steps.OK] + [steps.FAILED] * 8
    assert {row["measured"].partition(":")[0] for row in by_step["load"][1:] + by_step["golden"]} == {"memory"}
    assert {row["verdict"] for row in by_step["pallas"]} == {steps.SKIPPED}


def test_lines_of_libraries_are_no_rows(tmp_path: Path) -> None:
    assert [_told(line) for line in (b"{NCCL version}", b'{"version": 2}', b"[]", b'{"part": "x"}')] == [
        *[None] * 3,
        {"part": "x"},
    ]


def test_a_folder_that_nobody_prepared(device: dict[str, str], tmp_path: Path) -> None:
    command = [ROOT / "tools" / "on_device", "run", tmp_path, "--output", tmp_path / "out"]
    done = fake.run(*command, environment=device)
    assert (done.returncode, done.stderr) == (2, f"{tmp_path} has no part that `prepare` built\n")


def test_a_device_that_hangs_is_left(folder: Path, device: dict[str, str], tmp_path: Path) -> None:
    """Two parts that hang in a row end their step, and what follows is tried."""
    started = time.monotonic()
    words = ("--minutes", "1.6")
    status, rows = run(folder, tmp_path, device, ["load", "memory"], *words, failure="hang")
    assert time.monotonic() - started < 90
    others = "product, stream, layer, convolved, gradient, update, sorting, shapes"
    names, told = set(others.split(", ")), [(row["step"], row["what"], row["verdict"]) for row in rows]
    assert status == 1
    assert told[0] == ("load", "a client", steps.FAILED)
    assert rows[0]["measured"].startswith("it took longer than 6 s")
    assert [verdict for _, _, verdict in told] == [steps.FAILED, steps.FAILED, steps.SKIPPED] * 2
    assert {told[1][1], *told[2][1].split(", ")} == names
    assert rows[2]["measured"] == "two parts hung"


def test_the_folder_is_that_of_the_device(folder: Path, device: dict[str, str], tmp_path: Path) -> None:
    both = tmp_path / "both"
    shutil.copytree(folder / "device", both / "fake")
    shutil.copytree(folder / "device", both / "another")
    (both / "another" / "on_device.aot").write_bytes(b"")
    described = both / "another" / "source" / "device.toml"
    described.write_text(described.read_text().replace("Fake", "Other"))
    status, rows = run(both, tmp_path / "out", device, ["describe", "memory"])
    assert (status, {row["verdict"] for row in rows}) == (0, {steps.OK})
    assert (tmp_path / "out" / "device.toml").read_text().count("Fake device")


def test_what_cannot_be_built_costs_its_row_alone(device: dict[str, str], tmp_path: Path) -> None:
    """Without the plugin, Mosaic has no lowering for NVIDIA devices."""
    what, compile_ = [str(fake.HERE / "device.toml")], fake.compiler(device)
    out = tmp_path / "folder"
    prepare(out, what, size=64, golden=[], kernels=["mosaic"], programs=["paged_decode"], compile_=compile_)
    status, rows = run(out, tmp_path / "out", device, ["load", "pallas", "programs"])
    lost = {row["what"]: row["measured"] for row in rows if row["step"] == "prepare"}
    assert (status, set(lost)) == (1, {"mosaic", "the rehearsal of paged_decode"})
    assert all(lost.values())
    others = [(row["step"], row["verdict"]) for row in rows if row["step"] not in ("load", "prepare")]
    assert others == [("pallas", steps.SKIPPED), ("programs", steps.SKIPPED)]
    assert {row["verdict"] for row in rows if row["step"] == "load"} == {steps.OK}


def test_shares_are_eight_minutes() -> None:
    assert sum(step.seconds for step in steps.STEPS.values()) == 8 * 60


def test_a_step_that_ends_its_process_says_why(folder: Path, device: dict[str, str], tmp_path: Path) -> None:
    status, rows = run(folder, tmp_path, device, ["memory"], failure="no-driver")
    assert (status, [row["what"] for row in rows]) == (1, [*steps.TIMED])
    assert {row["verdict"] for row in rows} == {steps.FAILED}
    assert all("finds no NVIDIA device it can use" in row["measured"] for row in rows)


def test_code_is_compiled_with_results_of_autotuning(folder: Path, device: dict[str, str], tmp_path: Path) -> None:
    """What XLA timed is a file of the test. In test_fake_driver.py XLA times kernels itself."""
    out, given = tmp_path / "out", str(fake.timed(tmp_path))
    _, rows = run(folder, out, device, ["autotune"], compiler="1", autotuning=given)
    finds, faster = "XLA finds all results, by the text of kernels", "no slower with results"
    assert [(row["what"], row["expected"]) for row in rows] == [
        ("stagec autotune", f"results for {', '.join(steps.TUNED)}"),
        *((name, expected) for name in steps.TUNED for expected in (finds, faster)),
    ]
    assert rows[0]["measured"] == "1: gemm"
    # Chance decides here which of two times is the shorter.
    assert {row["verdict"] for row in rows if row["expected"] != faster} == {steps.OK}
    assert autotuning.read(rows[0]["raw"]["file"]) == autotuning.read(Path(given).read_text())


def test_results_that_are_wrong_or_missing(folder: Path, device: dict[str, str], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("version: 3 results { result { gemm {} } }")
    out = tmp_path / "out"
    status, (row,) = run(folder, out, device, ["autotune"], compiler="1", autotuning=str(wrong))
    assert (status, row["what"], row["verdict"]) == (1, "stagec autotune", steps.FAILED)
    assert "results[0]: device does not say properties and a version of cuDNN" in row["measured"]
    status, (row,) = run(folder, out, device, ["autotune"], compiler="1")
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
