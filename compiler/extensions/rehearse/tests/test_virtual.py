"""Rehearsals on NVIDIA devices that are not there: XLA's own plugin for CUDA, on the virtual driver.

Modules: `pjrt/abi.py`, `stagec_rehearse/driver.py`, `stagec_rehearse/observing.py`, `stagec_rehearse/standing_in.py`,
`stagec_rehearse/values.py`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jaxlib
import pytest

from compiler.extensions.rehearse.tests.processes import (
    ALL,
    EXTENSION,
    PROGRAMS,
    built,
    found_again,
    hits,
    run,
    stagec,
)
from stagec.core.builds.platforms import PLATFORMS
from stagec.core.data import elf, gpu_executables, riegeli, wire
from stagec.hardware import cuda
from stagec.patches import descriptors
from stagec.pjrt import packages
from stagec_rehearse import driver, programs
from tests import building
from tests.backends.deviceless import installed
from tests.building import COMPILER
from tests.bundles import edited, edited_descriptions, whole_index, with_index

pytestmark = installed(jax_cuda13_pjrt="jax_plugins.xla_cuda13", nvidia_cuda_nvcc="nvidia.cu13.bin")
TRAIN = """
import jax, jax.numpy as jnp
import optax
from flax import nnx

class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.conv(x)).mean((1, 2)))

model = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

@nnx.jit
def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss

for _ in range(2):
    loss = step(model, optimizer, jnp.ones((4, 8, 8, 3)))
print(jax.devices()[0].device_kind, len(jax.devices()), "loss", float(loss))
"""
FSDP = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((8,), ("d",))
rows = NamedSharding(mesh, P("d", None))
w = jax.device_put(jnp.ones((1024, 64)), rows)
x = jax.device_put(jnp.ones((64, 1024)), rows)

@jax.jit
def step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.einsum("bi,ij->bj", x, w, out_sharding=rows) ** 2))(w)
    return w - 0.1 * grad, loss

for _ in range(2):
    w, loss = step(w, x)
print(len(w.sharding.device_set), float(loss))
"""
MEMORY = """
import jax, jax.numpy as jnp, sys
step = jax.jit(lambda x: (x @ x).sum())
x = jnp.zeros((1 << 15, int(sys.argv[1]) << 13), jnp.float32)  # GiB
print(x.nbytes >> 30, "GiB", jax.devices()[0].memory_stats()["bytes_limit"] >> 30)
"""


VALUES = """
import jax, jax.numpy as jnp
import numpy as np

@jax.jit
def step(key, x):
    jax.debug.print("at {}", x[0, 0])
    key, now = jax.random.split(key)
    return key, x + 1, jax.random.normal(now, (3,))

@jax.jit
def solved(x):
    return jnp.linalg.cholesky(x @ x.T + jnp.eye(len(x)))

key, x, steps = jax.random.key(0), jnp.zeros((4, 4), jnp.bfloat16), 0
while steps < 5 and (steps == 0 or float(x[1, 1]) == steps):  # a program that looks at numbers
    key, x, noise = step(key, x)
    jax.effects_barrier()
    steps += 1
print("steps", steps)
print(np.asarray(x).tolist(), np.asarray(noise).tolist(), bool((noise > -9).all()))
large = jax.device_put(np.arange(1 << 20, dtype=np.float32))
print(float(jnp.copy(large)[-1]), np.asarray(solved(jnp.ones((3, 3)))).round(3).tolist())
"""

MEASURED = """
import json, pathlib, sys
import stagec
from stagec.pjrt import accelerators

# This machine has no device but the driver's.
accelerators._DEVICES = pathlib.Path(sys.argv[1])
told = []
for path in sys.argv[2:]:
    with stagec.load(path, policy="measured") as bundle:
        told.append({row.offer.target: row.reason for row in bundle.select("f").candidates}["h100-sxm"])
print(json.dumps(told))
"""


def rehearse(program: str, *words: str, cwd: Path, arguments: tuple[str, ...] = (), **variables: str) -> str:
    (cwd / "program.py").write_text(program)
    command = ["--", sys.executable, "program.py", *arguments]
    done = run("-m", "stagec", "rehearse", "--device", "h100-sxm", *words, *command, cwd=cwd, **variables)
    assert done.stderr.startswith("stagec: a virtual NVIDIA H100 80GB HBM3; no kernel runs, and "), done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("virtual")
    told = rehearse(TRAIN, cwd=folder)
    assert "NVIDIA H100 80GB HBM3 1 loss 0.0\n" in told
    assert "to its end" in told
    return folder


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "many"] if ALL else ["blackjax_nuts"])
def test_a_program_finds_all_that_it_compiles(name: str, tmp_path: Path) -> None:
    """Also where XLA runs a program as a graph, with its loops and copies."""
    if name == "blackjax_nuts" and not importlib.util.find_spec("blackjax"):
        pytest.skip("there is no BlackJAX")
    result = found_again(name, "h100-sxm", "h100-sxm", PROGRAMS[name], tmp_path)
    assert result.found == result.compiled >= result.built >= 20, result.said
    assert result.status == 0, result.said


def test_a_program_of_several_processes(tmp_path: Path) -> None:
    """Each has its devices, and JAX joins them."""
    result = found_again("data_parallel", "h100-sxm", "h100-sxm", 2, tmp_path, "--processes", "2")
    assert "rehearsed on 2 virtual h100-sxm, 2 processes: 4 programs" in result.said
    assert {"0 4 2 0.0", "1 4 2 0.0"} <= {*result.said.splitlines()}
    assert result.found == result.compiled == 8, result.said


def test_values_that_the_cpu_computes(tmp_path: Path) -> None:
    """The program sees the numbers that it sees on a CPU, compiles the same as without, and calls back once."""
    told = rehearse(VALUES, "--values", "cpu", cwd=tmp_path)
    said = told.partition("\nrehearsed on")[0]
    plain = run("program.py", cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert plain.returncode == 0, plain.stderr
    assert said.splitlines() == plain.stdout.splitlines()
    assert "steps 5" in said
    assert "not computed" not in told
    first = programs.read(str(tmp_path / "rehearsal" / programs.NAME))
    told = rehearse(VALUES, cwd=tmp_path)
    assert "steps 1\n" in told
    assert {each.file for each in programs.read(str(tmp_path / "rehearsal" / programs.NAME)).programs} == {
        each.file for each in first.programs
    }
    words = (
        "rehearse",
        "--device",
        "h100-sxm",
        "--devices",
        "2",
        "--values",
        "cpu",
        "--",
        sys.executable,
        "program.py",
    )
    done = stagec(*words, cwd=tmp_path)
    assert (done.returncode, "--values cpu is for one GPU" in done.stderr) == (2, True)


def test_what_a_virtual_device_lacks_is_compiled_and_named(rehearsed: Path) -> None:
    listed = programs.read(str(rehearsed / "rehearsal" / programs.NAME))
    (step,) = (program for program in listed.programs if program.name == "jit_step")
    assert step.runs == 2
    assert step.not_run.startswith("__cudnn$conv")
    assert not [program for program in listed.programs if program.error]


def test_jax_finds_all_that_was_built(rehearsed: Path, tmp_path: Path) -> None:
    """Under XLA's plugin, on the virtual driver: what was compiled without a device is what it asks for."""
    cache, _ = built(rehearsed / "rehearsal", "h100-sxm", tmp_path)
    (tmp_path / "lib").mkdir()
    driver.install(cuda.device("h100-sxm"), tmp_path / "lib")
    # The program without its convolution, which the virtual driver cannot run.
    text = TRAIN.replace("for _ in range(2):", "for _ in ():").replace('"loss", float(loss)', "")
    (tmp_path / "program.py").write_text(text)
    variables = {"JAX_PLATFORMS": "cuda", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    counts = hits("program.py", cache, tmp_path, LD_LIBRARY_PATH=str(tmp_path / "lib"), **variables)
    assert counts["cache_hits"] == counts["compile_requests_use_cache"] > 10


def test_eight_devices(tmp_path: Path) -> None:
    told = rehearse(FSDP, "--devices", "8", cwd=tmp_path)
    assert "8 0.0\n" in told
    assert "jit_step (program.py:16) calls all-" in told
    listed = programs.read(str(tmp_path / "rehearsal" / programs.NAME))
    (step,) = (program for program in listed.programs if program.name == "jit_step")
    assert (step.devices, step.runs) == (8, 2)
    assert "d" in step.shardings["0"]


def test_the_driver_comes_before_the_wheels_of_nvidia(tmp_path: Path) -> None:
    """As `pip install jax[cuda13]` has them: a module for CUDA loads the runtime beside it when JAX is imported."""
    site = tmp_path / "site-packages"
    plugin = importlib.util.find_spec("jax_cuda13_plugin")
    assert plugin
    assert plugin.origin
    shutil.copytree(Path(plugin.origin).parent, site / "jax_cuda13_plugin")
    library = site / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    library.parent.mkdir(parents=True)
    subprocess.run(["cc", "-shared", "-x", "c", "/dev/null", "-o", library], check=True)
    path = os.pathsep.join([str(site), str(COMPILER), str(EXTENSION), *filter(None, sys.path)])
    program = "import jax_cuda13_plugin, jax; print(jax_cuda13_plugin.__file__, jax.devices()[0].device_kind)"
    told = rehearse(program, cwd=tmp_path, PYTHONPATH=path)
    assert f"{site / 'jax_cuda13_plugin' / '__init__.py'} NVIDIA H100 80GB HBM3\n" in told


def test_memory_is_that_of_the_device_and_costs_none_of_this_machine(tmp_path: Path) -> None:
    """XLA's own allocator says what does not fit: the device has 79.1 GiB, of which JAX may take 95 %."""
    words = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    assert "70 GiB 75\n" in rehearse(MEMORY, cwd=tmp_path, arguments=("70",), **words)
    told = rehearse(MEMORY, cwd=tmp_path, arguments=("81",), **words)
    assert "RESOURCE_EXHAUSTED: Out of memory" in told
    assert "until it failed with status 1" in told


def test_a_function_that_the_driver_lacks_is_said(tmp_path: Path) -> None:
    """XLA gives this number for one. That of jaxlib 0.12 changes a node of a graph by a function that 0.10 did not."""
    driver.install(cuda.device("h100-sxm"), tmp_path)
    cuda_driver = ctypes.CDLL(str(tmp_path / "stagec_virtual_driver.so"))
    text = ctypes.c_char_p()
    assert cuda_driver.cuGetErrorString(303, ctypes.byref(text)) == 0
    assert text.value == b"stagec's virtual driver lacks this function"
    assert cuda_driver.cuGraphExecNodeSetParams


def test_xla_says_first_whether_its_runtime_fits_what_an_older_jaxlib_made(tmp_path: Path) -> None:
    """Its versions of CUDA, cuDNN and CUB must be as new as an executable says. XLA loads it without asking that."""
    (tmp_path / "m.toml").write_text(
        '[manifest]\nname = "m"\nversion = "1.0.0"\n'
        '[functions.f]\nentry = "model:f"\nargs = ["f32[4]"]\ntargets = ["h100-sxm"]\n'
    )
    (tmp_path / "model.py").write_text("def f(x):\n    return x + 1\n")
    plugins = [entry for entry in sys.path if entry.endswith("site-packages")]
    alone = functools.partial(building.stagec, env={"PYTHONPATH": os.pathsep.join([*plugins, str(COMPILER)])})
    own = building.build("m.toml", tmp_path, tmp_path, compile_=alone)
    older = edited_descriptions(own, tmp_path / "older.aot", "f", lambda row: row["versions"].update(jaxlib="0.10.1"))

    def newer(record: bytes) -> bytes | None:
        return record.replace(b"\x0613.0.0", b"\x0613.9.0") if b"\n\x04CUDA\x1a" in record else None

    def needing(members: dict[str, bytes]) -> None:
        (name,) = (name for name in members if name.endswith(".xla"))
        _, body = wire.delimited(members[name])
        head = members[name][: -len(body)]
        body = wire.edit(body, gpu_executables.EXECUTABLE, lambda file: riegeli.edit(file, lambda _, row: newer(row)))
        members[name] = head + body
        index = whole_index(members)
        members.update(with_index(index, members))

    plugin = PLATFORMS["cuda"].plugin
    assert plugin
    path = packages.library(plugin)
    assert path
    with elf.opened(path) as library:
        field = descriptors.read(library)["xla.gpu.GpuExecutableProto"]["executable_abi_version"]
    assert (field.number,) == gpu_executables.ABI_VERSION
    needs = edited(older, tmp_path / "needs.aot", needing)
    for name in ("lib", "dev"):
        (tmp_path / name).mkdir()
    driver.install(cuda.device("h100-sxm"), tmp_path / "lib")
    (tmp_path / "dev" / "nvidia0").touch()
    bundles = [own, older, needs]
    done = run("-c", MEASURED, tmp_path / "dev", *bundles, cwd=tmp_path, LD_LIBRARY_PATH=str(tmp_path / "lib"))
    assert done.returncode == 0, done.stderr
    runs, nobody, refused = json.loads(done.stdout)
    assert runs == "runs as it is"
    made = f"it was compiled with jaxlib 0.10.1, here is {jaxlib.__version__}; "
    kind = cuda.device("h100-sxm").name
    what = f"nobody has measured what jaxlib 0.10.1 made with jaxlib {jaxlib.__version__} on {kind}"
    assert nobody == made + what
    assert refused.startswith(f"{made}XLA refuses it: CUDA toolkit version mismatch. Running with version 13.0.0, but ")
