"""Autotuning on a machine without a device: what it says, and what it does with results that a device gave.

Modules: `stagec_insight/commands/autotune.py`, `stagec_insight/autotuning.py`.
"""

import contextlib
import dataclasses
from pathlib import Path

import pytest

from stagec.backends.compilation import CannotCompile
from stagec.backends.gpu import local_gpus, nvidia
from stagec.core.builds.specs import GpuTarget
from stagec.hardware import catalog
from stagec.hardware.autotuning import read
from stagec_insight import autotuning
from tests.backends.test_cuda import results, with_plugin
from tests.building import checked, stagec

MANIFEST = """
[manifest]
name = "m"
version = "1"
[targets.h]
platform = "cuda"
device = "h200"
autotuning = "h.textproto"
[functions.f]
entry = "f.mlir"
targets = ["h"]
"""
MODULE = """
func.func public @main(%x: tensor<256x512xbf16>, %w: tensor<512x512xbf16>) -> tensor<256x512xbf16> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<256x512xbf16>, tensor<512x512xbf16>) -> tensor<256x512xbf16>
  return %0 : tensor<256x512xbf16>
}
"""


def target(name: str) -> GpuTarget:
    found = catalog.target(name)
    assert isinstance(found, GpuTarget)
    return found


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    (tmp_path / "m.toml").write_text(MANIFEST)
    (tmp_path / "f.mlir").write_text(MODULE)
    (tmp_path / "h.textproto").write_text(results())
    return tmp_path / "m.toml"


@with_plugin
def test_without_a_device_it_says_so_and_writes_nothing(manifest: Path) -> None:
    before = (manifest.parent / "h.textproto").read_bytes()
    done = stagec("autotune", manifest, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert done.stderr == (
        "CUDA finds no device here: FAILED_PRECONDITION: No visible GPU devices.\n"
        "  run this on a machine with an NVIDIA device and its driver\n"
    )
    assert (manifest.parent / "h.textproto").read_bytes() == before


def test_a_manifest_without_files_of_results(manifest: Path) -> None:
    manifest.write_text(MANIFEST.replace('autotuning = "h.textproto"', ""))
    done = stagec("autotune", manifest)
    assert (done.returncode, done.stderr) == (
        2,
        f"{manifest}: targets: no function has a target with a file of results\n"
        '  write in a target with platform = "cuda", for example autotuning = "h200.autotune.textproto"\n',
    )


def test_another_device_than_the_targets() -> None:
    h200 = target("h200")
    reported = {**h200.figures, "compute_capability": "9.0", "memory_bandwidth": 4_814_000_000_000}
    autotuning.refuse_another(reported, h200)
    with pytest.raises(CannotCompile) as caught:
        autotuning.refuse_another(reported, target("h100-sxm"))
    what = "this machine has another device: name is NVIDIA H200, not NVIDIA H100 80GB HBM3"
    what += ", l2_cache_size is 62914560, not 52428800"
    assert (str(caught.value), caught.value.key) == (what, "device")


def test_no_code_is_changed_where_kernels_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = []
    h200 = dataclasses.replace(target("h200"), examined="none")
    for module, name, value in (
        (local_gpus, "devices", lambda: [None]),
        (local_gpus, "described", lambda _: ""),
        (autotuning, "_loads", lambda _: True),
        (autotuning.descriptions, "properties", lambda _: h200.figures),
        (nvidia, "register_custom_calls", lambda: None),
        (nvidia, "scratch", contextlib.nullcontext),
        (autotuning.plugins, "compile_for", lambda *_, examined, **__: said.append(examined)),
    ):
        monkeypatch.setattr(module, name, value)
    assert autotuning.timed(None, h200, ()) == []  # type: ignore[arg-type]
    assert said == ["none"]


def test_results_of_several_functions_become_one_file(tmp_path: Path) -> None:
    other = results("gemm { algorithm: 7 }", hlo="(bf16[8,8]{1,0}) custom-call()")
    timed = [read(text.replace("4814 GB/s", "4800 GB/s")) for text in (results(), other, results())]
    text = autotuning.together(timed, target("h200"))
    assert text == autotuning.together(timed[::-1], target("h200"))
    found = read(text)
    assert [dict(one.chosen).keys() for one in found] == [{"gemm"}, {"triton"}]
    assert all("4814 GB/s" in one.device for one in found)
    assert found == sorted(read(results()) + read(other), key=lambda one: one.hlo)


@with_plugin
def test_explain_names_the_results(manifest: Path) -> None:
    old = manifest.with_name("old.toml")
    old.write_text(MANIFEST.replace("h.textproto", "old.textproto"))
    (manifest.parent / "old.textproto").write_text(results().replace("block_n: 32", "block_n: 64"))
    done = stagec("explain", "old.toml", "m.toml", cwd=manifest.parent)
    assert done.returncode == 1, done.stderr
    told = done.stdout.splitlines()
    assert told[0:2] == ["f.h", "  target autotuning: old.textproto -> h.textproto"]
    assert told[2].startswith("  target autotuning_results: ")
    assert len(told) == 3


def test_an_edit_of_the_file_is_in_the_slices_of_its_target_alone(manifest: Path) -> None:
    text = MANIFEST.replace('targets = ["h"]', 'targets = ["h", "h200"]')
    manifest.write_text(text)
    plans = []
    for block in (32, 64):
        (manifest.parent / "h.textproto").write_text(results().replace("block_n: 32", f"block_n: {block}"))
        plans.append(checked("action", "plan", manifest, "--json"))
    first, second = (plan.replace("block_n: 32", "").replace("block_n: 64", "") for plan in plans)
    assert plans[0] != plans[1]
    assert first == second
    assert plans[0].count("block_n: 32") == 1
