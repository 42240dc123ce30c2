"""The current inputs: trace the sources of a manifest as a build would now, without compiling."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from stagec.bundle.description import LARGEST
from stagec.core.builds import actions, components, specs
from stagec.core.builds.specs import ExecutableSpec, FunctionSpec
from stagec.core.data import reading, strict_json
from stagec.core.messages.errors import mistake
from stagec.pjrt import compatibility

Command: TypeAlias = Callable[[Sequence[str | Path], Iterable[str]], None]
"""Runs a command of stagec, with packages."""

FORMAT = 1
"""Version of the JSON that names the inputs that Bazel built."""


@dataclass(frozen=True)
class Inputs:
    """The present inputs of a build.

    name, version: the manifest's.
    exports: name of each exported artifact -> the function's spec.
    executables: name of each executable -> the name of its exported artifact, and its spec.
    portable: name of an exported artifact -> it, as traced now or by Bazel, its description, and what JAX lowered for
        devices (`stages.by_device`).
    environments: name of each executable that another environment compiles -> its Python, and PYTHONPATH.
    unknown: name of each executable of a missing environment -> the reason that it is not compared.
    """

    name: str
    version: str
    exports: Mapping[str, FunctionSpec]
    executables: Mapping[str, tuple[str, ExecutableSpec]]
    portable: Callable[[str], tuple[bytes, bytes, bytes]]
    environments: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)


def read(
    path: str,
    roots: Sequence[str],
    packages: Sequence[str] = (),
    plugins: Mapping[str, Path] | None = None,
    environments: Mapping[str, tuple[str, str]] | None = None,
    command: Command | None = None,
) -> Inputs | None:
    """Return the inputs that a file stands for: a manifest (.toml), or the JSON of a Bazel explain target.

    roots: import roots of a manifest's functions. packages: folders with the packages that tracing imports, stagec
    among them; empty: those of this process. plugins: for a platform, the folder with the packages of its plugin, where
    those are others. command: runs the commands that trace; None: `run`. Returns None for a JSON file of another kind.
    Raises StagecError for mistakes in the manifest; what is wrong with sources is raised where they are traced.
    """
    if path.endswith(".toml"):
        return _planned(path, roots, packages, plugins or {}, command or run)
    data = strict_json.parse(reading.whole(path, LARGEST), LARGEST)
    if not isinstance(data, dict) or data.get("kind") != "inputs":
        return None
    strict_json.check_format(data, FORMAT, "build the target again")
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
        {
            name: (environments or {})[executable["environment"]]
            for name, executable in data["executables"].items()
            if "environment" in executable
        },
    )


def _planned(
    path: str, roots: Sequence[str], packages: Sequence[str], plugins: Mapping[str, Path], command: Command
) -> Inputs:
    # Here and not above: comparing artifacts needs no pydantic, which a machine that serves bundles does not have.
    from stagec.manifest import load_manifest, plan

    planned = plan(load_manifest(path))
    exports = {export.name: export.spec for export in planned.exports}

    @functools.cache
    def traced(name: str) -> tuple[bytes, bytes, bytes]:
        # Only those that this function names: JAX imports every plugin that it finds, and the trace could depend on it.
        needed = [str(plugins[platform]) for platform in exports[name].plugins if platform in plugins]
        return _trace(exports[name], roots, lambda words: command(words, [*(packages or sys.path), *needed]))

    executables, unknown, here = {}, {}, compatibility.version()
    elsewhere = f"bazel run {planned.name}.explain compares it"
    for executable in planned.executables:
        releases = planned.jaxlib.get(executable.spec.target.name, [here])
        for release in releases:
            if release == here:
                executables[executable.name] = executable.export, executable.spec
            else:
                why = f"jaxlib {release} compiles it, and here is {here}; {elsewhere}"
                unknown[f"{executable.name}.jaxlib-{release}"] = why
        for release in planned.runs_on:
            if executable.spec.target.platform == "cpu" and release not in releases:
                why = f"jaxlib {release} runs what an older one compiles; {elsewhere}"
                unknown[f"{executable.name}.jaxlib-{release}"] = why
    return Inputs(planned.name, planned.version, exports, executables, traced, {}, unknown)


def made_elsewhere(
    environment: tuple[str, str], serialized: bytes, spec: ExecutableSpec, lowered_for: bytes
) -> components.Table:
    """Return the result of `stages.building.made_from` in another environment: its Python, and PYTHONPATH."""
    python, path = environment
    with tempfile.TemporaryDirectory(prefix="stagec") as scratch:
        given = {"--spec": specs.to_json(spec).encode(), "--exported": serialized, "--lowered": lowered_for}
        words: list[str | Path] = ["action", "components", "--output", Path(scratch, "components")]
        for option, content in given.items():
            Path(scratch, option).write_bytes(content)
            words += [option, Path(scratch, option)]
        # The ABI belongs to this Python.
        run(words, [path, str(actions.ENTRY.parents[1])], {"STAGEC_PYTHON_ABI": ""}, python)
        table: components.Table = strict_json.parse(Path(scratch, "components").read_bytes(), LARGEST)
        return table


def run(
    words: Sequence[str | Path], packages: Iterable[str], variables: Mapping[str, str] | None = None, python: str = ""
) -> None:
    """Run a command of stagec in a process of its own, as an action does. Raises StagecError if it fails.

    packages: where it finds them. variables: of its environment, besides those that it has anyway. python: the
    interpreter; "": this one.
    """
    env = {**os.environ, **actions.ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, packages))}
    interpreter, *flags = actions.command()
    command = [python or interpreter, *flags, *words]
    done = subprocess.run(command, env=env | dict(variables or {}), capture_output=True, text=True, check=False)
    if done.returncode:
        raise mistake(done.stderr.strip())


def _trace(
    spec: FunctionSpec, roots: Sequence[str], command: Callable[[Sequence[str | Path]], None]
) -> tuple[bytes, bytes, bytes]:
    """Export in a separate process, as the build does, so that imports of one function do not count for another."""
    with tempfile.TemporaryDirectory(prefix="stagec") as scratch:
        written, *outputs = (Path(scratch, name) for name in ("spec", "exported", "description", "lowered"))
        written.write_text(specs.to_json(spec))
        options = ("--output", "--description", "--lowered")
        words: list[str | Path] = ["action", "export", "--spec", written]
        words += [part for pair in zip(options, outputs, strict=True) for part in pair]
        words += [part for root in roots for part in ("--import-root", root)]
        command(words)
        exported, description, lowered = (output.read_bytes() for output in outputs)
        return exported, description, lowered
