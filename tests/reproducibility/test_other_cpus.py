"""Executable bytes do not depend on the CPU of the build machine: other machines are played by qemu-user."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.building import COMPILER, stagec

pytestmark = pytest.mark.skipif(
    shutil.which("qemu-x86_64") is None, reason="needs qemu-x86_64 (Debian's package qemu-user), which is not installed"
)


def compile_on(cpu: str, artifacts: Path, out: Path, name: str, isa: str) -> subprocess.CompletedProcess[str]:
    """Compile an executable of the small model on the CPU model `cpu` ("" is this machine) for `isa`."""
    stem = artifacts / f"m.{name}"
    out.mkdir()
    spec = stem.with_name(f"{stem.name}.spec").read_text().replace('"isa": "AVX2"', f'"isa": "{isa}"')
    (out / "spec").write_text(spec)
    exported = artifacts / f"m.{name.partition('.')[0]}.exported"
    words = ["action", "compile", "--spec", out / "spec", "--exported", exported, "--output", out / "xla"]
    words += ["--description", out / "json"]
    if not cpu:
        return stagec(*words)
    env = {"PYTHONPATH": os.pathsep.join([*(p for p in sys.path if p.endswith("site-packages")), str(COMPILER)])}
    command = ["qemu-x86_64", "-cpu", cpu, sys.executable, "-B", "-s", "-S", COMPILER / "stagec" / "__main__.py"]
    return subprocess.run([*map(str, [*command, *words])], env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("cpu", "name", "isa"),
    [
        ("Haswell", "f.cpu.batch3", "AVX2"),
        ("Haswell", "bits.cpu", "AVX512"),
        ("EPYC", "f.cpu.batch3", "AVX2"),
        ("EPYC", "bits.cpu", "SSE4_2"),
        ("EPYC", "f.cpu.batch3", "AMX"),
    ],
)
def test_another_cpu_gives_the_same_bytes(small: Path, tmp_path: Path, cpu: str, name: str, isa: str) -> None:
    """Less than the level, exactly the level, more than it, and another maker's CPU."""
    here = compile_on("", small, tmp_path / "here", name, isa)
    assert here.returncode == 0, here.stderr
    there = compile_on(cpu, small, tmp_path / "there", name, isa)
    assert there.returncode == 0, there.stderr
    assert (tmp_path / "there" / "xla").read_bytes() == (tmp_path / "here" / "xla").read_bytes()
    assert (tmp_path / "there" / "json").read_bytes() == (tmp_path / "here" / "json").read_bytes()
