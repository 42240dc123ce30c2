"""`stagec compare-jit`: results of a bundle beside those of `jax.jit` on the CPU of the target.

Modules: `cli/compare_jit.py`, `cli/actions/reference.py`, `cli/forks.py`.
"""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.building import build, stagec

MODEL = """
import jax
import jax.numpy as jnp


def mlp(w, x):
    return {"y": jnp.tanh(x @ w) / jnp.sum(jnp.exp(x))}


def kernel_gradient(x, kernel):
    def loss(kernel):
        return jnp.sum(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME") ** 2)

    return jax.grad(loss)(kernel)
"""
MANIFEST = """
[manifest]
name = "m"
version = "1.0.0"
[targets]
cpu = { platform = "cpu", isa = "AVX2" }
[functions.mlp]
entry = "model:mlp"
args = ["f32[64,32]", "f32[batch,64]"]
buckets = { batch = [3, 8] }
targets = ["cpu"]
[functions.kernel_gradient]
entry = "model:kernel_gradient"
args = ["f32[8,16,32,32]", "f32[16,16,3,3]"]
targets = ["cpu"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    (folder / "model.py").write_text(MODEL)
    (folder / "m.toml").write_text(MANIFEST)
    (folder / "out").mkdir()
    build("m.toml", folder / "out", folder)
    return folder


def test_a_bundle_has_the_bits_of_jax(folder: Path) -> None:
    done = stagec("compare-jit", "out/m.aot", "m.toml", cwd=folder, env={})
    lines = [
        "m.kernel_gradient.cpu: result has the bits of jax.jit",
        "m.mlp.cpu.batch3: result['y'] has the bits of jax.jit",
        "m.mlp.cpu.batch8: result['y'] has the bits of jax.jit",
    ]
    assert (done.stdout.splitlines(), done.stderr) == (lines, "")
    assert done.returncode == 0


def test_rows_come_one_by_one_and_one_process_forks_for_all(folder: Path, tmp_path: Path) -> None:
    """An error in the last function takes no row of the others away."""
    who = "import os, sys\nwith open('parents', 'a') as file:\n    print(os.getppid(), file=file)\n"
    (tmp_path / "model.py").write_text(f"{who}{MODEL}\n\ndef wrong(x):\n    raise ValueError('no')\n")
    wrong = '[functions.wrong]\nentry = "model:wrong"\nargs = ["f32[2]"]\ntargets = ["cpu"]\n'
    (tmp_path / "m.toml").write_text(MANIFEST + wrong)
    done = stagec("compare-jit", folder / "out/m.aot", "m.toml", cwd=tmp_path, env={})
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        "m.kernel_gradient.cpu",
        "m.mlp.cpu.batch3",
        "m.mlp.cpu.batch8",
    ]
    assert done.returncode == 2
    assert done.stderr.startswith("m.toml: functions.wrong: staging model:wrong raised ValueError\n")
    parents = (tmp_path / "parents").read_text().split()
    assert len(parents) == 3 + 3  # three functions are traced, and three executables have references
    assert len({*parents}) == 1


def test_another_model_differs(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL.replace("x @ w", "x @ w * 1.0001"))
    (tmp_path / "m.toml").write_text(MANIFEST)
    done = stagec("compare-jit", folder / "out/m.aot", "m.toml", "mlp", "--json", cwd=tmp_path, env={})
    rows = [{"executable": f"m.mlp.cpu.batch{size}", "path": "result['y']", "equal": False} for size in (3, 8)]
    assert json.loads(done.stdout) == {"kind": "compare-jit", "results": rows}
    assert done.returncode == 1


def test_no_function_of_that_name(folder: Path) -> None:
    done = stagec("compare-jit", "out/m.aot", "m.toml", "mlpp", cwd=folder, env={})
    assert done.stderr == "out/m.aot: nothing to compare\n  name functions that have a target for CPUs\n"
    assert done.returncode == 2


def test_threads_change_the_bits_of_a_convolution(folder: Path) -> None:
    words = ("run", "out/m.aot", "kernel_gradient", "--random", "--output")
    results = []
    for threads in ("1", "1", "2"):
        assert stagec(*words, f"{threads}.npz", cwd=folder, env={"NPROC": threads}).returncode == 0
        results.append((folder / f"{threads}.npz").read_bytes())
    assert results[0] == results[1]
    if version("jaxlib") == "0.10.2":  # what docs/conformance.md says of it; 0.12.0 splits this one in another way
        assert results[1] != results[2]
