"""A folder that stagec built, under programs that nobody changed: what is read, what is kept elsewhere, what it says.

Modules: `jax_cache.py`, `jax_plugin.py`, `frontends/jax/cache_keys.py`, `cli/sign.py`.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from stagec.jaxcache import jax_entries
from tests.building import COMPILER, ROOT, build_jax_cache, stagec

MANIFEST = """
[manifest]
name = "small"
version = "1"
jax_cache = true

[functions.double]
entry = "small:double"
args = ["f32[4]"]
targets = ["cpu-avx2"]
"""
PROGRAM = """\
import jax
import numpy as np
from small import double


def triple(x):
    return x * 3


x = np.arange(4, dtype="f4")
print(jax.jit(double)(x).tolist(), jax.jit(triple)(x).tolist())
"""
RIGHT = "[0.0, 2.0, 4.0, 6.0] [0.0, 3.0, 6.0, 9.0]\n"
BUILT, KEPT = {"built": 1, "missing": 1}, {"built": 1, "kept": 1}


class Machine:
    """One where stagec is installed, with a program, a folder that was built, and one for misses."""

    def __init__(self, root: Path, here: Path) -> None:
        self.here, self.folder, self.misses = here, here / "jax_cache", here / "misses"
        shutil.copytree(root / "out" / "jax_cache", self.folder)
        (here / "small.py").write_text("def double(x): return x * 2\n")
        (here / "program.py").write_text(PROGRAM)
        info = here / "installed" / "stagec-1.dist-info"
        info.mkdir(parents=True)
        project = tomllib.loads((COMPILER / "pyproject.toml").read_text("utf-8"))["project"]
        (plugin,) = project["entry-points"]["jax_plugins"].items()
        (info / "entry_points.txt").write_text("[jax_plugins]\n{} = {}\n".format(*plugin))
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stagec\nVersion: 1\n")

    def begin(self, limit: Callable[[], None] | None = None, **variables: str) -> subprocess.Popen[str]:
        """Start the program, as it is. variables: without STAGEC_."""
        site = [entry for entry in sys.path if entry.endswith("site-packages")]
        env = {
            "JAX_COMPILATION_CACHE_DIR": str(self.folder),
            "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
            "JAX_PLATFORMS": "cpu",
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([*site, str(self.here), str(COMPILER), str(self.here / "installed")]),
            **{f"STAGEC_{name}": value for name, value in variables.items()},
        }
        command = [sys.executable, "-B", "-s", "-S", "program.py"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        options = {"cwd": self.here, "env": env, "text": True, "preexec_fn": limit, **pipes}
        return subprocess.Popen(command, **options)  # type: ignore[call-overload,no-any-return]

    def found(self, says: str = "", limit: Callable[[], None] | None = None, **variables: str) -> dict[str, int]:
        """Run the program; return how many programs were found, by place. says: what it writes besides."""
        metrics = self.here / "metrics.prom"
        metrics.unlink(missing_ok=True)
        process = self.begin(limit, JAX_CACHE_METRICS=str(metrics), **variables)
        out, err = process.communicate()
        assert (process.returncode, out) == (0, RIGHT), err
        assert says in err if says else not err
        counts = re.findall(
            r'^stagec_jax_cache_lookups_total\{found="(\w+)"\} (\d+)$', metrics.read_text(), re.MULTILINE
        )
        assert [found for found, _ in counts] == ["built", "kept", "damaged", "missing"]
        return {found: int(count) for found, count in counts if count != "0"}

    def kept(self) -> list[Path]:
        return sorted(self.misses.glob(f"*{jax_entries.SUFFIX}"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    (folder / "small.toml").write_text(MANIFEST)
    (folder / "small.py").write_text("def double(x): return x * 2\n")
    build_jax_cache("small.toml", folder / "out", folder)
    return folder


@pytest.fixture
def machine(root: Path, tmp_path: Path) -> Machine:
    return Machine(root, tmp_path)


def test_what_misses_is_kept_elsewhere(machine: Machine) -> None:
    """The folder stays as it was built, and the second start compiles nothing."""
    before = {path.name: path.read_bytes() for path in machine.folder.iterdir()}
    assert machine.found(MISSES_DIR=str(machine.misses)) == BUILT
    assert machine.found(MISSES_DIR=str(machine.misses)) == KEPT
    assert {path.name: path.read_bytes() for path in machine.folder.iterdir()} == before
    (kept,) = machine.kept()
    assert kept.name.startswith("jit_triple-")


def test_what_was_half_written_is_compiled_again(machine: Machine) -> None:
    """A limit of a file's size is a full disk; then the file ends anywhere, or a bit of it is another."""

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    assert machine.found("File too large", full, MISSES_DIR=str(machine.misses)) == BUILT
    (half,) = machine.kept()
    assert half.stat().st_size == 1000
    assert machine.found(MISSES_DIR=str(machine.misses)) == BUILT
    whole = half.read_bytes()
    for damaged in (whole[:-1], whole[:20], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]):
        half.write_bytes(damaged)
        assert machine.found(MISSES_DIR=str(machine.misses)) == BUILT
        assert machine.found(MISSES_DIR=str(machine.misses)) == KEPT


def test_processes_that_start_at_once(machine: Machine) -> None:
    processes = [machine.begin(MISSES_DIR=str(machine.misses)) for _ in range(4)]
    assert [process.communicate() for process in processes] == [(RIGHT, "")] * 4
    assert machine.found(MISSES_DIR=str(machine.misses)) == KEPT


def test_a_file_that_is_not_what_was_built(machine: Machine) -> None:
    for path in machine.folder.glob(f"*{jax_entries.SUFFIX}"):
        path.write_bytes(path.read_bytes()[:-100])
    says = "the file of double for cpu-avx2 is not what was built\n"
    assert machine.found(says) == {"damaged": 1, "missing": 1}


def test_a_miss_is_told(machine: Machine) -> None:
    """With the user's line and what differs."""
    says = "compiled at program.py:11, because it was not built: jit_triple\n  no entry has this name; the folder has"
    assert machine.found(says, ON_MISS="log") == BUILT
    (machine.here / "small.py").write_text("def double(x): return x + x\n")
    says = "jit_double\n  nearest entry: double for cpu-avx2\n  computation: the program is another one"
    assert machine.found(says, ON_MISS="log") == {"missing": 2}


def test_a_miss_is_an_error(machine: Machine) -> None:
    process = machine.begin(ON_MISS="error")
    out, err = process.communicate()
    assert (process.returncode, out) == (1, "")
    assert "stagec.jax_cache.MissError: compiled at program.py:11, because it was not built: jit_triple" in err
    assert machine.found(MISSES_DIR=str(machine.misses)) == BUILT
    assert machine.found(MISSES_DIR=str(machine.misses), ON_MISS="error") == KEPT


def test_a_policy_that_is_none(machine: Machine) -> None:
    (machine.here / "program.py").write_text("import stagec.jax_cache\n" + PROGRAM)
    process = machine.begin(ON_MISS="warn")
    _, err = process.communicate()
    assert process.returncode == 1
    assert "STAGEC_ON_MISS is 'warn'\n  set it to log or error\n" in err


def test_a_folder_that_nobody_signed_is_not_read(machine: Machine, tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        words = ["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", tmp_path / f"{name}.key"]
        subprocess.run(["openssl", *words], check=True, capture_output=True)
        words = ["pkey", "-in", tmp_path / f"{name}.key", "-pubout", "-out", tmp_path / f"{name}.pem"]
        subprocess.run(["openssl", *words], check=True)
    keys = {"JAX_CACHE_KEYS": str(tmp_path / "ours.pem"), "MISSES_DIR": str(machine.misses)}

    def refused(says: str) -> None:
        process = machine.begin(**keys)
        out, err = process.communicate()
        assert (process.returncode, out) == (0, RIGHT), err
        assert f"JAX compiles all programs itself: {says}" in err
        assert not machine.kept()

    refused(f"{machine.folder}.sig: no such file: the bundle has no signature")
    for name in ("theirs", "ours"):
        done = stagec("sign", machine.folder, "--model-signing", "--key", tmp_path / f"{name}.key", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        if name == "theirs":
            refused(f"{machine.folder}.sig: 0 of 1 keys signed it, 1 must")
    assert machine.found(**keys) == BUILT
    assert machine.found(**keys) == KEPT
    shutil.rmtree(machine.misses)
    index = machine.folder / jax_entries.INDEX
    index.write_text(index.read_text().replace("cpu-avx2", "cpu-avx3"))
    refused(f"{machine.folder}.sig: another model was signed")
    index.unlink()
    refused(f"[Errno 2] No such file or directory: '{index}'")


def test_the_page_names_the_variables(machine: Machine) -> None:
    """docs/with-jax.md: all of them are set at once, with paths of this machine."""
    page = (ROOT / "docs" / "with-jax.md").read_text("utf-8")
    said = re.findall(r"^    export STAGEC_(\w+)=(.*)$", page, re.MULTILINE)
    assert [name for name, _ in said] == ["MISSES_DIR", "ON_MISS", "JAX_CACHE_METRICS", "JAX_CACHE_KEYS"]
    (command,) = re.findall(r"^    stagec (sign models.jax_cache .*)$", page, re.MULTILINE)
    made = {"models.jax_cache": str(machine.folder), "team.key": str(machine.here / "team.key")}
    words = ["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", made["team.key"]]
    subprocess.run(["openssl", *words], check=True, capture_output=True)
    public = ["pkey", "-in", made["team.key"], "-pubout", "-out", machine.here / "team.pem"]
    subprocess.run(["openssl", *public], check=True)
    done = stagec(*[made.get(word, word) for word in command.split()], cwd=machine.here)
    assert done.returncode == 0, done.stderr
    here = {**dict(said), "MISSES_DIR": str(machine.misses), "JAX_CACHE_KEYS": str(machine.here / "team.pem")}
    del here["JAX_CACHE_METRICS"]
    assert machine.found("jit_triple", **here) == BUILT
    assert machine.found(**here) == KEPT


def test_another_folder_is_not_signed(tmp_path: Path) -> None:
    key = tmp_path / "key"
    words = ["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", key]
    subprocess.run(["openssl", *words], check=True, capture_output=True)
    (tmp_path / "folder").mkdir()
    done = stagec("sign", tmp_path / "folder", "--model-signing", "--key", key, cwd=tmp_path)
    assert done.returncode == 2
    assert "folder: it has no stagec.json: stagec did not build it for JAX's compilation cache" in done.stderr
