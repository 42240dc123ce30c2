"""One bundle for x86-64 and aarch64, and where its aarch64 executables are made and run: under an emulator.

Modules: `patches/cpuinfo.py`.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.bundle.archive import Archive
from stagec.core.builds import specs
from stagec.hardware import catalog

# The emulator's CPUs: of Armv8.0, of Armv8.2, and of all that it knows, with SVE.
CPUS = ("cortex-a57", "neoverse-n1", "max")
RELATIVE = {"f64": 1e-12, "f32": 1e-4, "c64": 1e-4, "f16": 4e-3, "bf16": 3e-2, "i8": 0.0}
"""By dtype: what a sum in another order, or with fewer roundings, may change of the largest element."""

pytestmark = pytest.mark.skipif("AARCH64_BUNDLE" not in os.environ, reason="Bazel builds the bundle that it is about")


def run(program: str, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [os.environ[program], *map(str, words)]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)


def called(program: str, folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    done = run(program, os.environ["AARCH64_BUNDLE"], folder / f"{program}.npz")
    assert done.returncode == 0, done.stderr
    with np.load(folder / f"{program}.npz") as results:
        return json.loads(done.stdout), dict(results)


def test_one_bundle_runs_on_both(tmp_path: Path) -> None:
    native, here = called("CALL", tmp_path)
    emulated, there = called("CALL_ON_AARCH64", tmp_path)
    assert set(native["targets"].values()) == {"cpu-avx2"}
    assert emulated["targets"] == {"dense": "neoverse-n1", "dtypes": "neoverse-n1", "factorize": "neoverse-v2"}
    assert native["verdicts"]["neoverse-n1"] == native["verdicts"]["armv8-a"] == "architecture"
    assert (emulated["verdicts"]["cpu-avx2"], emulated["verdicts"]["armv8-a"]) == ("architecture", "fits")
    assert len(here) == 7
    for name, wanted in here.items():
        assert there[name].dtype == wanted.dtype, name
        error = np.abs(there[name] - wanted).max() / np.abs(wanted).max()
        assert error <= RELATIVE[name.rpartition(".")[2]], (name, error)


@pytest.fixture
def compile_words(tmp_path: Path) -> list[str | Path]:
    """The words that compile `dense` again for a neoverse-n1, into tmp_path/x and x.json."""
    target = catalog.target("neoverse-n1")
    spec = specs.ExecutableSpec("dense", "tests/aarch64/aarch64.toml", target, {"batch": 8})
    (tmp_path / "spec").write_text(specs.to_json(spec))
    archive = Archive(os.environ["AARCH64_BUNDLE"])
    (tmp_path / "exported").write_bytes(archive[archive.index["functions"]["dense"]["exported"]])
    words = ["action", "compile", "--spec", tmp_path / "spec", "--exported", tmp_path / "exported"]
    return [*words, "--output", tmp_path / "x", "--description", tmp_path / "x.json"]


def test_the_bytes_are_the_same_on_every_cpu(compile_words: list[str | Path], tmp_path: Path) -> None:
    archive = Archive(os.environ["AARCH64_BUNDLE"])
    entries = archive.index["functions"]["dense"]["executables"]
    (entry,) = (entry for entry in entries if entry["target"] == "neoverse-n1")
    built = {name: bytes(archive[entry[name]]) for name in ("executable", "description")}
    for cpu in CPUS:
        done = run("STAGEC_ON_AARCH64", *compile_words, QEMU_CPU=cpu, PYTHONHASHSEED="7")
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "x").read_bytes() == built["executable"], cpu
        assert (tmp_path / "x.json").read_bytes() == built["description"], cpu


def test_another_architecture_is_refused_by_name(compile_words: list[str | Path]) -> None:
    done = run("STAGEC", *compile_words)
    assert done.returncode != 0
    assert "targets.neoverse-n1.architecture: jaxlib for x86_64 makes no code for aarch64" in done.stderr
    assert "compile it with jaxlib for aarch64" in done.stderr
