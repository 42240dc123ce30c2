"""The targets that functions name: tables of the manifest, short names that are checked in, TPU topologies."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

from stagec.core import compiler_options, reading
from stagec.core.errors import Problem, StagecError
from stagec.core.specs import CpuTarget as CpuSpec
from stagec.core.specs import CudaTarget as CudaSpec
from stagec.core.specs import TargetSpec
from stagec.core.specs import TpuTarget as TpuSpec
from stagec.hardware import autotuning, catalog
from stagec.hardware.cuda_devices import Device, num_devices, read
from stagec.hardware.tpu_topologies import parse_topology
from stagec.manifest import toml
from stagec.manifest.models import CpuTarget, CudaTarget, Document, Target, TpuTarget
from stagec.manifest.values import file_pattern


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
    if invalid := list(compiler_options.problems(options)):
        raise StagecError(*(Problem("", f"compiler_options.{one.name}", str(one), one.write) for one in invalid))
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
            results = _autotuning(table.autotuning, device, file, folder)
            return CudaSpec(name, table.device, table.topology, asdict(device), options, table.autotuning, results)


def target_files(manifest: str | Path) -> Iterator[str]:
    """Yield the files that a manifest's targets name, relative to its folder; none where it cannot be read.

    They are descriptions of devices, and results of autotuning.

    Whoever plans a manifest anew when a file changes asks for them, also when the plan fails.
    """
    try:
        tables = toml.parse(reading.whole(manifest, toml.LARGEST).decode()).get("targets", {})
    except (OSError, ValueError):
        return
    for table in tables.values() if isinstance(tables, dict) else ():
        for key, ending in (("device", "toml"), ("autotuning", "textproto")):
            named: Any = table.get(key) if isinstance(table, dict) else None
            if isinstance(named, str) and re.fullmatch(file_pattern(ending), named):
                yield named


def _device(name: str, file: str, folder: Path) -> Device:
    """The device of a short name, or of a file."""
    if not name.endswith(".toml"):
        return catalog.device(name)
    write = "stagec describe-device writes such a file for the device in front of it"
    shown, content = _read("device", name, file, folder, write)
    try:
        description = toml.parse(content.decode("utf-8"))
    except ValueError as error:  # not UTF-8, or not TOML
        raise StagecError(Problem(shown, "", f"not TOML: {error}", "see https://toml.io for the syntax")) from None
    return read(description, shown)


def _autotuning(name: str, device: Device, file: str, folder: Path) -> str:
    """The results of autotuning in a file, which are of `device`; "" without one."""
    if not name:
        return ""
    write = "begin with an empty file; stagec autotune writes it on a machine with the device"
    shown, content = _read("autotuning", name, file, folder, write)
    try:
        text = content.decode("ascii")
    except ValueError as error:
        write = "save it in protobuf's text format, as XLA writes it into a file whose name ends so"
        raise StagecError(Problem(shown, "", f"not text: {error}", write)) from None
    autotuning.check(autotuning.read(text, shown), device, shown)
    return text


def _read(key: str, name: str, file: str, folder: Path, write: str) -> tuple[str, bytes]:
    """What messages call a file that `key` names, and its content. write: what to do where it cannot be read."""
    shown = str(PurePosixPath(file).parent / name)
    try:
        return shown, reading.whole(folder / name, toml.LARGEST)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise StagecError(Problem("", key, f"cannot read {shown}: {reason}", write)) from None
