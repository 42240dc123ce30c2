"""The fake device (fake_device.cc): put it where stagec looks for an accelerator, and run stagec there."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stagec.backends import plugins
from stagec.core.builds.platforms import PLATFORMS
from stagec.hardware import autotuning, gpu_devices
from stagec_rehearse import driver
from tests import building
from tests.building import COMPILER, ROOT

HERE = Path(__file__).parent
KIND = "Fake device of stagec's tests"
NAME = "stagec's fake device for tests"
_LIBRARIES = ("libcublas.so.13", "libcublasLt.so.13", "libcudnn.so.9")
"""Those whose kernels XLA times beside its own."""
_TOOLKIT = {
    "nvidia/cu13": ("bin/ptxas", "bin/nvlink", "nvvm/libdevice/libdevice.10.bc"),
    "nvidia/cu13/lib": _LIBRARIES[:2],
    "nvidia/cudnn/lib": _LIBRARIES[2:],
}
"""What stagec looks for of CUDA's, by folder: empty files."""
_CALL = """
import json, sys
import stagec
from stagec.checking import trials
path, *names = sys.argv[1:]
rows = {}
for name in names:
    try:
        bundle = stagec.load(path, policy="executable_only")
        function = trials.find(bundle, name)
        for load in function._of[""].loads():
            load()
        rows[name] = {"loaded": True}
        (description,) = function.descriptions
        device = stagec.devices(description.target.platform)[0]
        arguments = trials.random_arguments(description, 0, function.weights)
        args, kwargs = trials.structured(function, description, arguments)
        results = description.out_tree.flatten(function(*args, **kwargs))
        rows[name] |= {"told": dict(description.memory_analysis), "taken": device.memory_stats()}
        rows[name]["shapes"] = [result.shape for result in results]
    except (stagec.LoadError, stagec.CallError, stagec.RunError) as error:
        rows.setdefault(name, {})["error"] = [type(error).__name__, error.code, str(error)]
print(json.dumps(rows))
"""


def missing() -> str:
    """Return why this machine cannot have a fake device; "" where it can."""
    if importlib.util.find_spec("xla_plugins") is None:
        return "xla-cpu-pjrt is not installed"
    if importlib.util.find_spec("jax_cuda13_plugin") is not None:
        return "the plugin for CUDA is installed: its functions would be registered with the fake"
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
    versions = {plugin.distribution: plugins.wanted(plugin)}
    if platform == "cuda":
        versions |= {"nvidia-cuda-nvcc": "13.0", "nvidia-nvvm": "13.0"}
        for where, names in _TOOLKIT.items():
            for name in names:
                (folder / where / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / where / name).touch(0o755)
        shutil.copy(HERE / "jax_plugin.py", package / "__init__.py")
    for name, version in versions.items():
        metadata = folder / f"{name.replace('-', '_')}-{version}.post0+fake.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}.post0+fake\nSummary: {NAME}\n")
    return {
        **_found(folder, platform),
        "STAGEC_FAKE_CPU_PLUGIN": str(_cpu_plugin() / "xla_cpu_pjrt.so"),
        "STAGEC_FAKE_PLATFORM": platform,
        "STAGEC_FAKE_DESCRIPTION": str(HERE / "description.textproto"),
    }


def install_driver(folder: Path, device: gpu_devices.Device | None = None) -> dict[str, str]:
    """Put the virtual driver of rehearsals into a folder. XLA's plugin is the real one, of installed packages.

    device: None for the one of device.toml, which has little memory. Returns the environment, as `install` does;
    variables of the driver say how it behaves.
    """
    (folder / "lib").mkdir()
    device = device or gpu_devices.read("cuda", tomllib.loads((HERE / "device.toml").read_text()))
    driver.install(device, folder / "lib")
    plugin = folder / "jax_plugins" / "stagec_fake_driver" / "__init__.py"
    plugin.parent.mkdir(parents=True)
    shutil.copy(HERE / "jax_driver.py", plugin)
    # XLA takes what memory it needs, so that its own numbers say how much that was.
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    # JAX looks for the libraries that its plugin may need.
    memory |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    platform = "rocm" if isinstance(device, gpu_devices.AmdDevice) else "cuda"
    libraries = {"LD_LIBRARY_PATH": str(folder / "lib"), "STAGEC_FAKE_DRIVER": platform}
    return {**_found(folder, platform), **memory, **libraries}


def _found(folder: Path, platform: str) -> dict[str, str]:
    """Make the files by which stagec knows that a device is here; return the environment in which it looks there."""
    shutil.copy(HERE / "sitecustomize.py", folder)
    node = folder / {"cuda": "dev/nvidia0", "rocm": "dev/kfd", "tpu": "dev/accel0"}[platform]
    node.parent.mkdir()
    node.touch()
    vendor, devices = PLATFORMS[platform].pci
    if vendor:
        slot = folder / "pci" / "0000:00:05.0"
        slot.mkdir(parents=True)
        (slot / "vendor").write_text(vendor)
        (slot / "device").write_text(min(devices))
    foreign = ("JAX_", "PYTHON", "STAGEC_FAKE_", "STAGEC_VIRTUAL_", "XLA_")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(foreign)},
        "PYTHONPATH": os.pathsep.join([str(folder), str(COMPILER), str(ROOT), *filter(None, sys.path)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def run(
    *words: str | Path, environment: Mapping[str, str], cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python there, with variables of what was installed: failure="lost" is STAGEC_FAKE_FAILURE=lost."""
    more = {
        f"STAGEC_{which}_{name.upper()}": value for name, value in variables.items() for which in ("FAKE", "VIRTUAL")
    }
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=cwd, env={**environment, **more}, capture_output=True, text=True, timeout=900)


def stagec(
    *words: str | Path, environment: Mapping[str, str], cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of stagec there, as `run` does."""
    return run("-m", "stagec", *words, environment=environment, cwd=cwd, **variables)


def called(bundle: Path, *names: str, device: dict[str, str], **variables: str) -> dict[str, Any]:
    """Load functions of a bundle there, and call each; return what became of it, by name.

    device: the environment, as `install_driver` returns it. variables: as of `run`.
    """
    done = run("-c", _CALL, bundle, *names, environment=device, **variables)
    assert done.returncode == 0, done.stderr
    rows: dict[str, Any] = json.loads(done.stdout)
    return rows


def build(folder: Path, environment: Mapping[str, str]) -> Path:
    """Build the bundle of fake.toml into a folder with stagec's own commands, and compiling.py; return its path."""
    return building.build("tests/fake_device/fake.toml", folder, compile_=compiler(environment))


def timed(folder: Path) -> Path:
    """Write what the fake device says that XLA timed on it, into a folder: one kernel. `autotuning` names the file."""
    device = gpu_devices.read("cuda", tomllib.loads((HERE / "device.toml").read_text()))
    path = folder / "timed"
    words = f'device: "{autotuning._properties(device)}, DNN version: 9.12.0" hlo: "dot" result {{ gemm {{ }} }}'
    path.write_text(f"version: 3\nresults {{ {words} version: 45 }}\n")
    return path


def compiler(environment: Mapping[str, str]) -> Callable[..., None]:
    """Return what compiles for two fake devices, as `tests.building.build` takes it."""

    def compile_(*words: str | Path, cwd: Path) -> None:
        done = stagec(*words, environment=environment, cwd=cwd, devices="2", compiler="1")
        assert done.returncode == 0, done.stderr

    return compile_
