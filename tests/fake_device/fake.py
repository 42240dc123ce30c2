"""The fake device (fake_device.cc): put it where stagec looks for an accelerator, and run stagec there."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from stagec.backends.cuda import nvidia
from stagec.core.builds.platforms import PLATFORMS
from stagec.hardware import cuda_devices
from stagec.pjrt import compatibility
from tests import building
from tests.building import COMPILER, ROOT

HERE = Path(__file__).parent
KIND = "Fake device of stagec's tests"
NAME = "stagec's fake device for tests"
_TOOLKIT = {
    "nvidia/cu13": ("bin/ptxas", "bin/nvlink", "nvvm/libdevice/libdevice.10.bc"),
    "nvidia/cu13/lib": ("libcublas.so.13", "libcublasLt.so.13"),
    "nvidia/cudnn/lib": ("libcudnn.so.9",),
}
"""What stagec looks for of CUDA's, by folder: empty files."""


def missing() -> str:
    """Return why this machine cannot have a fake device; "" where it can."""
    if importlib.util.find_spec("xla_plugins") is None:
        return "xla-cpu-pjrt is not installed"
    return "" if shutil.which("g++") else "there is no C++ compiler"


@functools.cache
def _cpu_plugin() -> Path:
    spec = importlib.util.find_spec("xla_plugins.xla_cpu_pjrt")
    assert spec
    assert spec.origin
    return Path(spec.origin).parent


def install(folder: Path, platform: str = "cuda") -> dict[str, str]:
    """Put a fake device into a folder, as the wheels and the driver of a platform are on a machine that has one.

    Returns the environment in which Python finds it there; variables of fake_device.cc say how it behaves.
    """
    plugin = PLATFORMS[platform].plugin
    assert plugin is not None
    library = folder / "stagec_fake_device.so"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    headers = ["-isystem", str(_cpu_plugin() / "include")]
    subprocess.run(["g++", *flags, *headers, str(HERE / "fake_device.cc"), "-o", str(library), "-ldl"], check=True)
    package = folder / plugin.package.replace(".", "/")
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / plugin.library).symlink_to(library)
    versions = {plugin.distribution: compatibility.version() if not plugin.versions else _version(plugin.versions)}
    if platform == "cuda":
        versions |= {"nvidia-cuda-nvcc": "13.0", "nvidia-nvvm": "13.0"}
        for where, names in _TOOLKIT.items():
            for name in names:
                (folder / where / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / where / name).touch(0o755)
        (folder / "description.textproto").write_text(description())
        shutil.copy(HERE / "jax_plugin.py", package / "__init__.py")
    for name, version in versions.items():
        metadata = folder / f"{name.replace('-', '_')}-{version}.post0+fake.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}.post0+fake\nSummary: {NAME}\n")
    shutil.copy(HERE / "sitecustomize.py", folder)
    for node in {"cuda": ["dev/nvidia0"], "tpu": ["dev/accel0"]}[platform]:
        (folder / node).parent.mkdir(parents=True)
        (folder / node).touch()
    vendor, devices = PLATFORMS[platform].pci
    if vendor:
        slot = folder / "pci" / "0000:00:05.0"
        slot.mkdir(parents=True)
        (slot / "vendor").write_text(vendor)
        (slot / "device").write_text(min(devices))
    foreign = ("JAX_", "PYTHON", "STAGEC_FAKE_")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(foreign)},
        "PYTHONPATH": os.pathsep.join([str(folder), str(COMPILER), str(ROOT), *filter(None, sys.path)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "STAGEC_FAKE_CPU_PLUGIN": str(_cpu_plugin() / "xla_cpu_pjrt.so"),
        "STAGEC_FAKE_PLATFORM": platform,
        "STAGEC_FAKE_DESCRIPTION": str(folder / "description.textproto"),
    }


def _version(versions: Mapping[str, str]) -> str:
    return versions[compatibility.version()]


def description() -> str:
    """Return the text that XLA would print for the device of device.toml: a field a line."""
    device = cuda_devices.read(tomllib.loads((HERE / "device.toml").read_text()))
    text = nvidia.target_config(device, (9, 12, 0), "13.0.0", "3.0.0")
    return re.sub(r"(?<=[{\w]) (?=\w+:|\})", "\n", text)


def run(
    *words: str | Path, environment: Mapping[str, str], cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python there, with variables of fake_device.cc: failure="lost" is STAGEC_FAKE_FAILURE=lost."""
    more = {f"STAGEC_FAKE_{name.upper()}": value for name, value in variables.items()}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=cwd, env={**environment, **more}, capture_output=True, text=True, timeout=300)


def stagec(
    *words: str | Path, environment: Mapping[str, str], cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of stagec there, as `run` does."""
    return run("-m", "stagec", *words, environment=environment, cwd=cwd, **variables)


def build(folder: Path, environment: Mapping[str, str]) -> Path:
    """Build the bundle of fake.toml into a folder with stagec's own commands, and compiling.py; return its path."""

    def compile_(*words: str | Path, cwd: Path) -> None:
        done = run("-m", "tests.fake_device.compiling", *words, environment=environment, cwd=cwd, devices="2")
        assert done.returncode == 0, done.stderr

    return building.build("tests/fake_device/fake.toml", folder, compile_=compile_)
