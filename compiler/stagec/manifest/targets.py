"""The targets that functions name: tables of the manifest, short names that are checked in, TPU topologies.

A spec has the properties of its hardware in full, and the content of files with results of autotuning. So no action has
such files as inputs, and an edit of one device builds only the executables for that device again.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stagec.core.builds import compiler_options
from stagec.core.builds.specs import TargetSpec
from stagec.core.data import reading
from stagec.core.messages.errors import Problem, StagecError
from stagec.hardware import catalog
from stagec.manifest import toml
from stagec.manifest.gpu import FILES
from stagec.manifest.models import Document, Target
from stagec.manifest.values import file_pattern


def resolve(document: Document, file: str, folder: Path) -> tuple[dict[str, TargetSpec], list[Problem]]:
    """Describe the hardware of every target of a manifest in full.

    file: the manifest's name in messages. folder: its folder; files of devices are relative to it.
    Returns targets, by their names in `targets` of functions, and the problems of tables and files of devices.
    It leaves out names that do not exist: another check reports them at the functions.
    """
    targets: dict[str, TargetSpec] = {}
    problems: list[Problem] = []
    for name, table in document.targets.items():
        try:
            targets[name] = _of_table(name, table, file, folder)
        except StagecError as error:
            problems += [
                problem if problem.file else Problem(file, f"targets.{name}.{problem.key}", problem.what, problem.write)
                for problem in error.problems
            ]
    for name in (name for function in document.functions.values() for name in function.targets):
        if name not in document.targets:
            with contextlib.suppress(StagecError):
                targets[name] = catalog.target(name)
    return targets, problems


def _of_table(name: str, table: Target, file: str, folder: Path) -> TargetSpec:
    """The target of a table; a problem without a file is one of the table's own keys."""
    if invalid := list(compiler_options.problems(table.compiler_options)):
        raise StagecError(
            *(Problem("", f"compiler_options.{option.name}", str(option), option.write) for option in invalid)
        )
    return table.describe(name, file, folder)


def target_files(manifest: str | Path) -> Iterator[str]:
    """Yield the files that a manifest's targets name, relative to its folder; none if it cannot be read.

    They are descriptions of devices, and results of autotuning.

    To plan a manifest again when a file changes, ask for them, also when the plan fails.
    """
    try:
        tables = toml.parse(reading.whole(manifest, toml.LARGEST).decode()).get("targets", {})
    except (OSError, ValueError):
        return
    for table in tables.values() if isinstance(tables, dict) else ():
        for key, ending in FILES.items():
            named: Any = table.get(key) if isinstance(table, dict) else None
            if isinstance(named, str) and re.fullmatch(file_pattern(ending), named):
                yield named
