"""The current inputs: what a manifest and the sources that it names would be built into now, without compiling."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagec.bundle.description import LARGEST
from stagec.core.builds import actions, specs
from stagec.core.builds.specs import ExecutableSpec, FunctionSpec
from stagec.core.data import reading, strict_json
from stagec.core.telling.errors import Problem, StagecError

FORMAT = 1
"""Version of the JSON that names the inputs that Bazel built. 1 (November 2026): the first."""


@dataclass(frozen=True)
class Inputs:
    """What is built now.

    name, version: the manifest's.
    exports: name of each exported artifact -> the function's spec.
    executables: name of each executable -> the name of its exported artifact, and its spec.
    portable: name of an exported artifact -> it, as traced now or by Bazel, its description, and what JAX lowered for
        devices (`stages.by_device`).
    """

    name: str
    version: str
    exports: Mapping[str, FunctionSpec]
    executables: Mapping[str, tuple[str, ExecutableSpec]]
    portable: Callable[[str], tuple[bytes, bytes, bytes]]


def read(
    path: str, roots: Sequence[str], packages: Sequence[str] = (), plugins: Mapping[str, Path] | None = None
) -> Inputs | None:
    """Return the inputs that a file stands for: a manifest (.toml), or the JSON of a Bazel explain target.

    roots: import roots of a manifest's functions. packages: folders with the packages that tracing imports, stagec
    among them; empty: those of this process. plugins: for a platform, the folder with the packages of its plugin, where
    those are others. Returns None for a JSON file of another kind.
    Raises StagecError for mistakes in the manifest; what is wrong with sources is raised where they are traced.
    """
    if path.endswith(".toml"):
        return _planned(path, roots, packages, plugins or {})
    data = strict_json.parse(reading.whole(path, LARGEST), LARGEST)
    if not isinstance(data, dict) or data.get("kind") != "inputs":
        return None
    if data.get("format") != FORMAT:
        raise ValueError(f"its format is {data.get('format')!r}, this version reads {FORMAT}")
    folder = Path(path).parent

    def built(name: str) -> tuple[bytes, bytes, bytes]:
        export = data["exports"][name]
        exported, description, lowered = export["exported"], export["description"], export.get("lowered", "")
        return (
            (folder / exported).read_bytes(),
            (folder / description).read_bytes(),
            (folder / lowered).read_bytes() if lowered else b"",
        )

    return Inputs(
        data["name"],
        data["version"],
        {name: specs.function_spec((folder / export["spec"]).read_text()) for name, export in data["exports"].items()},
        {
            name: (executable["export"], specs.executable_spec((folder / executable["spec"]).read_text()))
            for name, executable in data["executables"].items()
        },
        built,
    )


def _planned(path: str, roots: Sequence[str], packages: Sequence[str], plugins: Mapping[str, Path]) -> Inputs:
    # Here and not above: comparing artifacts needs no pydantic, which a machine that serves bundles does not have.
    from stagec.manifest import load_manifest, plan

    planned = plan(load_manifest(path))
    exports = {export.name: export.spec for export in planned.exports}

    @functools.cache
    def traced(name: str) -> tuple[bytes, bytes, bytes]:
        needed = [str(plugins[platform]) for platform in exports[name].plugins if platform in plugins]
        return _trace(exports[name], roots, [*(packages or sys.path), *needed])

    executables = {executable.name: (executable.export, executable.spec) for executable in planned.executables}
    return Inputs(planned.name, planned.version, exports, executables, traced)


def _trace(spec: FunctionSpec, roots: Sequence[str], packages: Sequence[str]) -> tuple[bytes, bytes, bytes]:
    """Export in a separate process, as the build does: what one function imports must not be reported of another."""
    env = {**os.environ, **actions.ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, packages))}
    with tempfile.TemporaryDirectory(prefix="stagec") as scratch:
        written, *outputs = (Path(scratch, name) for name in ("spec", "exported", "description", "lowered"))
        written.write_text(specs.to_json(spec))
        options = ("--output", "--description", "--lowered")
        words: list[str | Path] = ["export", "--spec", written]
        words += [part for pair in zip(options, outputs, strict=True) for part in pair]
        words += [part for root in roots for part in ("--import-root", root)]
        done = subprocess.run([*actions.command(), *words], env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise StagecError(Problem("", "", done.stderr.strip()))
        exported, description, lowered = (output.read_bytes() for output in outputs)
        return exported, description, lowered
