"""XLA's runtime for NVIDIA devices on a driver that is a fake: it reads, loads and launches what was compiled here.

No kernel runs, so results say nothing. What is real is XLA: its reader of executables, its checks, its allocator, its
launches, and how it chooses among kernels that it times.

Modules: `backends/gpu/local_gpus.py`, `pjrt/gpu_calls.py`.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from stagec.backends.gpu import compiler as cuda
from stagec.bundle.archive import Archive
from stagec.hardware import cuda as gpus, gpu_devices
from stagec.pjrt import packages
from tests import building
from tests.backends.deviceless import installed
from tests.bundles import edited, edited_descriptions
from tests.fake_device import fake
from tools.on_device import steps

_toolkit = packages.folder("nvidia.cu13")
pytestmark = [
    installed(jax_cuda13_pjrt="jax_plugins.xla_cuda13", nvidia_cuda_nvcc="nvidia.cu13.bin"),
    pytest.mark.skipif(
        bool(_toolkit and (_toolkit / "lib" / "libcudart.so.13").exists()), reason="CUDA itself is here"
    ),
]
ON_DEVICE = fake.ROOT / "tools" / "on_device"
BEFORE_A_RELEASE = pytest.mark.skipif(
    "STAGEC_INSTALLS" not in os.environ, reason="it installs 300 MB, or takes minutes: set STAGEC_INSTALLS=1"
)
FUNCTIONS = ("dense", "transformer_step", "triton", "mosaic", "factorized")


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return fake.install_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What XLA:GPU compiles without a device."""
    return building.build("tests/fake_device/cuda.toml", tmp_path_factory.mktemp("bundle"))


def test_xla_says_of_the_device_what_the_other_fake_says(device: dict[str, str]) -> None:
    """As on a device: also of its units, which have fields of the same names as the device."""
    ask = "from stagec.backends.gpu import local_gpus; print(local_gpus.describe_device(), end='')"
    told = fake.run("-c", ask, environment=device).stdout
    assert told.rstrip() == (fake.HERE / "description.textproto").read_text().rstrip()
    done = fake.stagec("describe-device", environment=device)
    described = tomllib.loads(f"{done.stdout}pcie_bandwidth = 68_719_476_736\nbf16_flops = 989e12\n")
    written = tomllib.loads((fake.HERE / "device.toml").read_text())
    assert gpu_devices.read("cuda", described) == gpu_devices.read("cuda", written)


def test_xla_loads_edited_executables_and_launches_their_kernels(
    device: dict[str, str], bundle: Path, tmp_path: Path
) -> None:
    rows = fake.called(bundle, *FUNCTIONS, device=device, kernels=str(tmp_path / "kernels"))
    assert all(rows[name]["loaded"] for name in FUNCTIONS)
    assert rows["dense"]["shapes"] == [[8, 64]]
    # The message names a library that is not here.
    kind, code, text = rows["factorized"].pop("error")
    assert (kind, code) == ("RunError", "execution")
    assert "gpusolverDnCreate(&handle) failed" in text
    assert not [name for name in FUNCTIONS if "error" in rows[name]]
    launched = set((tmp_path / "kernels").read_text().split())
    archive = Archive(str(bundle))
    for name in ("dense", "transformer_step", "triton"):
        (entry,) = archive.index["functions"][name]["executables"]
        texts = {stage: text for stage, _, text in cuda.layers(archive[entry["executable"]])}
        kernels = {line.split()[-1] for line in texts["binary"].splitlines()}
        assert kernels <= launched, name
    assert "kernel_mosaic_gpu_kernel" in launched  # its name is in the code of Mosaic's own, not in the executable's


def test_memory_that_xla_takes_is_what_was_told(device: dict[str, str], bundle: Path) -> None:
    """The allocator's own peak, for programs whose arrays are whole pieces of its memory."""
    # For a call of cuBLAS, XLA of jaxlib 0.10.2 takes its workspace of 4 MiB once more; that of 0.11.2 256 bytes.
    for name, more in (("dense", 1 << 22), ("triton", 0)):
        (row,) = fake.called(bundle, name, device=device).values()
        assert 0 <= row["taken"]["peak_bytes_in_use"] - row["told"]["peak_memory_in_bytes"] <= more


def test_failures_in_the_words_of_xla(device: dict[str, str], bundle: Path) -> None:
    (row,) = fake.called(bundle, "dense", device=device, failure="no-driver").values()
    assert row["error"][:2] == ["LoadError", "platform"]
    assert "jax-cuda13-pjrt finds no NVIDIA device it can use: FAILED_PRECONDITION: No visible GPU" in row["error"][2]
    (row,) = fake.called(bundle, "dense", device=device, failure="lost").values()
    assert row["error"][:2] == ["RunError", "execution"]
    assert "dense: INTERNAL: CUDA error: Failed to launch CUDA kernel" in row["error"][2]
    put = """
import numpy as np, stagec
try:
    stagec.device_put(np.zeros(1 << 28, np.float32), stagec.devices("cuda")[0]).numpy()
except stagec.RunError as error:
    print(error.code, error)
"""
    done = fake.run("-c", put, environment=device)
    assert done.stdout.startswith("memory "), done.stderr
    assert "RESOURCE_EXHAUSTED: Out of memory while trying to allocate" in done.stdout


@pytest.fixture(scope="module")
def h100(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return fake.install_driver(tmp_path_factory.mktemp("h100"), gpus.device("h100-sxm"))


@pytest.fixture(scope="module")
def prepared(h100: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `tools/on_device`, small, with the part for an H100 and one for an H200."""
    folder = tmp_path_factory.mktemp("prepared") / "folder"
    for name, golden in (("h100-sxm", ("mlp", "newton", "shapes")), ("h200", ())):
        part = folder.with_name(name)
        words = ["--device", name, "--size", "256", "--golden", *golden]
        words += ["--kernels", "--programs"] if name == "h200" else []
        done = fake.run(ON_DEVICE, "prepare", part, *words, environment=h100)
        assert done.stdout.startswith(f"{part}: "), done.stdout + done.stderr
        shutil.copytree(part / name, folder / name)
        inputs = folder / name / "inputs.json"
        given = json.loads(inputs.read_text())
        for timed in ("convolved", "gradient"):  # the virtual driver has no cuDNN that could be timed
            del given["exports"][f"on_device.{timed}"], given["executables"][f"on_device.{timed}.device"]
        inputs.write_text(json.dumps(given))
    return folder


@BEFORE_A_RELEASE
def test_all_that_a_device_is_asked(h100: dict[str, str], prepared: Path, tmp_path: Path) -> None:
    """`tools/on_device` with XLA's own plugin, and with JAX. Only numbers and times are other than on a device."""
    # Golden results last: one of them hangs until its time is over, and the limits of others are for a busy machine.
    names, said, rows = [name for name in steps.STEPS if name != "golden"], "", []
    files = {"on_device.md", "on_device.json", "on_device.log", "device.toml"}
    for part, asked, minutes in (("others", names, "12"), ("golden", ["golden"], "6")):
        out = tmp_path / part
        words = ("--output", out, "--minutes", minutes, "--steps", *asked)
        said += fake.run(ON_DEVICE, "run", prepared, *words, environment=h100).stdout
        assert {path.name for path in out.iterdir()} == files
        rows += json.loads((out / "on_device.json").read_text())["rows"]
    assert list(dict.fromkeys(row["step"] for row in rows)) == [*names, "golden"]
    # No kernel ran, so results are what was in memory, and a loop that asks for one never ends; and no time is that of
    # a device.
    numbers = {("golden", "mlp"), ("golden", "shapes"), ("pallas", "triton"), ("pallas", "mosaic"), ("jax", "update")}
    numbers |= {("jax", name) for name in steps.TIMED}
    times = {("roofline", name) for name in steps.TIMED} | {("describe", "active_links of the device")}
    others = [row for row in rows if row["verdict"] in (steps.FAILED, steps.WRONG)]
    others = [row for row in others if row["expected"] != "no slower with results"]
    (hung,) = (row for row in others if row["verdict"] == steps.FAILED)
    assert (hung["step"], hung["what"]) == ("golden", "newton"), said
    assert hung["measured"].startswith("it took longer than ")
    others.remove(hung)
    assert {(row["step"], row["what"]) for row in others} <= numbers | times, said
    assert {row["step"] for row in others} == {"describe", "golden", "roofline", "jax", "pallas"}
    measured = {(row["step"], row["what"], row["expected"]): row["measured"] for row in rows}
    # What follows the one that hung has its row.
    assert [row["what"] for row in rows if row["step"] == "golden"] == ["mlp", "newton", "shapes"]
    assert [row["verdict"] for row in rows if row["verdict"] == steps.SKIPPED] == [steps.SKIPPED]  # of `several`
    assert {measured["jax_cache", name, "JAX finds the entry"] for name in ("product", "layer")} == {"1 found"}
    (found,) = (row for row in rows if row["step"] == "programs")
    assert (found["what"], found["verdict"]) == ("paged_decode", steps.OK)
    # XLA timed its own kernels, and finds each by its text where it compiles without the device.
    assert "triton" in measured["autotune", "stagec autotune", "results for product, layer"]
    finds = "XLA finds all results, by the text of kernels"
    assert {measured["autotune", name, finds] for name in ("product", "layer")} == {"it does"}


@BEFORE_A_RELEASE
@pytest.mark.skipif(importlib.util.find_spec("ensurepip") is None, reason="this Python makes no environments")
def test_one_command_prepares_for_two_devices(h100: dict[str, str], tmp_path: Path) -> None:
    """It needs Python alone, and installs JAX and its plugin."""
    folder, version = tmp_path / "folder", metadata.version("jax")
    words = ["--device", "h100-sxm", "h200", "--jax", version, "--size", "64", "--golden", "--kernels", "mosaic"]
    words += ["--programs"]
    done = fake.run("-S", ON_DEVICE, "prepare", folder, *words, environment={**h100, "PYTHONPATH": ""})
    size = re.fullmatch(rf"{folder}: ([\d.]+) MiB\n", done.stdout)
    assert size, done.stdout + done.stderr
    assert float(size[1]) < 2
    assert {path.name for path in folder.iterdir()} == {"h100-sxm", "h200"}
    for part in folder.iterdir():
        assert json.loads((part / "lost.json").read_text()) == {}
        loaded = fake.called(part / "on_device.aot", "stream", device=h100)["stream"]
        assert ("loaded" in loaded) == (part.name == "h100-sxm"), loaded


@BEFORE_A_RELEASE
def test_a_kernel_without_a_result_is_told(h100: dict[str, str], prepared: Path, tmp_path: Path) -> None:
    """The kernels of one function were timed instead of another's."""
    folder, out = tmp_path / "folder", tmp_path / "out"
    shutil.copytree(prepared / "h100-sxm", folder / "h100-sxm")
    inputs = folder / "h100-sxm" / "inputs.json"
    given = json.loads(inputs.read_text())
    given["exports"]["on_device.layer"] = given["exports"]["on_device.stream"]
    inputs.write_text(json.dumps(given))
    fake.run(ON_DEVICE, "run", folder, "--output", out, "--steps", "autotune", environment=h100)
    rows = json.loads((out / "on_device.json").read_text())["rows"]
    assert [(row["what"], row["verdict"]) for row in rows if row["expected"] != "no slower with results"] == [
        ("stagec autotune", steps.OK),
        ("product", steps.OK),
        ("layer", steps.FAILED),
    ]
    assert ".autotuning: it has no result for %" in rows[-1]["measured"]


def test_damaged_executables_reach_no_reader(device: dict[str, str], bundle: Path, tmp_path: Path) -> None:
    """The digest refuses them. Where it was made to fit, XLA's reader does, by the checksums in the container."""
    member = "dense.fake.batch8.xla"
    original = Archive(str(bundle))[member]
    for part in (1, 3, 6):
        place = len(original) * part // 8
        damaged = original[:place] + bytes([original[place] ^ 0x55]) + original[place + 1 :]

        def damage(members: dict[str, bytes], damaged: bytes = damaged) -> None:
            members[member] = damaged

        def describe(description: dict[str, Any], damaged: bytes = damaged) -> None:
            description["executable_sha256"] = hashlib.sha256(damaged).hexdigest()

        plain = edited(bundle, tmp_path / f"{part}.aot", damage)
        fits = edited_descriptions(plain, tmp_path / f"{part}-fits.aot", "dense", describe)
        for path, code in ((plain, "digest"), (fits, "executable")):
            (row,) = fake.called(path, "dense", device=device).values()
            assert row["error"][:2] == ["LoadError", code]
