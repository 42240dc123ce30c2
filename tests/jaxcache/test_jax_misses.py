"""What a program missed in JAX's compilation cache: logs of real programs with JAX.

Modules: `jaxcache/jax_misses.py`, `cli/explain.py`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.building import COMPILER, build_jax_cache, stagec

MANIFEST = """
[manifest]
name = "small"
version = "1"
jax_cache = true

[functions.double]
entry = "small:double"
args = ["f32[n]"]
targets = ["cpu-avx2"]
buckets = { n = [4, 5] }
"""
CALL = """
import sys
if "hook" in sys.argv: import stagec.jax_cache
import jax, numpy as np
def double(x): return x * 2
def other(x): return x * 3
function = jax.jit(other if "other" in sys.argv else double)
function(np.ones(6 if "six" in sys.argv else 5, "f4"))
function(np.ones(4, "f4"))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    (folder / "small.toml").write_text(MANIFEST)
    (folder / "small.py").write_text("def double(x): return x * 2\n")
    build_jax_cache("small.toml", folder / "out", folder)
    return folder


def explained(root: Path, *words: str, **variables: str) -> tuple[int, Sequence[str]]:
    """Run the program, and say what it missed: the exit status, and the lines."""
    site = [entry for entry in sys.path if entry.endswith("site-packages")]
    env = {
        "JAX_COMPILATION_CACHE_DIR": str(root / "out" / "jax_cache"),
        "JAX_LOGGING_LEVEL": "DEBUG",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
        "JAX_PLATFORMS": "cpu",
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([*site, str(COMPILER)]),
        **variables,
    }
    command = [sys.executable, "-B", "-s", "-S", "-c", CALL, *words]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=True)
    (root / "log").write_text(done.stderr)
    result = stagec("explain", "out/jax_cache", "--log", "log", cwd=root)
    assert not result.stderr
    return result.returncode, result.stdout.splitlines()


def test_all_found(root: Path) -> None:
    assert explained(root, "hook") == (0, ["2 of 2 found"])


def test_the_cpu(root: Path) -> None:
    status, lines = explained(root)
    why = "  accelerator_config: the machine's CPU is in the key: import stagec.jax_cache, or name the machine in "
    assert (status, lines[2], lines[-1]) == (1, f"{why}jax_cache_machines", "0 of 2 found")
    assert lines[:2] == ["jit_double (float32[5])", "  nearest entry: double for cpu-avx2, n = 5"]


def test_the_program(root: Path) -> None:
    status, lines = explained(root, "hook", "six")
    assert (status, lines[0], lines[-1]) == (1, "jit_double (float32[6])", "1 of 2 found")
    assert lines[2].startswith("  computation: the program is another one: the function, shapes,")
    assert len(lines) == 4


def test_the_name(root: Path) -> None:
    _, lines = explained(root, "hook", "other")
    why = "  no entry has this name; the folder has jit_double. An operation outside jax.jit is its own program"
    assert lines[:2] == ["jit_other (float32[5])", why]


def test_a_flag(root: Path) -> None:
    _, lines = explained(root, "hook", XLA_FLAGS="--xla_cpu_enable_fast_min_max=true")
    flags = "  XLA flags: flags of XLA that are in the key: --xla_cpu_enable_fast_min_max=true; it was built with none"
    assert lines[2] == flags


def test_an_option(root: Path) -> None:
    _, lines = explained(root, "hook", JAX_OPTIMIZATION_LEVEL="O1")
    assert lines[2].startswith(
        "  compile_options: options of XLA: compiler_options of jax.jit, jax_optimization_level, "
    )


def test_the_folder(root: Path) -> None:
    _, lines = explained(root, "hook", JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES="all")
    where = f"{root}/out/jax_cache/xla_gpu_kernel_cache_file"
    write = "set JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES=none"
    assert lines[2] == f"  compile_options: the path of the folder is in the options ({where}): {write}"


def test_an_instruction_set(root: Path) -> None:
    """The index of a folder for CPUs that this one is not: what the program looked for is not there."""
    index = (root / "out" / "jax_cache" / "stagec.json").read_text()
    (root / "newer").mkdir()
    (root / "newer" / "stagec.json").write_text(index.replace("AVX2", "AMX_FP16"))
    status, lines = explained(root, "hook", JAX_COMPILATION_CACHE_DIR=str(root / "newer"))
    assert (status, lines[-1]) == (1, "0 of 2 found")
    done = stagec("explain", "newer", "--log", "log", "--json", cwd=root)
    (miss, _) = json.loads(done.stdout)["misses"]
    assert miss["reasons"] == [
        {"part": "accelerator_config", "why": "this machine's CPU runs none of any CPU with AMX_FP16"}
    ]


def test_what_is_no_log_and_no_folder(root: Path, tmp_path: Path) -> None:
    (root / "empty").write_text("nothing\n")
    done = stagec("explain", "out/jax_cache", "--log", "empty", cwd=root)
    assert (done.returncode, done.stderr) == (
        2,
        "empty: it has no keys of JAX's compilation cache\n"
        "  run the program with JAX_LOGGING_LEVEL=DEBUG and JAX_COMPILATION_CACHE_DIR, and keep its stderr\n",
    )
    done = stagec("explain", tmp_path, "--log", "empty", cwd=root)
    assert (done.returncode, done.stderr) == (2, f"{tmp_path}/stagec.json: cannot be read: No such file or directory\n")
    (tmp_path / "stagec.json").write_text("[]")
    done = stagec("explain", tmp_path, "--log", "empty", cwd=root)
    assert done.stderr == (
        f"{tmp_path}/stagec.json: not an index of entries of JAX's compilation cache\n"
        "  give a folder that aot_jax_cache wrote\n"
    )
