"""A manifest for CPUs, TPUs and NVIDIA devices: one build on a machine without either, one bundle."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagec
from stagec.core.builds import components
from stagec.pjrt import accelerators, packages
from tests.building import COMPILER, ROOT, build, checked, stagec as explain


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Bazel built, or a build here where the plugins are installed."""
    if "ACCELERATORS_BUNDLE" in os.environ:
        return Path(os.environ["ACCELERATORS_BUNDLE"])
    missing = [name for name in ("libtpu", "jax_plugins.xla_cuda13", "nvidia.cu13") if packages.folder(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    return build("tests/accelerators/accelerators.toml", tmp_path_factory.mktemp("accelerators"))


@pytest.fixture(scope="module")
def index(bundle: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(checked("inspect", "--json", bundle))
    return told


def test_each_target_is_of_its_platform_and_device(index: dict[str, Any]) -> None:
    told = {name: (target["platform"], target["device_kind"]) for name, target in index["targets"].items()}
    assert told == {
        "cpu-avx2": ("cpu", "haswell"),
        "cpu-avx512": ("cpu", "skylake-avx512"),
        "v5e-1x1": ("tpu", "TPU v5 lite"),
        "v5e-2x2": ("tpu", "TPU v5 lite"),
        "v6e-1x1": ("tpu", "TPU v6 lite"),
        "v6e-16x16": ("tpu", "TPU v6 lite"),
        "h100-sxm": ("cuda", "NVIDIA H100 80GB HBM3"),
        "h200": ("cuda", "NVIDIA H200"),
        "four-h200": ("cuda", "NVIDIA H200"),
        "b200": ("cuda", "NVIDIA B200"),
    }


def test_each_function_is_there_for_each_of_its_targets(index: dict[str, Any]) -> None:
    functions = index["functions"]
    targets = {name: [one["target"] for one in function["executables"]] for name, function in functions.items()}
    assert targets == {
        "dense": ["cpu-avx2", "cpu-avx512", "h100-sxm", "h200", "v5e-2x2", "v6e-16x16"],
        "sharded": ["cpu-avx2", "four-h200", "v5e-2x2"],
        "matmul": ["v5e-1x1"],
        "blocked": ["v5e-1x1", "v6e-1x1"],
        "triton": ["h200"],
        "mosaic": ["b200", "h200"],
        "factorized": ["h100-sxm", "v5e-1x1"],
    }
    assert functions["dense"]["platforms"] == ["cpu", "cuda", "tpu"]


def test_solvers_are_those_that_jax_guarantees(index: dict[str, Any]) -> None:
    """In the artifact; the compilers took them."""
    calls = index["functions"]["factorized"]["custom_calls"]
    assert set(calls.values()) == {"guaranteed"}
    assert {"cusolver_gesvdj_ffi", "cusolver_potrf_ffi", "Eigh", "LuDecomposition", "Qr"} <= set(calls)


KERNELS = {"matmul": "tpu_custom_call", "blocked": "tpu_custom_call", "mosaic": "mosaic_gpu_v2"}


def test_kernels_are_compiled_without_a_device(index: dict[str, Any], bundle: Path) -> None:
    functions = index["functions"]
    with zipfile.ZipFile(bundle) as archive:
        for name, call in {**KERNELS, "triton": "__gpu$xla.gpu.triton"}.items():
            assert list(functions[name]["custom_calls"]) == [call]
            for executable in functions[name]["executables"]:
                assert list(json.loads(archive.read(executable["description"]))["custom_calls"]) == [call]
        # They are made of what JAX lowers for the device, and not of the exported artifact.
        modules = [archive.read(f"blocked.{target}.stablehlo.mlirbc") for target in ("v5e-1x1", "v6e-1x1")]
        plugin = json.loads(archive.read("mosaic.exported.json"))["components"]["environment jax-cuda13-plugin"]
    assert modules[0] != modules[1]
    assert plugin["value"] == "0.10.2"


def test_a_description_tells_which_device_is_where_in_the_mesh(bundle: Path) -> None:
    with zipfile.ZipFile(bundle) as archive:
        tpu, cuda = (
            json.loads(archive.read(f"sharded.{target}.json"))["device_assignment"]
            for target in ("v5e-2x2", "four-h200")
        )
    assert (tpu["axis_names"], tpu["axis_sizes"]) == (["data", "model"], [2, 2])
    # A ring: neighbours in the mesh are neighbours on the torus.
    assert (tpu["device_ids"], tpu["coords"]) == ([0, 1, 3, 2], ["0,0,0,0", "1,0,0,0", "1,1,0,0", "0,1,0,0"])
    assert cuda == {**tpu, "device_ids": [0, 1, 2, 3], "coords": []}


def test_the_functions_run_where_there_is_only_a_cpu(bundle: Path) -> None:
    rng = np.random.default_rng(0)
    w, b, x = (rng.standard_normal(shape, np.float32) for shape in ((128, 64), (64,), (8, 128)))
    result = np.asarray(stagec.load(bundle)["dense"]({"w": w, "b": b}, x))
    np.testing.assert_allclose(result, np.tanh(x @ w + b), rtol=1e-4, atol=1e-5)


def test_what_a_machine_without_accelerators_says(bundle: Path) -> None:
    here = {name: accelerators.refusal(name) for name in ("cuda", "tpu")}
    if "" in here.values():
        pytest.skip("this machine has an accelerator")
    found = {c.offer.target: (c.code, c.reason) for c in stagec.load(bundle).select("dense").candidates}
    assert found["v5e-2x2"] == ("platform", here["tpu"])
    assert found["h200"] == ("platform", here["cuda"])
    chosen = "cpu-avx512" if found["cpu-avx512"][0] != "cpu-feature" else "cpu-avx2"
    assert found[chosen] == ("chosen", "runs as it is")
    with pytest.raises(stagec.LoadError) as refusal:
        stagec.load(bundle, "four-h200")
    assert refusal.value.code == "platform"


PLUGIN = """
import pathlib, sys
from stagec.pjrt import accelerators
import stagec
accelerators._DEVICES = pathlib.Path(sys.argv[1])
try:
    stagec.devices("cuda")
except stagec.LoadError as error:
    print(error.code, error)
"""


def test_the_plugin_itself_says_that_there_is_no_device(tmp_path: Path) -> None:
    """As on a machine whose driver is broken: the device is there, for the kernel."""
    if packages.folder("jax_plugins.xla_cuda13") is None or accelerators.refusal("cuda") == "":
        pytest.skip("no plugin, or a device")
    (tmp_path / "nvidia0").touch()
    environment = {"PYTHONPATH": os.pathsep.join([str(COMPILER), *filter(None, sys.path)])}
    command = [sys.executable, "-c", PLUGIN, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("platform jax-cuda13-pjrt finds no NVIDIA device it can use: ")


@pytest.mark.skipif("ACCELERATORS_EXPLAIN" not in os.environ, reason="a Bazel target")
def test_the_bundle_is_made_from_the_current_inputs(bundle: Path) -> None:
    # A manifest is traced by the program itself, with packages that actions have, and not with the plugins.
    manifest = ["tests/accelerators/accelerators.toml", "--import-root", ROOT]
    for given in ([bundle], manifest):
        done = subprocess.run([os.environ["ACCELERATORS_EXPLAIN"], *given], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
        assert "are made from the same components" in done.stdout


@pytest.mark.skipif("ACCELERATORS_EXPLAIN" not in os.environ, reason="a Bazel target")
def test_programs_as_text(bundle: Path) -> None:
    for target in ("v5e-2x2", "four-h200"):
        stem = f"{bundle.stem}.sharded.{target}"
        before, after = ((bundle.parent / f"{stem}.hlo_{when}.txt").read_text() for when in ("before", "after"))
        assert "all-reduce" not in before
        assert "sdy.mesh" in before
        assert re.search("all-reduce|reduce-scatter", after)
    for function in ("dense", "sharded"):
        assert (bundle.parent / f"{bundle.stem}.{function}.jaxpr.txt").read_text().startswith("{ lambda ; ")


@pytest.mark.parametrize(
    ("member", "package"), [("dense.v5e-2x2.batch8.json", "libtpu"), ("dense.h200.batch8.json", "jax-cuda13-pjrt")]
)
def test_another_plugin_is_told(bundle: Path, tmp_path: Path, member: str, package: str) -> None:
    with zipfile.ZipFile(bundle) as archive:
        description = json.loads(archive.read(member))
    version = description["components"][package]["value"]
    (tmp_path / "new.json").write_text(json.dumps(description))
    description["components"] |= components.table({package: "0.0.1"})
    (tmp_path / "old.json").write_text(json.dumps(description))
    done = explain("explain", tmp_path / "old.json", tmp_path / "new.json")
    assert (done.returncode, done.stdout, done.stderr) == (1, f"{package}: 0.0.1 -> {version}\n", "")
