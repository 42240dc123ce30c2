"""The kernels of executables for NVIDIA devices, through the commands: figures, limits, baselines, PTX and SASS.

Modules: `audit/kernels.py`, `cli/inspect.py`, `cli/actions/optimize.py`.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.backends.deviceless import installed
from tests.building import build_jax_cache, build_model, checked, stagec

pytestmark = installed(
    jax_cuda13_pjrt="jax_plugins.xla_cuda13",
    jax_cuda13_plugin="jax_cuda13_plugin",
    nvidia_cuda_nvcc="nvidia.cu13.bin",
    nvidia_cuda_nvdisasm="nvidia.cu13.bin",
)
MANIFEST = """
[manifest]
name = "m"
version = "1"
[targets.h200]
platform = "cuda"
device = "h200"
compiler_options = { xla_gpu_enable_triton_gemm = true } # for a product that is a kernel of XLA's
[functions.layer]
entry = "model:layer"
args = ["f32[1024,1024]"]
targets = ["h200"]
"""
MODEL = "import jax.numpy as jnp\ndef layer(x):\n    return jnp.tanh(x @ x).sum(0)\n"
SPILLS = """
import jax.numpy as jnp


def layer(x):
    y = x @ x
    return sum(jnp.roll(y, i) * jnp.exp(y * i) / (1 + jnp.abs(jnp.roll(y, 7 * i))) for i in range(60))
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("bundle"), MANIFEST, MODEL)


@pytest.fixture(scope="module")
def spilling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("spilling"), MANIFEST, SPILLS)


def test_inspect_shows_each_kernel(bundle: Path) -> None:
    stem = bundle.with_name("m.layer.h200")
    text = checked("inspect", f"{stem}.xla")
    assert re.search(
        r"\n  kernels    \d kernels: at most \d+ registers and [\d.]+ KiB of shared memory, no spills\n", text
    )
    assert re.search(
        r"\n    gemm_fusion_dot\w* +1 +[\d,]+ x \d+ +\d+ +[\d,]+ +0 +\d+% \([\w ]+\) +[\d.]+ us +\w+\n", text
    )
    rows = json.loads(checked("inspect", "--json", f"{stem}.xla"))["kernels"]
    assert rows == json.loads(Path(f"{stem}.inventory.json").read_text())["kernels"]
    (line,) = re.findall(r"\d kernels: .*", checked("inspect", bundle))
    assert line in text


def test_ptx_and_sass_of_a_kernel(bundle: Path, tmp_path: Path) -> None:
    stem, ptx = bundle.with_name("m.layer.h200"), tmp_path / "m.layer.h200.ptx"
    exported = bundle.with_name("m.layer.exported")
    checked("action", "optimize", "--spec", f"{stem}.spec", "--exported", exported, "--ptx", ptx)
    rows = json.loads(checked("inspect", "--json", f"{stem}.xla"))["kernels"]
    assembled = {row["name"]: row for row in json.loads(checked("inspect", "--json", ptx))["kernels"]}
    # The locked ptxas makes of the same PTX what XLA has in the executable.
    keys = ("registers", "spills", "stack")
    assert {row["name"]: [row[key] for key in keys] for row in rows} == {
        name: [row[key] for key in keys] for name, row in assembled.items()
    }
    name = rows[0]["name"]
    assert f".visible .entry {name}(" in checked("inspect", ptx, "--ptx", name)
    for file in (ptx, f"{stem}.xla"):
        assert re.search(r"/\*0000\*/ +\S", checked("inspect", file, "--sass", name))


def test_what_has_no_such_kernel(bundle: Path) -> None:
    xla = bundle.with_name("m.layer.h200.xla")
    for words, what in [
        ((xla, "--sass", "other"), r'it has no code of a kernel "other"; it has gemm_fusion_dot\w*(?:, \w+)*'),
        ((xla, "--ptx", "other"), "an executable does not keep PTX: build its output group ptx, and inspect that file"),
        ((bundle, "--sass", "other"), "it has no kernels to show: PTX and SASS are those of .*"),
    ]:
        done = stagec("inspect", *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch(f"{words[0]}: {what}\n", done.stderr)


def test_a_damaged_executable(bundle: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "m.layer.h200.xla"
    shutil.copy(bundle.with_name("m.layer.h200.json"), tmp_path)
    damaged.write_bytes(bundle.with_name("m.layer.h200.xla").read_bytes()[:-100])
    done = stagec("inspect", damaged)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{damaged}: m.layer.h200.json beside it describes another executable\n")


def test_diff_and_explain_tell_what_became_of_kernels(bundle: Path, spilling: Path) -> None:
    told = checked_change("diff", bundle, spilling)
    assert re.search(r"\n      kernels\.\w*fusion\w*\.?\w*: ", told)
    explained = checked_change("explain", bundle, spilling)
    assert re.search(r"\nso these kernels differ\n  layer\.h200 \w+: registers ", explained)
    same = checked("explain", bundle, bundle)
    assert same.endswith("are made from the same components\n")


def checked_change(command: str, first: Path, second: Path) -> str:
    done = stagec(command, first, second)
    assert (done.returncode, done.stderr) == (1, "")
    return done.stdout


def test_spills_over_a_limit_or_a_baseline(bundle: Path, spilling: Path, tmp_path: Path) -> None:
    stem = spilling.with_name("m.layer.h200")
    spec = json.loads(Path(f"{stem}.spec").read_text())
    spec["limits"] |= {"key": "functions.layer.limits.h200", "spills": 0, "registers": 16, "shared_memory": 1 << 20}
    (tmp_path / "spec").write_text(json.dumps(spec))
    words = ("--exported", spilling.with_name("m.layer.exported"), "--output", tmp_path / "x")
    done = stagec("action", "compile", "--spec", tmp_path / "spec", *words)
    assert done.returncode == 2
    told = r"m.toml: functions.layer.limits.h200.{}: layer for h200: {} is over the limit of {}\n"
    told += r"  the most:\n +{} +kernel +\w+"
    assert re.search(told.format("registers", r"registers of a thread \d+", "16", r"\d+"), done.stderr)
    size = r"[\d.,]+ (?:bytes|KiB)"
    assert re.search(told.format("spills", f"spilled registers of all kernels {size}", "0 bytes", size), done.stderr)
    assert "shared_memory" not in done.stderr

    baseline = tmp_path / "m.baseline.json"
    checked("baseline", bundle, baseline, "--update")
    assert '"spills": 0' in baseline.read_text()
    assert stagec("baseline", bundle, baseline).returncode == 0
    failed = stagec("baseline", spilling, baseline).stdout
    assert re.search(r"\n  spills +0 bytes +" + size + r" +\+[\d,]+ +\+0 bytes  FAILED\n", failed)


@pytest.mark.parametrize("size", [3, 12], ids=["products", "a convolution"])
def test_a_convolution_that_nobody_has_timed_becomes_products_or_is_told(tmp_path: Path, size: int) -> None:
    """For a bundle, and for JAX's cache: JAX would have timed it on the device."""
    given = f'args = ["f32[2,16,16,4]", "f32[{size},{size},4,4]"]\njax_cache = true'
    manifest = MANIFEST.replace('args = ["f32[1024,1024]"]', given)
    dims = 'dimension_numbers=("NHWC", "HWIO", "NHWC")'
    model = (
        f"from jax import lax\ndef layer(x, w):\n    return lax.conv_general_dilated(x, w, (1, 1), 'SAME', {dims})\n"
    )
    build_model(tmp_path, manifest, model)
    build_jax_cache("m.toml", tmp_path, tmp_path)
    stem = tmp_path / "m.layer"
    spec, output = ["--spec", f"{stem}.h200.spec"], ["--output", tmp_path / "x.xla"]
    exported = ["--exported", f"{stem}.exported", "--lowered", f"{stem}.lowered"]
    key = ["--key", f"{stem}.h200.jax.key", "--entry", tmp_path / "x.json"]
    told = (
        "m.toml: functions.layer: warning: a convolution that nobody has timed takes cuDNN's first engine: "
        "one took 15 ms so, timed 0.06\n  time it on such a device: docs/accelerators.md#autotuning\n"
    )
    for words in (["compile", *exported], ["jax-compile", *key]):
        done = stagec("action", *words, *spec, *output, cwd=tmp_path)
        assert done.stderr == (told if size == 12 else "")
