"""Pallas kernels, and what JAX lowers for a device: what an export writes beside the exported artifact."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest

import stagec
from stagec.building import by_device
from stagec.core.builds.specs import TargetSpec, to_json
from stagec.frontends.jax import kernels
from stagec.hardware import catalog
from stagec.pjrt import packages
from stagec.stages.exported import Exported
from tests.accelerators import kernels as model
from tests.building import ROOT, action_environment, stagec as run_stagec
from tests.frontends.workspace import spec

F32 = "f32[256,256]"
BF16 = "bf16[256,128]"


class Written:
    """What `stagec action export` wrote for a function of tests/accelerators/kernels.py, or said."""

    def __init__(
        self, folder: Path, function: str, args: Sequence[str], targets: Sequence[str], packages: str = "", **more: Any
    ) -> None:
        self.targets = {name: catalog.target(name) for name in targets}
        found = [target.jax_device() for target in self.targets.values()]
        devices = list({one["device_kind"]: one for one in found if one}.values())
        platforms = more.pop("platforms", None) or sorted({target.platform for target in self.targets.values()})
        entry = function if ":" in function else f"tests.accelerators.kernels:{function}"
        described = spec(entry=entry, args=args, platforms=platforms, devices=devices, **more)
        (folder / "f.spec").write_text(to_json(described))
        out = folder / "f.exported"
        words = ["--output", out, "--lowered", f"{out}.lowered", "--description", f"{out}.json"]
        path = os.pathsep.join([packages, action_environment()["PYTHONPATH"]])
        env = {"PYTHONPATH": path} if packages else None
        done = run_stagec(
            "action", "export", "--spec", folder / "f.spec", *words, "--import-root", ROOT, cwd=folder, env=env
        )
        self.said = done.stderr
        self.portable = out.read_bytes() if done.returncode == 0 else b""
        self.lowered = Path(f"{out}.lowered").read_bytes() if done.returncode == 0 else b""
        self.versions = json.loads(Path(f"{out}.json").read_text())["components"] if done.returncode == 0 else {}

    def module(self, target: str = "") -> bytes:
        """The module of the exported artifact, or of the one for a target."""
        own = by_device.read(self.lowered, self.targets[target]) if target else self.portable
        return Exported.deserialize(own or self.portable).mlir_module_serialized


def text(lowered: Any) -> str:
    return str(lowered.as_text())


def test_an_executable_is_made_of_the_newest_form(tmp_path: Path) -> None:
    written = Written(tmp_path, "matmul", [BF16, BF16], ["v5e:1x1", "v6e:1x1", "v5e:2x2"])
    assert written.said == ""
    assert written.module() != written.module("v5e:1x1") == written.module("v6e:1x1") == written.module("v5e:2x2")
    # One module: it is stored once.
    assert written.lowered.count(b"tpu_custom_call") == 1
    assert jax.export.deserialize(bytearray(written.portable)).platforms == ("tpu",)
    # The hint is in the newest form alone.
    traced = stagec.jit(model.matmul).trace(*[jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)] * 2)
    newest, portable = text(traced.lower(("tpu",))), traced.export(("tpu",)).mlir_module()
    assert newest.count("tpu_custom_call") == portable.count("tpu_custom_call") == 1
    assert _kernel(newest) != _kernel(portable)
    assert "jax-cuda13-plugin" not in str(written.versions)


def _kernel(module: str) -> str:
    return module.partition("backend_config = ")[2].partition('"}')[0]


@pytest.mark.parametrize("function", ["sign", "blocked"])
def test_a_kernel_may_ask_which_tpu_is_there(tmp_path: Path, function: str) -> None:
    written = Written(tmp_path, function, [F32], ["v5e:1x1", "v6e:1x1"])
    assert written.said == ""
    same = function == "sign"
    assert (written.module("v5e:1x1") == written.module("v6e:1x1")) == same
    portable = Written(tmp_path, function, [F32], [], platforms=["tpu"])
    assert "ValueError: Unsupported TPU device kind: cpu" in portable.said


def test_an_ordinary_function_is_lowered_once(tmp_path: Path) -> None:
    written = Written(tmp_path, "jax.numpy:tanh", [F32], ["h200", "v5e:1x1", "cpu-avx2"])
    assert (written.said, written.lowered) == ("", b"")
    assert written.portable


def test_a_kernel_of_triton(tmp_path: Path) -> None:
    written = Written(tmp_path, "triton", [F32, F32], ["h200", "b200"])
    assert (written.said, written.lowered) == ("", b"")  # JAX has one form of it, for both
    assert Exported.deserialize(written.portable).disabled_safety_checks == ("custom_call:__gpu$xla.gpu.triton",)
    refused = Written(tmp_path, "small", [F32], ["a100-40gb"])
    what = "for NVIDIA A100-SXM4-40GB: staging tests.accelerators.kernels:small raised NotImplementedError"
    assert refused.said.startswith(f"pkg/m.toml: functions.f: {what}\n")
    assert "NotImplementedError: cannot cast to `float8_e4m3fn`" in refused.said


pinned = pytest.mark.skipif(jax.__version_info__ > (0, 10, 2), reason="JAX's plugin is locked in the pinned version")


@pinned
def test_a_kernel_of_mosaic_needs_the_plugin(tmp_path: Path) -> None:
    written = Written(tmp_path, "mosaic", [F32, F32], ["h200"])
    what = "its Pallas kernels of Mosaic GPU are lowered with parts of JAX's plugin for NVIDIA devices"
    assert written.said == f'pkg/m.toml: functions.f.plugins: {what}\n  write plugins = ["cuda"]\n'
    if packages.folder("jax_cuda13_plugin") is None:
        written = Written(tmp_path, "mosaic", [F32, F32], ["h200"], plugins=["cuda"])
        write = "add jax-cuda13-plugin to the packages that trace the function"
        assert written.said == f"pkg/m.toml: functions.f.plugins: jax-cuda13-plugin is not installed\n  {write}\n"


@pinned
def test_without_what_jax_imports_for_mosaic(tmp_path: Path) -> None:
    """JAX says that another jaxlib is to be installed."""
    (tmp_path / "absl").mkdir()
    (tmp_path / "absl" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'absl'\", name='absl')")
    (tmp_path / "jax_cuda13_plugin").mkdir()
    (tmp_path / "jax_cuda13_plugin" / "__init__.py").touch()
    for function in ("mosaic", "default"):
        written = Written(tmp_path, function, [F32, F32], ["h200"], str(tmp_path))
        what = "its Pallas kernels for NVIDIA devices are lowered with packages that are not there"
        assert written.said == f'pkg/m.toml: functions.f.plugins: {what}\n  write plugins = ["cuda"]\n'
        written = Written(tmp_path, function, [F32, F32], ["h200"], str(tmp_path), plugins=["cuda"])
        what = "Mosaic GPU cannot be imported: No module named 'absl'"
        write = "add absl-py to the lock of the CUDA plugin (cuda_lock)"
        assert written.said == f"pkg/m.toml: functions.f.plugins: {what}\n  {write}\n"


def test_what_jax_is_told_is_what_the_hardware_has() -> None:
    def told(target: str, **changes: Any) -> Any:
        found: TargetSpec = dataclasses.replace(catalog.target(target), **changes)
        described = found.jax_device()
        return described and kernels.Device.from_spec(described)

    assert told("cpu-avx2") is None
    assert told("v5e:2x2") == kernels.Device("tpu", "TPU v5 lite", 1)
    assert told("v4:2x2x1") == kernels.Device("tpu", "TPU v4", 2)
    assert told("h200") == kernels.Device("gpu", "NVIDIA H200", None, 132, "9.0")
    assert told("b300") == kernels.Device("gpu", "NVIDIA B300", None, 158, "10.3")


def test_jax_is_as_before(tmp_path: Path) -> None:
    before = jax.local_devices, jax.extend.backend.get_default_device
    with kernels.on(kernels.Device("gpu", "NVIDIA H200", None, 132, "9.0")), kernels.newest():
        assert jax.extend.backend.get_default_device().device_kind == "NVIDIA H200"
        assert [device.compute_capability for device in jax.local_devices(backend="gpu")] == ["9.0"]
        assert jax.local_devices() == before[0]()
        assert jax.config.jax_export_ignore_forward_compatibility
    assert (jax.local_devices, jax.extend.backend.get_default_device) == before
    assert not jax.config.jax_export_ignore_forward_compatibility


def test_a_kernel_of_mosaic_that_jax_no_longer_lowers() -> None:
    """Since 0.11.2; before, it is as any other one."""
    traced = stagec.jit(model.by_pallas_call).trace(*[jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 2)
    if jax.__version_info__ < (0, 11, 2):
        pytest.importorskip("jax_cuda13_plugin")
        assert traced.export(("cuda",)).platforms == ("cuda",)
        return
    for stage in (traced.lower, traced.export):
        with pytest.raises(
            NotImplementedError, match=r"of Mosaic GPU: write jax\.experimental\.pallas\.mosaic_gpu\.kernel"
        ):
            stage(("cuda",))
