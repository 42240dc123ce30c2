"""`stagec reproduce`: build artifacts again, twice, in fresh processes with everything varied that can be.

Each build has its own folder, HOME, time zone, locale, hash seed, set of cores, umask, user name and, where libfaketime
is installed, its own clock. Export and compile run as Bazel's actions run them. Artifacts are compared with what was
built before and with each other; of a difference the first layer that has it is named, with a readable diff.

The second build traces as on a machine with another CPU, where the machine can show one (backends/cpu/eager.py). So
numbers that a model computes while it is traced, and that follow the CPU, differ: they are named with their lines.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxlib.mlir import ir

from stagec.backends.compilation import backend
from stagec.core.builds import actions, specs
from stagec.core.data import child
from stagec.core.messages.errors import Problem, StagecError
from stagec.core.messages.progress import Progress
from stagec.stages import mlir
from stagec.stages.exported import Exported

_SHOWN = 40
"""Lines of a diff that are printed."""


@dataclass(frozen=True)
class Export:
    """An exported artifact that was built: its name, its spec, and its files.

    lowered: JAX's modules for devices; None if no target has one.
    """

    name: str
    spec: Path
    exported: Path
    description: Path
    lowered: Path | None = None


@dataclass(frozen=True)
class Executable:
    """An executable that was built: its name, the name of its export, its spec, and both files."""

    name: str
    export: str
    spec: Path
    executable: Path
    description: Path


@dataclass(frozen=True)
class CacheEntry:
    """An executable for JAX's compilation cache that was built: its name, its spec, its key, and its file."""

    name: str
    spec: Path
    key: Path
    executable: Path


@dataclass(frozen=True)
class Variation:
    """The variations of a build that must not matter.

    folder: name of the folder that it runs in. env: variables. umask: of its files.
    cores: the number of the process's cores that it may use. clock: for libfaketime, "" for the real one.
    another_cpu: whether tracing sees another CPU than that of the machine.
    """

    folder: str
    env: Mapping[str, str]
    umask: int
    cores: int
    clock: str
    another_cpu: bool = False


# MALLOC_ARENA_MAX (glibc) moves the memory of threads, and so changes values that XLA derives from addresses.
VARIATIONS = (
    Variation("a", {"PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C", "USER": "nobody"}, 0o022, 1, ""),
    Variation(
        "another place/with a longer name",
        {
            "PYTHONHASHSEED": "12345",
            "TZ": "Asia/Kathmandu",
            "LC_ALL": "C.UTF-8",
            "LANG": "tr_TR.UTF-8",
            "USER": "root",
            "MALLOC_ARENA_MAX": "1",
        },
        0o077,
        1024,
        "2031-02-03 04:05:06",
        another_cpu=True,
    ),
)
"""The two builds of `reproduce`."""


def reproduce(
    exports: Sequence[Export],
    executables: Sequence[Executable],
    roots: Sequence[str],
    plugins: Mapping[str, Path],
    progress: Progress,
    retrace: bool,
    entries: Sequence[CacheEntry],
) -> tuple[list[str], list[str], int]:
    """Build every artifact twice; return (differences by artifact; those that may be; number of compared artifacts).

    Those may be that `examined = "none"` built: nobody promises their bytes.

    roots: import roots. plugins: platform -> folder of packages. Compiling for the platform may import them, and so may
    tracing a function whose spec names it. No other trace may see them, because JAX imports the plugins that it finds.
    progress: counts each build as a step. retrace: whether to build `exports` again, and not only their executables.
    entries: for JAX's compilation cache, which are compiled from their keys.
    Raises StagecError when a build fails.
    """
    traced = exports if retrace else ()
    command = [sys.executable, "-B", "-s", "-S", str(actions.ENTRY)]
    differences: list[str] = []
    unpromised: list[str] = []
    with tempfile.TemporaryDirectory(prefix="stagec") as scratch:
        outs = []
        for how in VARIATIONS:
            folder = Path(scratch, how.folder)
            copied = _copy_roots(roots, folder)
            outs.append(folder / "out")
            (folder / "out").mkdir()
            for artifact in traced:
                progress.step(artifact.name)
                paths = [part for root in copied for part in ("--import-root", root)]
                out = folder / "out" / f"{artifact.name}.exported"
                words: list[str | Path] = ["--spec", artifact.spec, *paths]
                words += ["--as-another-machine"] if how.another_cpu else []
                outputs: list[str | Path] = ["--output", out, "--description", f"{out}.json"]
                outputs += ["--lowered", f"{out}.lowered"] if artifact.lowered else []
                needed = specs.function_spec(artifact.spec.read_text()).plugins
                packages = next((folder for platform, folder in plugins.items() if platform in needed), None)
                _run([*command, "action", "export", *words, *outputs], how, folder, artifact.name, packages)
                if len(outs) == len(VARIATIONS) and _is_unlike(artifact, outs):
                    words += ["--output", f"{out}.mlir"]
                    _run([*command, "action", "locations", *words], how, folder, artifact.name, packages)
            for executable in executables:
                progress.step(executable.name)
                stem = folder / "out" / executable.name
                # From the built export: a difference there is reported once, and not again for every executable.
                built = next(artifact for artifact in exports if artifact.name == executable.export)
                words = ["--spec", executable.spec, "--exported", built.exported, "--output", f"{stem}.xla"]
                words += ["--lowered", built.lowered] if built.lowered else []
                plugin = plugins.get(_platform(executable))
                words += ["--description", f"{stem}.json"]
                _run([*command, "action", "compile", *words], how, folder, executable.name, plugin)
            for entry in entries:
                progress.step(entry.name)
                out = folder / "out" / f"{entry.name}.xla"
                words = ["--spec", entry.spec, "--key", entry.key, "--output", out, "--entry", f"{out}.json"]
                plugin = plugins.get(_platform(entry))
                _run([*command, "action", "jax-compile", *words], how, folder, entry.name, plugin)
        for artifact in traced:
            name = f"{artifact.name}.exported"
            different = _compare([artifact.exported, *(out / name for out in outs)])
            if different:
                different[0] += "".join(f"\n    {line}" for line in _constants(artifact, outs))
            how_traced = specs.function_spec(artifact.spec.read_text()).computed_on.get("examined")
            noted = unpromised if how_traced == specs.NOT_EXAMINED else differences
            # The description has the digest of the other file.
            noted += different or _compare([artifact.description, *(out / f"{name}.json" for out in outs)])
            if artifact.lowered:
                noted += _compare([artifact.lowered, *(out / f"{name}.lowered" for out in outs)])
        for executable in executables:
            noted = unpromised if _target(executable).examined == specs.NOT_EXAMINED else differences
            built_again = [out / f"{executable.name}.xla" for out in outs]
            noted += _compare([executable.executable, *built_again], _platform(executable))
            noted += _compare([executable.description, *(out / f"{executable.name}.json" for out in outs)])
        for entry in entries:
            noted = unpromised if _target(entry).examined == specs.NOT_EXAMINED else differences
            noted += _compare([entry.executable, *(out / f"{entry.name}.xla" for out in outs)], _platform(entry))
    return differences, unpromised, len(traced) + len(executables) + len(entries)


def _is_unlike(artifact: Export, outs: Sequence[Path]) -> bool:
    """Return whether an exported artifact differs from the one that was built."""
    built = artifact.exported.read_bytes()
    return any((out / f"{artifact.name}.exported").read_bytes() != built for out in outs)


def _constants(artifact: Export, outs: Sequence[Path]) -> list[str]:
    """Return a line for each constant that is not the same in all builds; none if the programs differ in more."""
    copies = [out / f"{artifact.name}.exported" for out in outs]
    with mlir.make_context() as context:
        modules = [
            mlir.read_artifact(context, Exported.deserialize(file.read_bytes()).mlir_module_serialized)
            for file in (artifact.exported, *copies)
        ]
        located = ir.Module.parse(Path(f"{copies[-1]}.mlir").read_text(), context)
        every = [mlir.operations(module, "stablehlo.constant") for module in (*modules, located)]
        if len({len(constants) for constants in every}) > 1:
            return []
        lines = []
        for *others, last in zip(*every, strict=True):
            if len({str(constant.attributes["value"]) for constant in others}) > 1:
                users = " ".join(str(use.owner.location) for use in last.results[0].uses)
                line = re.search(r'"([^"]+)":(\d+)', users)
                where = f", of {line[1]}:{line[2]}," if line else ""
                lines.append(f"the constant {last.results[0].type}{where} was computed to other numbers")
        built, first, _ = (file.read_bytes() for file in (artifact.exported, *copies))
        if lines and built == first:
            lines.append("they follow the CPU: compute them with JAX, NumPy or SciPy, or pass them as an argument")
        return lines


def first_difference(both: bytes, length: int, platform: str) -> tuple[str, list[str]]:
    """Return the first different layer of two artifacts of one kind, and a diff of it; jaxlib may end the process.

    both: one behind the other. length: of the first. platform: of the executables, if they are such.
    Layers: of an exported artifact "StableHLO" and "container"; of an executable those of its backend, for a CPU
    "optimized HLO", "buffer assignment", "object code" and "container"; of a text file "text".
    """
    first, second = both[:length], both[length:]
    layers = zip(_layers(first, platform), _layers(second, platform), strict=False)
    for (layer, left, readable), (_, right, other) in layers:
        if left != right:
            return layer, _diff(readable, other, left, right)
    return "container", _diff([], [], first, second)


def _compare(files: Sequence[Path], platform: str = "cpu") -> list[str]:
    """Compare the built file with both others, and these with each other."""
    names = ("the built artifact", "the first build here", "the second build here")
    data = [file.read_bytes() for file in files]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        if data[i] != data[j]:
            try:  # who built the first one may be a stranger
                layer, lines = child.call(first_difference, data[i] + data[j], len(data[i]), platform)
            except ValueError as error:
                layer, lines = "container", [f"what is in it cannot be read: {error}"]
            more = [f"    ... {len(lines) - _SHOWN} lines more"] if len(lines) > _SHOWN else []
            shown = [f"    {line[:200]}" for line in lines[:_SHOWN]] + more
            text = f"{files[0].name}: {names[i]} and {names[j]} differ; the first layer that differs is the {layer}"
            return ["\n".join([text, f"    --- {names[i]}", f"    +++ {names[j]}", *shown])]
    return []


def _layers(data: bytes, platform: str) -> Iterator[tuple[str, bytes, list[str]]]:
    """Yield (name of the layer, its bytes, lines for a reader) from the first stage to the last."""
    if data.lstrip().startswith(b"{"):
        yield "text", data, data.decode("utf-8", "replace").splitlines()
        return
    if not data or data.startswith(b"PK"):
        yield "container", data, []
        return
    try:
        exported = Exported.deserialize(data)
    except ValueError:
        for name, part, text in backend(platform).layers(data):
            yield name, part, text.splitlines()
        return
    with mlir.make_context() as context:
        text = str(mlir.read_artifact(context, exported.mlir_module_serialized))
    yield "StableHLO", exported.mlir_module_serialized, text.splitlines()
    yield "container", data, []


def _diff(first: list[str], second: list[str], left: bytes, right: bytes) -> list[str]:
    lines = list(difflib.unified_diff(first, second, lineterm="", n=1))[2:]
    if lines:
        return lines
    at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    start = max(0, at - 16)
    return [
        f"{len(left):,} and {len(right):,} bytes, the first that differs is at {at:,}",
        f"-{left[start : at + 16].hex(' ')}",
        f"+{right[start : at + 16].hex(' ')}",
    ]


def _platform(executable: Executable | CacheEntry) -> str:
    return _target(executable).platform


def _target(executable: Executable | CacheEntry) -> specs.TargetSpec:
    return specs.executable_spec(executable.spec.read_text()).target


def _copy_roots(roots: Sequence[str], folder: Path) -> list[str]:
    """Copy the import roots into `folder`, so that sources have other paths; return the copies."""
    copies = []
    for number, root in enumerate(roots):
        # The name may say that packages are installed there.
        copy = folder / f"root{number}" / Path(root).resolve().name
        # Runfiles are links: what they point to is copied.
        shutil.copytree(root, copy, ignore=_not_copied, ignore_dangling_symlinks=True)
        copies.append(str(copy))
    folder.mkdir(parents=True, exist_ok=True)
    return copies


def _not_copied(folder: str, names: list[str]) -> set[str]:
    """Return the names in a folder that are not sources; `bazel-out` and its like lead to all outputs."""
    of_bazel = {name for name in names if name.startswith("bazel-") and Path(folder, name).is_symlink()}
    return of_bazel | shutil.ignore_patterns("__pycache__", ".git", "site-packages", "*.runfiles")(folder, names)


def run_varied(
    command: Sequence[str | Path], how: Variation, folder: Path, packages: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of stagec in `folder`, in a separate process with the variations `how`; return its output.

    packages: a folder with more packages than this process has.
    """
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    env = {**actions.environment(home), **how.env}
    if packages:
        env["PYTHONPATH"] = os.pathsep.join([*filter(None, [env.get("PYTHONPATH")]), str(packages)])
    faketime = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))  # it may not be installed
    if how.clock and faketime:
        env |= {"LD_PRELOAD": str(faketime[0]), "FAKETIME": f"@{how.clock}", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}

    def prepare() -> None:
        os.umask(how.umask)
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: how.cores])

    return subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=env,
        preexec_fn=prepare,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def _run(command: Sequence[str | Path], how: Variation, folder: Path, name: str, packages: Path | None = None) -> None:
    done = run_varied(command, how, folder, packages)
    if done.returncode:
        raise StagecError(Problem(name, "", f"building it again in {how.folder!r} failed", done.stderr.strip()))
