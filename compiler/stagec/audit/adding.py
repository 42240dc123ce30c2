"""`stagec add-jaxlib`: compile executables with this process's jaxlib from the exported artifacts in a bundle.

The bundle has all inputs of a compile action: the artifact, and in the description of each executable the target in
full. So `stagec action compile` runs as in a build, and what it makes must differ from the executable that is there in
the jaxlib alone. With `--reuse`, an executable of an older jaxlib that gives the right results here is not made again:
its entry and its description say a second time, for this jaxlib, what they said for the first. What is tried depends on
the bundle and this jaxlib alone: where this machine cannot try it, nothing is written.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stagec.audit import measurements
from stagec.bundle import expiry, index
from stagec.bundle.additions import bases, jaxlibs, order
from stagec.bundle.archive import Archive
from stagec.bundle.description import Description
from stagec.bundle.members import pieces
from stagec.bundle.writing import Member, extend
from stagec.core.builds import actions, components, specs
from stagec.core.data import writing
from stagec.core.messages.errors import Problem, StagecError, nearest
from stagec.core.messages.progress import Progress
from stagec.pjrt import compatibility, probe
from stagec.stages.describing import spec_of


class Added(NamedTuple):
    """An executable for this process's jaxlib. reused: an older one made it. why: why not, if that was asked for."""

    member: Member
    reused: bool = False
    why: str = ""


class _Wanted(NamedTuple):
    """An executable to make. name: in the plan. artifact: its function in the index.

    like: the description of the newest that there is; entry: of that in the index.
    """

    name: str
    artifact: str
    like: Description
    entry: Mapping[str, Any]
    spec: specs.ExecutableSpec


def added(
    archive: Archive, targets: Collection[str], reuse: bool, progress: Progress, weights: str | None = None
) -> list[Added]:
    """Return an executable for this process's jaxlib for each function, target and bucket that have none of it.

    targets: names of those to compile for; none: all. reuse: whether to take what an older jaxlib made, if it gives the
    right results (`checking/crossing.py`). weights: the folder with the files of weights beside the bundle, which that
    reads; None: the bundle's. Raises StagecError, with all faults before it compiles anything: a target that is not
    there, nothing to add, an artifact past its promise, what cannot be tried here; and for what cannot be compiled.
    """
    jaxlib = compatibility.version()
    problems = [
        Problem(archive.path, "", f"no target {name!r}", nearest(name, archive.index["targets"]))
        for name in targets
        if name not in archive.index["targets"]
    ]
    unsuitable = probe.refusal()
    problems += [Problem(archive.path, "", unsuitable)] if unsuitable else []
    before = bases(archive)
    first = before[-1].index if before else archive.index
    wanted = []
    for artifact, function in archive.index["functions"].items():
        entries = _missing(function, jaxlib, targets)
        readable, why = expiry.may_read(jaxlib, function["readable_until"], function["versions"].get("jaxlib"))
        if entries and readable is False:
            problems.append(
                Problem(archive.path, artifact, why, "build the bundle again, with a newer jax in its lock")
            )
            continue
        for entry in entries:
            described = measurements.description_of(archive, entry)
            name = entry["description"].removesuffix(".json").removesuffix(f".jaxlib-{entry['versions']['jaxlib']}")
            try:
                wanted.append(_Wanted(f"{name}.jaxlib-{jaxlib}", artifact, described, entry, spec_of(described)))
            except ValueError as error:
                problems.append(Problem(archive.path, name, str(error), _OTHERS))
    # A machine with that jaxlib runs only what the first signature covers, and this would change it
    # (`bundle/additions.py`).
    if wanted and jaxlib in jaxlibs(first):
        what = f"it was built with executables of jaxlib {jaxlib}, and lacks some: an addition is of a new jaxlib"
        problems.append(Problem(archive.path, "", what, "name it in the manifest for all targets, and build again"))
    if not problems and not wanted:
        problems.append(Problem(archive.path, "", _nothing_to_add(archive, jaxlib, targets)))
    if problems:
        raise StagecError(*problems)
    with tempfile.TemporaryDirectory(prefix="stagec") as folder:
        scratch = Path(folder)
        older, whys = _older(archive, wanted) if reuse else ({}, {})
        progress.total = len(older) + len(wanted)
        if older:  # with its weights, a bundle may be large: all are in one
            writing.named(str(scratch / _CROSSED), pieces(extend(archive, [*older.values()])))
        weights = weights or str(Path(archive.path).absolute().parent)
        for executable in (executable for executable in wanted if executable.name in older):
            progress.step(f"try {executable.name}")
            try:
                whys[executable.name] = _differs(archive, executable, scratch, weights)
            except StagecError as error:
                problems += error.problems
        if problems:
            raise StagecError(*problems)
        members = []
        for executable in wanted:
            progress.step(executable.name)
            why = whys.get(executable.name, "")
            reused = older.get(executable.name) if not why else None
            members.append(Added(reused or _compile(archive, executable, scratch), reused is not None, why))
        return members


_SECONDS = 600
"""How long an older executable may take, with its process and what is compiled to compare it with."""
_OTHERS = "name the targets that can be compiled: --target NAME"
_TRIAL = """name the folder of the weights: --weights FOLDER (weights = [...] of the Bazel rule)
run it on a machine of the target's kind, or leave out --reuse"""


def _missing(function: Mapping[str, Any], jaxlib: str, targets: Collection[str]) -> list[Mapping[str, Any]]:
    """Return the newest executable of a function for each target and bucket without one of this jaxlib."""
    # Of several releases, the newest says what to compile: its description is nearest to the new one's.
    newest = {index.key_of(entry)[:2]: entry for entry in sorted(function["executables"], key=order)}
    here = {index.key_of(entry)[:2] for entry in function["executables"] if entry["versions"]["jaxlib"] == jaxlib}
    return [entry for key, entry in newest.items() if key not in here and (not targets or entry["target"] in targets)]


def _nothing_to_add(archive: Archive, jaxlib: str, targets: Collection[str]) -> str:
    entries = [entry for function in archive.index["functions"].values() for entry in function["executables"]]
    if any(not targets or entry["target"] in targets for entry in entries):
        return f"it has the executables of jaxlib {jaxlib} already"
    return "it has no executable, and so nothing says what to compile for"


def _older(archive: Archive, wanted: Sequence[_Wanted]) -> tuple[dict[str, Member], dict[str, str]]:
    """Return the newest executables that older jaxlibs made, as this one's, and why others have none, by their names.

    One for a GPU or a TPU belongs to a release of its plugin, too.
    """
    here, members, whys = compatibility.version(), dict[str, Member](), dict[str, str]()
    for name, artifact, like, entry, _ in wanted:
        rows = archive.index["functions"][artifact]["executables"]
        below = order({**entry, "versions": {"jaxlib": here}})
        rows = [row for row in rows if index.key_of(row)[:2] == index.key_of(entry)[:2] and order(row) < below]
        # A library that a build examined is there by its file's name.
        plugins = {name for name in like.versions if name not in ("jaxlib", "stagec") and not name.endswith(".so")}
        if not rows or plugins:
            of_plugin = f"it belongs to a release of {', '.join(sorted(plugins))} too"
            whys[name] = of_plugin if plugins else "a newer jaxlib made the one that is there"
            continue
        row = max(rows, key=order)
        made = measurements.description_of(archive, row)
        description = made._replace(versions={**made.versions, "jaxlib": here}).to_json().encode()
        executable, module = (bytes(archive[row[key]]) for key in ("executable", "stablehlo"))
        members[name] = Member(f"{archive.index['name']}.{name}", executable, description, module)
    return members, whys


_CROSSED = "crossed.aot"


def _differs(archive: Archive, wanted: _Wanted, scratch: Path, weights: str) -> str:
    """Say why an older executable cannot be this jaxlib's; "" if its results are right here.

    Raises StagecError where it cannot be tried.
    """
    target, bucket = wanted.like.target.name, wanted.like.bucket
    words = ["action", "cross", str(scratch / _CROSSED), "--function", wanted.artifact, "--target", target]
    words += [f"--bucket={dim}={size}" for dim, size in bucket.items()]
    try:
        # A process of its own: an executable that this XLA reads otherwise may end it.
        done = _run([*words, "--weights", weights], scratch, _SECONDS)
        status, said = done.returncode, (done.stdout or done.stderr).strip()
        said = said if done.stdout or status == 2 else said.rpartition("\n")[2]  # of a traceback
    except subprocess.TimeoutExpired:
        status, said = 2, f"it took longer than {_SECONDS} seconds"
    if status < 0:
        said = f"it ended the process ({signal.Signals(-status).name})"
    said = said.replace(str(scratch / _CROSSED), archive.path)
    if status in (2, -signal.SIGKILL):  # Linux kills it where memory is short
        raise StagecError(Problem(archive.path, wanted.name, f"its trial cannot run here: {said}", _TRIAL))
    return said if status else ""


def _run(words: list[str], scratch: Path, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of stagec as an action does. Raises subprocess.TimeoutExpired after `seconds`; None: never."""
    return subprocess.run(
        [*actions.command(), *words],
        env=actions.environment(scratch),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=seconds,
    )


def _compile(archive: Archive, wanted: _Wanted, scratch: Path) -> Member:
    """Compile as an action does. Raises StagecError."""
    name = wanted.name
    spec, exported, out = scratch / "spec.json", scratch / "exported", scratch / "out"
    spec.write_text(specs.to_json(wanted.spec))
    exported.write_bytes(archive[archive.index["functions"][wanted.artifact]["exported"]])
    files = {"--output": f"{out}.xla", "--description": f"{out}.json", "--module": f"{out}.stablehlo.mlirbc"}
    words = ["action", "compile", "--spec", str(spec), "--exported", str(exported)]
    words += [word for pair in files.items() for word in pair]
    done = _run(words, scratch)
    if done.returncode:
        what = f"jaxlib {compatibility.version()} cannot compile it"
        raise StagecError(Problem(archive.path, name, what, f"{done.stderr.strip()}\n{_OTHERS}"))
    executable, text, module = (Path(path).read_bytes() for path in files.values())
    made = Description.from_json(text)
    other = _other_components(wanted.like, made)
    if other:
        there = wanted.like.versions["jaxlib"]
        what = f"made of what is in the bundle, it is another program than the one for jaxlib {there}"
        raise StagecError(Problem(archive.path, name, what, f"{', '.join(other)} differ; {_OTHERS}"))
    return Member(f"{archive.index['name']}.{name}", executable, text, module)


def _other_components(first: Description, second: Description) -> list[str]:
    """Return the different inputs of two executables, except the compiler."""
    versions = {*first.versions, *second.versions}
    differing = components.differences(dict(first.components), dict(second.components))  # type: ignore[arg-type]
    return [name for name, *_ in differing if name not in versions and not name.startswith("environment ")]
