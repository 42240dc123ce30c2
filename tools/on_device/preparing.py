"""Build, on a machine without the device, what tools/on_device runs on one: a folder that is small enough to carry."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from stagec.core.messages.errors import show
from stagec.hardware import cuda
from tests import building
from tests.building import ROOT

HERE = Path(__file__).parent
DECIDED = ROOT / "tests" / "accelerators" / "decided.toml"
FUNCTIONS = ("product", "stream", "layer", "convolved", "gradient")
"""Those that are timed, by the steps or by `stagec autotune`."""
KERNELS = ("triton", "mosaic")
PROGRAMS = ("paged_decode",)
"""Programs of the extension `rehearse` that need JAX and NumPy alone."""
MANIFEST = "on_device.toml"


def prepare(
    folder: Path,
    devices: Sequence[str],
    size: int = 4096,
    golden: Sequence[str] | None = None,
    kernels: Sequence[str] = KERNELS,
    programs: Sequence[str] = PROGRAMS,
    compile_: Callable[..., object] | None = None,
) -> int:
    """Build everything into `folder`, which must not be there: a folder for each device; return how many bytes it has.

    What can't be built is left out, and `lost.json` says why.

    devices: names of `stagec targets`, or files as `stagec describe-device` writes them. size: N of the functions that
    are timed. golden: functions of tests/accelerators/decided.toml to compare with JAX; None: all for one device.
    kernels: Pallas kernels of kernels.toml. programs: those of the extension `rehearse` to rehearse and build.
    compile_: as of `tests.building.build`.
    """
    folder.mkdir(parents=True)
    for device in devices:
        _prepare(folder / Path(device).stem, device, size, golden, kernels, programs, compile_)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _prepare(
    folder: Path,
    device: str,
    size: int,
    golden: Sequence[str] | None,
    kernels: Sequence[str],
    programs: Sequence[str],
    compile_: Callable[..., object] | None,
) -> None:
    lost: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        source, out = Path(temporary, "source"), Path(temporary, "out")
        source.mkdir()
        out.mkdir()
        (source / "device.toml").write_text(_description(device))
        (source / "device.autotune.textproto").write_text("")
        chosen = [table for table in _tables(HERE / "kernels.toml") if _name(table) in kernels]
        (source / MANIFEST).write_text("\n".join([_sized(HERE / MANIFEST, size), *chosen, *_decided(golden)]))
        bundle = building.build(MANIFEST, out, source, [ROOT], compile_=compile_, lost=lost)
        cached: dict[str, str] = {}
        cache = building.build_jax_cache(MANIFEST, Path(temporary, "jax"), source, [ROOT], compile_, cached)
        lost |= {f"{name} for JAX's cache": why for name, why in cached.items()}
        folder.mkdir()
        for name in programs:
            try:
                _rehearse(name, device, Path(temporary, name), folder / "programs" / name)
            except (AssertionError, subprocess.TimeoutExpired) as failure:
                lost[f"the rehearsal of {name}"] = str(failure).strip()
        shutil.copy(bundle, folder)
        shutil.copytree(cache, folder / "jax_cache")
        shutil.copytree(source, folder / "source")
        for path in out.iterdir():  # what `stagec autotune` and `stagec action compile` take
            if any(path.name.startswith(f"on_device.{name}.") for name in FUNCTIONS) and path.suffix != ".xla":
                shutil.copy(path, folder)
    (folder / "inputs.json").write_text(json.dumps(_inputs()))
    told = {name.removeprefix("on_device."): why.splitlines()[-1] if why else "" for name, why in lost.items()}
    (folder / "lost.json").write_text(json.dumps(told, indent=1))


def _rehearse(name: str, device: str, scratch: Path, folder: Path) -> None:
    """Rehearse a program on the virtual device, and build what it compiled: `folder` gets both."""
    from compiler.extensions.rehearse.tests import processes

    assert not device.endswith(".toml"), "a rehearsal takes a device of stagec targets, and no file"
    scratch.mkdir()
    program = Path(processes.__file__).with_name("programs") / f"{name}.py"
    shutil.copy(program, scratch)
    words = ("-m", "stagec", "rehearse", "--device", device, "--", sys.executable, program.name)
    done = processes.run(*words, cwd=scratch)
    assert done.returncode == 0, done.stdout + done.stderr
    cache, _ = processes.built(scratch / "rehearsal", device, scratch)
    shutil.copytree(cache, folder / "jax_cache")
    shutil.copy(program, folder)


def _description(device: str) -> str:
    if device.endswith(".toml"):
        return Path(device).read_text()
    known = cuda.device(device)
    return "".join(f"{name} = {show(value)}\n" for name, value in vars(known).items() if value)


def _sized(manifest: Path, size: int) -> str:
    return re.sub(r"\bN\b(?=[,\]])", str(size), manifest.read_text())


def _decided(names: Sequence[str] | None) -> list[str]:
    """Return the tables of functions for one device, for this one."""
    chosen = [table for table in _tables(DECIDED) if '"h200"' in table and (names is None or _name(table) in names)]
    return [re.sub(r"^targets = .*$", 'targets = ["device"]', table, flags=re.MULTILINE) for table in chosen]


def _tables(manifest: Path) -> list[str]:
    return re.split(r"\n(?=\[functions\.)", manifest.read_text())[1:]


def _name(table: str) -> str:
    return table.partition("]")[0].rpartition(".")[2]


def _inputs() -> dict[str, object]:
    """Return what a rule writes for `stagec autotune`, of the functions that are timed."""
    exports = {
        f"on_device.{name}": {
            "spec": f"on_device.{name}.spec",
            "exported": f"on_device.{name}.exported",
            "description": f"on_device.{name}.exported.json",
            "lowered": f"on_device.{name}.lowered",
        }
        for name in FUNCTIONS
    }
    executables = {f"{name}.device": {"export": name, "spec": f"{name}.device.spec"} for name in exports}
    return {
        "kind": "inputs",
        "format": 1,
        "name": "on_device",
        "version": "1.0.0",
        "exports": exports,
        "executables": executables,
    }
