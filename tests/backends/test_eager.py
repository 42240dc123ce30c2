"""What a model computes while it is imported: the same on another machine, and refused where it would not be.

Modules: `backends/cpu/eager.py`, `patches/another_cpu.py`.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stagec.backends.cpu import eager
from stagec.core.builds.specs import COMPUTED_ON, to_json
from stagec.core.messages.errors import StagecError
from stagec.hardware import x86
from stagec.patches import another_cpu, cpuid, known_builds, machine_code
from stagec.pjrt import host
from tests.building import stagec
from tests.frontends.workspace import export, spec

MODEL = """
import jax, jax.numpy as jnp, numpy as np

A = np.random.default_rng(0).normal(size=(160, 160))
X = jnp.asarray(A, jnp.float32)
TABLE = jnp.tanh(X @ X), jnp.sum(jnp.exp(X)), np.float32(A @ np.linalg.inv(A)), jnp.linalg.eigh(X + X.T)


def double(x):
    return x * 2, TABLE
"""
needs_another_cpu = pytest.mark.skipif(
    not another_cpu.possible(), reason="this machine can show a process no other CPU: its kernel or processor"
)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "pkg" / "model.py").write_text(MODEL)
    return tmp_path


def exported_as(workspace: Path, function: Any, *words: str, env: dict[str, str] | None = None) -> str:
    """Export in a new process; return the digest of the artifact."""
    (workspace / "f.spec").write_text(to_json(function))
    words = ("action", "export", "--spec", "f.spec", "--output", "f.exported", "--import-root", ".", *words)
    done = stagec(*words, cwd=workspace, env=env or {})
    assert done.returncode == 0, done.stderr
    return hashlib.sha256((workspace / "f.exported").read_bytes()).hexdigest()


@needs_another_cpu
def test_another_machine_makes_the_same_artifact(workspace: Path) -> None:
    """In a fork of a worker and in a process, with the shell's variables, on another CPU with one core."""
    status, message, file = export(workspace, spec())
    assert (status, message) == (0, "")
    here = hashlib.sha256(file.read_bytes()).hexdigest()
    shell = {"NPROC": "3", "NPY_ENABLE_CPU_FEATURES": "AVX2", "OPENBLAS_CORETYPE": "Sandybridge"}
    assert exported_as(workspace, spec(), env=shell) == here
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:1])
    try:
        assert exported_as(workspace, spec(), "--as-another-machine") == here
    finally:
        os.sched_setaffinity(0, cores)


@needs_another_cpu
def test_another_machine_makes_the_same_golden_results(workspace: Path) -> None:
    golden = {"seed": 0, "inputs": "", "bucket": {}, "rtol": 0.0, "atol": 0.0, "outputs": {}}
    function = spec(args=["f32[160,300]"], entry="pkg.model:applied", golden=golden)
    source = MODEL + "\n\ndef applied(x):\n    return jax.nn.softmax(x @ (x.T @ x)), TABLE[0]\n"
    (workspace / "pkg" / "model.py").write_text(source)
    exported_as(workspace, function, "--description", "f.json")
    words = (
        "action",
        "golden",
        "--spec",
        "f.spec",
        "--exported",
        "f.exported",
        "--description",
        "f.json",
        "--import-root",
        ".",
    )
    for number, more in enumerate(([], ["--as-another-machine"])):
        done = stagec(*words, "--output", f"{number}.safetensors", *more, cwd=workspace, env={})
        assert done.returncode == 0, done.stderr
    assert (workspace / "0.safetensors").read_bytes() == (workspace / "1.safetensors").read_bytes()


def test_the_spec_says_what_it_is_computed_on(workspace: Path) -> None:
    """Another instruction set there makes other numbers: without it they would be those of the machine."""
    assert spec().computed_on == COMPUTED_ON
    other = spec(computed_on={**COMPUTED_ON, "isa": "AVX"})
    assert exported_as(workspace, spec()) != exported_as(workspace, other)


def test_a_machine_that_cannot_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cpu_flags", lambda: frozenset(x86.ISA["AVX"].requires))
    with pytest.raises(StagecError) as caught, eager.computing(spec()):
        pass
    assert str(caught.value) == (
        "pkg/m.toml: functions.f: what it computes while it is traced cannot run here: this machine's CPU has no abm, "
        "avx2, bmi1, bmi2, f16c, fma, movbe\n"
        "  build it on a machine that has abm avx avx2 bmi1 bmi2 cx16 f16c fma lahf_lm movbe pclmulqdq popcnt sse4_1 "
        "sse4_2 ssse3 xsave"
    )


def test_a_build_of_jaxlib_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_builds, "rows", list)
    known_builds.known.cache_clear()
    with pytest.raises(StagecError) as caught, eager.computing(spec()):
        pass
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(
        "pkg/m.toml: functions.f: what it computes while it is traced would follow this machine: this build of "
        "libjax_common.so, of jaxlib "
    )
    assert lines[-1] == "  to add this one, in a checkout of stagec: python tools/known_builds.py add WHEEL"


def test_the_library_is_as_before_afterwards() -> None:
    from jaxlib import _jax  # noqa: F401

    code = machine_code.loaded("libjax_common.so")
    sites = [*cpuid.every_site(code)]
    assert len(sites) > len(cpuid.sites(code))
    patches = cpuid.patches(code, x86.ISA["AVX2"], everywhere=True)
    assert {patch.address for patch in patches} >= set(sites)
    with eager.computing(spec()), pytest.raises(machine_code.PatchError), machine_code.patched(patches):
        pass  # they are made already
    with machine_code.patched(patches):
        pass


SHOWN = """
import threading
from stagec.hardware import x86
from stagec.patches import another_cpu
another_cpu.show(x86.ISA["AVX2"])
import faulthandler
faulthandler.enable()  # a model may
import numpy as np
def look():
    features = np._core._multiarray_umath.__cpu_features__
    print(features["AVX2"], any(on for name, on in features.items() if "AVX512" in name))
thread = threading.Thread(target=look)
thread.start()
thread.join()
import os, ctypes, signal
child = os.fork()
if not child:
    ctypes.string_at(8)
print(signal.Signals(os.WTERMSIG(os.waitpid(child, 0)[1])).name)
"""


@needs_another_cpu
def test_a_process_that_sees_another_cpu() -> None:
    """Also its threads and forks; a fault of another kind ends it."""
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SHOWN], env=env, capture_output=True, text=True)
    assert done.stdout == "True False\nSIGSEGV\n", done.stderr
