"""Build, on a machine without the device, what tools/on_device runs on one: a folder that is small enough to carry."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from stagec.core.messages.errors import show
from stagec.hardware import cuda
from tests import building
from tests.building import ROOT

HERE = Path(__file__).parent
DECIDED = ROOT / "tests" / "accelerators" / "decided.toml"
FUNCTIONS, CACHED = ("product", "stream", "layer"), ("product", "layer")
"""Those that are timed, and those that have entries in JAX's compilation cache."""
KERNELS = ("triton", "mosaic")
MANIFEST = "on_device.toml"


def prepare(
    folder: Path,
    device: str,
    size: int = 4096,
    golden: Sequence[str] | None = None,
    kernels: Sequence[str] = KERNELS,
    compile_: Callable[..., object] | None = None,
) -> int:
    """Build everything into `folder`, which must not be there; return how many bytes it has.

    device: a name of `stagec targets`, or a file as `stagec describe-device` writes it. size: N of the functions that
    are timed. golden: functions of tests/accelerators/decided.toml to compare with JAX; None: all for one device.
    kernels: Pallas kernels of kernels.toml. compile_: as of `tests.building.build`.
    """
    with tempfile.TemporaryDirectory() as temporary:
        source, out = Path(temporary, "source"), Path(temporary, "out")
        source.mkdir()
        out.mkdir()
        (source / "device.toml").write_text(_description(device))
        (source / "device.autotune.textproto").write_text("")
        chosen = [table for table in _tables(HERE / "kernels.toml") if _name(table) in kernels]
        (source / MANIFEST).write_text("\n".join([_sized(HERE / MANIFEST, size), *chosen, *_decided(golden)]))
        bundle = building.build(MANIFEST, out, source, [ROOT], compile_=compile_)
        cache = building.build_jax_cache(MANIFEST, Path(temporary, "jax"), source, [ROOT], compile_)
        folder.mkdir(parents=True)
        shutil.copy(bundle, folder)
        shutil.copytree(cache, folder / "jax_cache")
        shutil.copytree(source, folder / "source")
        for path in out.iterdir():  # what `stagec autotune` and `stagec action compile` take
            if any(path.name.startswith(f"on_device.{name}.") for name in FUNCTIONS) and path.suffix != ".xla":
                shutil.copy(path, folder)
    (folder / "inputs.json").write_text(json.dumps(_inputs()))
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


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
