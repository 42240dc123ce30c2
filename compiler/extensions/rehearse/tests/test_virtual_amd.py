"""Rehearsals on AMD devices that are not there: XLA's own plugin for ROCm, on the virtual driver.

Modules: `stagec_rehearse/driver.py`, `stagec_rehearse/observing.py`, `stagec_rehearse/standing_in.py`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from compiler.extensions.rehearse.tests.processes import (
    ALL,
    EXTENSION,
    PROGRAMS,
    built,
    found_again,
    hits,
    run,
    specified,
)
from stagec.hardware import rocm
from stagec_rehearse import driver, programs
from tests.backends.deviceless import installed
from tests.building import COMPILER, build_jax_cache

pytestmark = installed(jax_rocm7_pjrt="jax_plugins.xla_rocm7", jax_rocm7_plugin="jax_rocm7_plugin")
TRAIN = """
import jax, jax.numpy as jnp

@jax.jit
def step(w, x):  # a convolution with a bias is MIOpen's
    def loss(w):
        y = jax.lax.conv_general_dilated(x, w["k"], (1, 1), "SAME") + w["b"][None, :, None, None]
        return (y**2).mean()
    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), value

@jax.jit
def solved(x):
    return jnp.linalg.cholesky(x @ x.T + jnp.eye(len(x)))

w = {"k": jax.random.normal(jax.random.key(0), (8, 3, 3, 3)), "b": jnp.zeros(8)}
for _ in range(2):
    w, loss = step(w, jnp.ones((4, 3, 8, 8)))
(device,) = jax.devices()
print(device, device.device_kind, device.client.platform_version.split(), "loss", float(loss))
print(solved(jnp.ones((3, 3))).sum())
"""
MI300X = Path(__file__).with_name("mi300x")
"""A program and its rehearsal, of which Bazel builds a folder for JAX's cache."""
PLAIN = (MI300X / "program.py").read_text()
FSDP = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

rows = NamedSharding(jax.make_mesh((8,), ("d",)), P("d", None))
w, x = (jax.device_put(jnp.ones(shape), rows) for shape in ((1024, 64), (64, 1024)))
step = jax.jit(lambda w, x: jnp.einsum("bi,ij->bj", x, w, out_sharding=rows).sum())
print(len(w.sharding.device_set), float(step(w, x)))
"""
MANIFEST = """
[manifest]
name = "m"
version = "1"
jax_cache = true

[functions.layer]
entry = "model:layer"
args = ["f32[8,64]", "f32[64,16]"]
targets = ["mi300x"]
"""
MODEL = """
import jax.numpy as jnp

def layer(x, w):
    return jnp.tanh(x @ w)
"""
CALLED = """
import sys; sys.path.insert(0, ".")
import jax, numpy as np
from model import layer
print(jax.jit(layer)(np.ones((8, 64), np.float32), np.ones((64, 16), np.float32)).shape)
"""
MEMORY = """
import jax, jax.numpy as jnp, sys
x = jnp.zeros((1 << 15, int(sys.argv[1]) << 13), jnp.float32)  # GiB
print(x.nbytes >> 30, "GiB of", jax.block_until_ready(x).devices().pop().memory_stats()["bytes_limit"] >> 30)
"""


def rehearse(program: str, *words: str, cwd: Path, arguments: tuple[str, ...] = (), **variables: str) -> str:
    (cwd / "program.py").write_text(program)
    command = ["--", sys.executable, "program.py", *arguments]
    done = run("-m", "stagec", "rehearse", "--device", "mi300x", *words, *command, cwd=cwd, **variables)
    assert done.stderr.startswith("stagec: a virtual AMD Instinct MI300X; no kernel runs, and "), done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("virtual")
    told = rehearse(TRAIN, cwd=folder)
    assert "rocm:0 AMD Instinct MI300X ['PJRT', 'C', 'API', 'rocm', " in told
    assert "loss 0.0\n0.0\n" in told
    assert "to its end" in told
    return folder


def test_what_a_virtual_device_lacks_is_compiled_and_named(rehearsed: Path) -> None:
    listed = programs.read(str(rehearsed / "rehearsal" / programs.NAME))
    lacking = {program.name: (program.not_run, program.runs) for program in listed.programs if program.not_run}
    assert lacking == {"jit_step": ("__cudnn$convForward", 2), "jit_solved": ("hipsolver_potrf_ffi", 1)}
    assert not [program for program in listed.programs if program.error]
    assert {"jax-rocm7-plugin", "jax-rocm7-pjrt"} <= {*listed.versions}


def test_a_program_finds_all_that_it_compiles(rehearsed: Path, tmp_path: Path) -> None:
    cache, count = built(rehearsed / "rehearsal", "mi300x", tmp_path)
    words = ("--compare", str(rehearsed / "rehearsal" / programs.NAME), "--jax-cache", str(cache))
    told = rehearse(TRAIN, *words, cwd=tmp_path)
    assert f"found in JAX's cache:\n  {count} of {count} compilations" in told
    assert count >= 10
    done = specified(rehearsed / "rehearsal", "mi355x", [], tmp_path)
    assert "it was rehearsed on mi300x, and the target is mi355x" in done.stderr


@pytest.mark.skipif(not ALL, reason="it takes a minute: //tests:release runs it")
def test_a_program_that_xla_runs_as_a_graph(tmp_path: Path) -> None:
    result = found_again("equinox_loop", "mi300x", "mi300x", PROGRAMS["equinox_loop"], tmp_path)
    assert result.found == result.compiled >= result.built >= 20, result.said
    assert result.status == 0, result.said


def hits_on_a_device(cache: Path, cwd: Path) -> tuple[int, int]:
    """Run program.py on a virtual device without an observer; return how much JAX found, and was to compile."""
    (cwd / "lib").mkdir()
    driver.install(rocm.device("mi300x"), cwd / "lib")
    load = f"import sys; sys.path.append({str(EXTENSION)!r})\nfrom stagec_rehearse import driver; driver.load('rocm')\n"
    (cwd / "sitecustomize.py").write_text(load)
    path = os.pathsep.join([str(cwd), str(COMPILER), *filter(None, sys.path)])
    libraries = str(cwd / "lib")
    counts = hits("program.py", cache, cwd, JAX_PLATFORMS="rocm", PYTHONPATH=path, LD_LIBRARY_PATH=libraries)
    return counts["cache_hits"], counts["compile_requests_use_cache"]


def test_jax_finds_all_that_was_built(tmp_path: Path) -> None:
    """The keys are those that JAX makes on the device."""
    rehearse(PLAIN, cwd=tmp_path)
    cache, _ = built(tmp_path / "rehearsal", "mi300x", tmp_path)
    hit, asked = hits_on_a_device(cache, tmp_path)
    assert hit == asked > 3


@pytest.mark.skipif("STAGEC_CACHE" not in os.environ, reason="Bazel builds it")
def test_jax_finds_all_that_bazel_built(tmp_path: Path) -> None:
    """The rehearsal is checked in: another one now has the same keys."""
    rehearse(PLAIN, cwd=tmp_path)
    written = {path.name for path in (tmp_path / "rehearsal" / "programs").iterdir()}
    assert written == {path.name for path in (MI300X / "programs").iterdir()}
    hit, asked = hits_on_a_device(Path(os.environ["STAGEC_CACHE"]).absolute(), tmp_path)
    assert hit == asked == len(written)


NEWER = """
import sys
from stagec import cli
from stagec.backends.gpu import amd
amd._built_with = lambda: ""  # the plugin does not say it from 0.11.1 on
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_plugin_whose_keys_have_the_rocm_of_the_machine(tmp_path: Path) -> None:
    keys = sorted((MI300X / "programs").iterdir())
    assert specified(MI300X, "mi300x", keys, tmp_path).returncode == 0
    words = ("--spec", "spec.json", "--key", keys[0], "--output", "a", "--entry", "b")
    done = run("-c", NEWER, "action", "jax-compile", *words, cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert done.returncode == 2
    assert "jax_cache: JAX 0.10.2 looks programs up by the ROCm where they run" in done.stderr
    assert "build with jax, jaxlib and jax-rocm7-pjrt 0.11.0 or older" in done.stderr


def test_jax_finds_a_function_of_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(MANIFEST)
    (tmp_path / "model.py").write_text(MODEL)
    cache = build_jax_cache("m.toml", tmp_path / "out", tmp_path)
    (tmp_path / "program.py").write_text(CALLED)
    assert hits_on_a_device(cache, tmp_path) == (1, 1)


def test_eight_devices(tmp_path: Path) -> None:
    told = rehearse(FSDP, "--devices", "8", cwd=tmp_path)
    assert "8 0.0\n" in told
    assert "compiled, and not run, because a virtual device lacks what it calls" in told
    listed = programs.read(str(tmp_path / "rehearsal" / programs.NAME))
    (step,) = (program for program in listed.programs if program.not_run)
    assert (step.devices, step.runs) == (8, 1)
    assert step.not_run.startswith("all-")


def test_memory_is_that_of_the_device(tmp_path: Path) -> None:
    """XLA's own allocator says what does not fit: the device has 192 GiB, of which JAX may take 95 %."""
    words = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    assert "180 GiB of 182\n" in rehearse(MEMORY, cwd=tmp_path, arguments=("180",), **words)
    told = rehearse(MEMORY, cwd=tmp_path, arguments=("184",), **words)
    assert "RESOURCE_EXHAUSTED: Out of memory" in told
    assert "until it failed with status 1" in told


def test_values_that_the_cpu_computes(tmp_path: Path) -> None:
    said = rehearse(PLAIN, "--values", "cpu", cwd=tmp_path).partition("\nrehearsed on")[0]
    plain = run("program.py", cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert float(said) == pytest.approx(float(plain.stdout))


def test_memory_is_the_owners_whoever_frees_it(tmp_path: Path) -> None:
    driver.install(rocm.device("mi300x"), tmp_path)
    hip = ctypes.CDLL(str(tmp_path / "stagec_virtual_driver.so"))
    at, available, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()

    def taken(device: int) -> int:
        hip.hipSetDevice(device)
        assert hip.hipMemGetInfo(ctypes.byref(available), ctypes.byref(total)) == 0
        return total.value - available.value

    hip.hipSetDevice(1)
    assert hip.hipMalloc(ctypes.byref(at), ctypes.c_size_t(1 << 30)) == 0
    assert (taken(1), taken(0)) == (1 << 30, 0)
    assert hip.hipFree(at) == 0  # while device 0 is the current one
    assert (taken(0), taken(1)) == (0, 0)


def test_more_devices_than_a_driver_has(tmp_path: Path) -> None:
    words = ("rehearse", "--device", "mi300x", "--devices", "65", "--", sys.executable, "program.py")
    done = run("-m", "stagec", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "a virtual driver has 64 devices at most, and --devices says 65" in done.stderr
    assert "write --processes for those of other machines" in done.stderr


def test_a_stream_says_what_it_is(tmp_path: Path) -> None:
    """XLA of jaxlib 0.12 asks, to keep one for later."""
    driver.install(rocm.device("mi300x"), tmp_path)
    hip = ctypes.CDLL(str(tmp_path / "stagec_virtual_driver.so"))
    stream, flags, priority = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_int(7)
    assert hip.hipStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
    assert hip.hipStreamGetFlags(stream, ctypes.byref(flags)) == 0
    assert hip.hipStreamGetPriority(stream, ctypes.byref(priority)) == 0
    assert (flags.value, priority.value) == (1, 0)
