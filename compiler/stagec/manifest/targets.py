"""The targets that functions name: tables of the manifest, short names that are checked in, TPU topologies."""

import contextlib
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

from stagec.errors import Problem, StagecError
from stagec.hardware import catalog
from stagec.hardware.cuda_devices import Device, num_devices, read
from stagec.hardware.tpu_topologies import parse_topology
from stagec.manifest.models import CpuTarget, CudaTarget, Document, Target, TpuTarget
from stagec.specs import CpuTarget as CpuSpec
from stagec.specs import CudaTarget as CudaSpec
from stagec.specs import TargetSpec
from stagec.specs import TpuTarget as TpuSpec


def resolve(document: Document, file: str, folder: Path) -> tuple[dict[str, TargetSpec], list[Problem]]:
    """Describe the hardware of every target of a manifest in full.

    file: what messages call the manifest. folder: where it is; files of devices are relative to it.
    Returns targets, by what `targets` of a function says, and what is wrong with tables and files of devices.
    Names that do not exist are left out: they are reported where functions name them.
    """
    found: dict[str, TargetSpec] = {}
    problems: list[Problem] = []
    for name, table in document.targets.items():
        try:
            found[name] = _of_table(name, table, file, folder)
        except StagecError as error:
            problems += [
                problem if problem.file else Problem(file, f"targets.{name}.{problem.key}", problem.what, problem.write)
                for problem in error.problems
            ]
    for name in (name for function in document.functions.values() for name in function.targets):
        if name not in document.targets:
            with contextlib.suppress(StagecError):
                found[name] = catalog.target(name)
    return found, problems


def _of_table(name: str, table: Target, file: str, folder: Path) -> TargetSpec:
    """The target of a table; a problem without a file is one of the table's own keys."""
    options = table.compiler_options
    match table:
        case CpuTarget():
            return CpuSpec(name, table.isa, table.parallelism, options)
        case TpuTarget():
            topology = parse_topology(table.topology, catalog.generations(), table.chips_per_host, table.slices)
            figures = asdict(topology.generation)
            return TpuSpec(name, str(topology), table.chips_per_host, table.slices, figures, options)
        case CudaTarget():
            num_devices(table.topology)
            device = _device(table.device, file, folder)
            return CudaSpec(name, table.device, table.topology, asdict(device), options)


def device_files(manifest: str | Path) -> Iterator[str]:
    """Yield the files of devices that a manifest names, relative to its folder; none where it cannot be read.

    Whoever plans a manifest anew when a file changes asks for them, also when the plan fails.
    """
    try:
        tables = tomllib.loads(Path(manifest).read_text("utf-8")).get("targets", {})
    except (OSError, ValueError):
        return
    for table in tables.values() if isinstance(tables, dict) else ():
        device: Any = table.get("device") if isinstance(table, dict) else None
        if isinstance(device, str) and device.endswith(".toml") and _is_below(device):
            yield device


def _is_below(file: str) -> bool:
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts


def _device(name: str, file: str, folder: Path) -> Device:
    """The device of a short name, or of a file."""
    if not name.endswith(".toml"):
        return catalog.device(name)
    if not _is_below(name):
        what = f'"{name}" is not below the manifest\'s folder'
        raise StagecError(Problem("", "device", what, "move the file there"))
    shown = str(PurePosixPath(file).parent / name)
    try:
        description = tomllib.loads((folder / name).read_text("utf-8"))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        write = "stagec describe-device writes such a file for the device in front of it"
        raise StagecError(Problem("", "device", f"cannot read {shown}: {reason}", write)) from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise StagecError(Problem(shown, "", f"not TOML: {error}", "see https://toml.io for the syntax")) from None
    return read(description, shown)
