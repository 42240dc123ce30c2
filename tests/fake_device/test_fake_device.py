"""The loader and its clients on an accelerator that is a fake: what runs there, and each way in which that fails.

Modules: `pjrt/accelerators.py`, `pjrt/failures.py`, `backends/gpu/local_gpus.py`, `cli/describe_device.py`.
"""

import hashlib
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stagec.bundle.archive import Archive
from stagec.hardware import autotuning
from stagec.loader import selection
from tests.bundles import edited, edited_descriptions
from tests.fake_device import fake

pytestmark = pytest.mark.skipif(bool(fake.missing()), reason=fake.missing())

MLP = [[0.25] * 4]
SUMS = [[6.0, 8.0, 10.0], [12.0, 14.0, 16.0]]
MORE = [[float(3 * row + column + 1) for column in range(3)] for row in range(4)]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine with a fake device."""
    return fake.install(tmp_path_factory.mktemp("fake"))


@pytest.fixture(scope="module")
def bundle(device: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake.build(tmp_path_factory.mktemp("bundle"), device)


def called(*words: str | Path, environment: Mapping[str, str], **variables: str) -> list[Any]:
    """What `calls.py` prints."""
    done = fake.run("-m", "tests.fake_device.calls", *words, environment=environment, **variables)
    assert done.returncode == 0, done.stderr
    rows: list[Any] = json.loads(done.stdout)
    return rows


def test_it_says_everywhere_that_it_is_a_fake(device: dict[str, str], bundle: Path) -> None:
    ask = """
import stagec
(d,) = stagec.devices("cuda")
print(repr(d), d, d.client.platform_version, d.device_kind, sep="|")
"""
    done = fake.run("-c", ask, environment=device)
    assert done.stdout == f"FakeDevice(id=0)|{fake.NAME}|PJRT C API\n{fake.NAME}|{fake.KIND}\n"
    assert done.stderr == f"{fake.NAME}: a CPU answers as cuda\n"
    archive = Archive(str(bundle))
    assert {target["device_kind"] for name, target in archive.index["targets"].items() if "fake" in name} == {fake.KIND}
    (entry,) = archive.index["functions"]["update"]["executables"]
    assert f"code of {fake.NAME}\n".encode() in archive[entry["executable"]]
    assert entry["versions"]["jax-cuda13-pjrt"].endswith("+fake")


def test_functions_run_on_it(device: dict[str, str], bundle: Path) -> None:
    """Numpy's arrays and device arrays, donation, dtypes that numpy has not, two devices, and JAX's arrays."""
    rows = called(bundle, "mlp", "flat", "update", "narrow", environment=device)
    rows += called(bundle, "halves", environment=device, devices="2")
    mlp, flat, update, narrow, halves = rows[::2]
    assert rows[1::2] == rows[::2]
    assert (mlp, flat) == ([MLP], [MLP])
    assert update == [[3.0, 4.0, 5.0, 6.0], 4.0]
    assert narrow == [[2.0] * 4, [2.0] * 4, [0.0] * 4, [0.0] * 3]
    assert halves == [MORE, SUMS]
    assert called(bundle, "jax", environment=device) == [[MLP, MLP]] * 2


GONE = "INTERNAL: stagec's fake device for tests: CUDA_ERROR_ILLEGAL_ADDRESS: the device is lost"
FULL = r"RESOURCE_EXHAUSTED: stagec's fake device for tests: Out of memory while trying to allocate \d+ bytes\."
NOT_FOR = r"jax-cuda13-pjrt \S+ cannot be used with jaxlib \S+ on this machine: "
FAILURES = {
    "major-version": ("LoadError", "platform", f"{NOT_FOR}INVALID_ARGUMENT: Mismatched PJRT plugin PJRT API major"),
    "old-version": ("LoadError", "platform", f"{NOT_FOR}INVALID_ARGUMENT: Plugin PJRT API version 0.1 is older"),
    "initialize": ("LoadError", "platform", f"{NOT_FOR}INTERNAL: .*libcuda.so reported version is: Invalid"),
    "no-driver": ("LoadError", "platform", "jax-cuda13-pjrt finds no NVIDIA device it can use: .*No visible GPU"),
    "memory-at-load": ("LoadError", "memory", f"jaxlib does not load the executable: {FULL}"),
    "memory-at-put": ("RunError", "memory", f"copying an array of shape .* and dtype float32 to .*: {FULL}"),
    "memory-at-run": ("RunError", "memory", f"update: {FULL}"),
    "lost": ("RunError", "execution", GONE),
    "lost-later": ("RunError", "execution", GONE),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_each_failure_has_a_code_also_the_second_time(failure: str, device: dict[str, str], bundle: Path) -> None:
    kind, code, text = FAILURES[failure]
    rows = called(bundle, "update", environment=device, failure=failure)
    assert [row[:2] for row in rows] == [[kind, code]] * 2
    for row in rows:
        assert re.search(text, row[2]), row[2]


@pytest.mark.parametrize("failure", ["lost", "lost-later", "memory-at-run"])
def test_each_way_of_calling_has_the_same_error(failure: str, device: dict[str, str], bundle: Path) -> None:
    rows = called(bundle, "mlp", "flat", environment=device, failure=failure)
    _, code, text = FAILURES[failure]
    # When a device is gone, so is what would be loaded there next.
    assert {row[0] for row in rows[:1]} == {"RunError"}
    assert {row[1] for row in rows} <= {code, "executable"}
    for row in rows:
        assert re.search(text.replace("update", "mlp"), row[2]), row[2]


def test_without_a_driver_the_cpu_serves(device: dict[str, str], bundle: Path) -> None:
    assert called(bundle, "mlp", environment=device, failure="no-driver") == [[MLP]] * 2


def test_what_a_device_has_not_room_for(device: dict[str, str], bundle: Path) -> None:
    """The arguments take 336 bytes; results and temporaries, which XLA counts, the rest."""
    for limit, what in (("200", "mlp: "), ("340", "mlp: ")):
        for row in called(bundle, "mlp", environment=device, memory=limit):
            assert row[:2] == ["RunError", "memory"]
            assert re.match(what + FULL, row[2])
    assert called(bundle, "mlp", environment=device, memory="1000") == [[MLP]] * 2


def test_another_kind_of_device_and_too_few(device: dict[str, str], bundle: Path) -> None:
    (row, _) = called(bundle, "update", environment=device, model=", mark 2")
    assert row[:2] == ["LoadError", "device-kind"]
    assert f"fake: it is for {fake.KIND}, here is {fake.KIND}, mark 2" in row[2]
    (row, _) = called(bundle, "halves", environment=device)
    assert row[:2] == ["LoadError", "device-count"]
    assert "two-fakes: it runs on 2 devices, 1 are here" in row[2]


def test_another_plugin_than_the_bundles(device: dict[str, str], bundle: Path, tmp_path: Path) -> None:
    def older(description: dict[str, Any]) -> None:
        description["versions"]["jax-cuda13-pjrt"] = "0.10.0"

    other = edited_descriptions(bundle, tmp_path / "other.aot", "update", older)
    (row, _) = called(other, "update", environment=device)
    assert row[:2] == ["LoadError", "plugin-version"]
    assert "it was compiled with jax-cuda13-pjrt 0.10.0, here is " in row[2]


def test_code_of_another_device(device: dict[str, str], bundle: Path, tmp_path: Path) -> None:
    """All digests are right, and the plugin does not know the bytes."""
    member, changed = "update.fake.xla", b""

    def change(members: dict[str, bytes]) -> None:
        nonlocal changed
        members[member] = changed = members[member].replace(b"code of", b"data of")

    def describe(description: dict[str, Any]) -> None:
        description["executable_sha256"] = hashlib.sha256(changed).hexdigest()

    other = edited_descriptions(edited(bundle, tmp_path / "a.aot", change), tmp_path / "b.aot", "update", describe)
    (row, _) = called(other, "update", environment=device)
    assert row[:2] == ["LoadError", "executable"]
    assert row[2].endswith(f"INVALID_ARGUMENT: {fake.NAME}: these bytes are not its code")
    (row, _) = called(tmp_path / "a.aot", "update", environment=device)
    assert row[:2] == ["LoadError", "digest"]  # before the plugin is asked


def test_commands_that_people_use_with_a_device(device: dict[str, str], bundle: Path) -> None:
    done = fake.stagec("run", bundle, "--golden", "--json", environment=device)
    checks = json.loads(done.stdout)["checks"]
    assert {(row["target"], row["ok"]) for row in checks} == {("fake", True), ("cpu-avx2", True)}
    done = fake.stagec("explain", bundle, "--json", environment=device)
    functions = {row["function"]: row["candidates"] for row in json.loads(done.stdout)["functions"]}
    assert [row["code"] for row in functions["mlp"][:3]] == [selection.CHOSEN, selection.CHOSEN, selection.FITS]
    lost = fake.stagec("run", bundle, "mlp", "--random", environment=device, failure="lost")
    assert (lost.returncode, lost.stderr.splitlines()[-1]) == (2, f"mlp: {GONE}")


def test_describe_device(device: dict[str, str]) -> None:
    done = fake.stagec("describe-device", environment=device)
    described, written = tomllib.loads(done.stdout), tomllib.loads((fake.HERE / "device.toml").read_text())
    estimates = {"bf16_flops", "doc", "pcie_bandwidth", "source"}
    assert {k: v for k, v in described.items() if k in written and k not in estimates} == {
        k: v for k, v in written.items() if k not in estimates
    }
    assert "# bf16_flops = the peak" in done.stdout
    for failure, text in (("no-driver", "CUDA finds no device here: "), ("old-version", "jax-cuda13-pjrt ")):
        done = fake.stagec("describe-device", environment=device, failure=failure)
        assert (done.returncode, done.stderr.startswith(text), "Traceback" in done.stderr) == (2, True, False)


AUTOTUNED = """
[manifest]
name = "m"
version = "1"
[targets.h]
platform = "cuda"
device = "device.toml"
autotuning = "h.textproto"
[functions.f]
entry = "f.mlir"
targets = ["h"]
"""
MODULE = """
func.func public @main(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = stablehlo.tanh %x : tensor<8xf32>
  return %0 : tensor<8xf32>
}
"""


def run_autotune(folder: Path, device: Mapping[str, str], **variables: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(fake.HERE / "device.toml", folder)
    for name, text in (("m.toml", AUTOTUNED), ("f.mlir", MODULE), ("h.textproto", "")):
        (folder / name).write_text(text)
    return fake.stagec("autotune", "m.toml", environment=device, cwd=folder, compiler="1", **variables)


def test_autotune(device: dict[str, str], tmp_path: Path) -> None:
    """It compiles on the device, and writes what XLA timed there, which here is a file of the test."""
    done = run_autotune(tmp_path, device, autotuning=str(fake.timed(tmp_path)))
    assert (done.returncode, done.stdout) == (0, "wrote h.textproto\n"), done.stderr
    (result,) = autotuning.read((tmp_path / "h.textproto").read_text())
    assert (result.hlo, result.chosen) == ("dot", (("gemm", ()),))
    lost = run_autotune(tmp_path, device, failure="no-driver")
    assert lost.returncode == 2
    assert lost.stderr.startswith("CUDA finds no device here: ")
