"""`stagec rebuild`: build the bundle of a statement again, from a checkout of its sources, and compare.

Bazel builds it, with its own output base and without a cache, so that nothing from other builds enters it. When the
bundle is the same, byte for byte, the new build's statement says so: it has the same subjects, and this machine's
environment.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagec.audit import comparison
from stagec.bundle.archive import Archive
from stagec.bundle.sources import sha256_of
from stagec.core.data import paths, reading, strict_json
from stagec.core.messages.errors import Problem, StagecError, blaming
from stagec.core.trees import json_shapes
from stagec.trust.attestation import Statement
from stagec.trust.model_signing import SignedModel
from stagec.trust.provenance import directory_hash

_WITHOUT_CACHES = ("--remote_cache=", "--disk_cache=", "--remote_executor=", "--symlink_prefix=/")
"""Options of the build: no results of other builds, and no links in the checkout."""
_LARGEST = 64 << 20
"""Bytes of a statement, as in an envelope."""
_SHOWN = 20
_DIGEST = json_shapes.either("a digest", *({kind: str} for kind in ("sha256", "dirHash")))
_NAME = json_shapes.matching(r"(?!/)[^\0]+", "a relative path, or the name of a package")
_BUILD = json_shapes.shape(
    {
        "externalParameters": {"manifest": {"name": json_shapes.path, ...: object}, ...: object},
        "internalParameters": {"python": [str], ...: object},
        "resolvedDependencies": [{"name": _NAME, "digest": _DIGEST, ...: object}],
        ...: object,
    }
)
"""The parts of a statement's build definition to read."""


@dataclass(frozen=True)
class Rebuilt:
    """The result of a rebuild.

    same: whether the bundles are equal, byte for byte. members: the number of members. comparison: of the two bundles,
    as a string, if they differ. made_from: the differences of their inputs, by the two statements: a line each.
    statement: the new one, if the bundle is the same.
    """

    same: bool
    members: int
    comparison: str
    made_from: Sequence[str]
    statement: bytes


def rebuild(bundle: str, statement: str, root: Path, bazel: Sequence[str], target: str | None = None) -> Rebuilt:
    """Build the bundle again.

    statement: path of its in-toto statement. root: the checkout. bazel: the words that start Bazel.
    target: the bundle's label; None: the manifest's package says it.
    Raises StagecError if the statement is about another bundle, the checkout is another, or the build fails.
    """
    archive, given = _read(bundle, statement)
    build = given["predicate"]["buildDefinition"]
    manifest, name = build["externalParameters"]["manifest"]["name"], build["externalParameters"]["name"]
    differing = [path for path, what in _others(root, build["resolvedDependencies"]) if what]
    if not (root / manifest).is_file() or differing:
        listed = ", ".join(differing[:_SHOWN]) or manifest
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        what = f"this checkout differs from the one in {statement}: {listed}{more}"
        raise StagecError(Problem(str(root), "", what, "check out the sources of that release, without changes"))
    label = target or f"//{_package(root, manifest)}:{name}"
    with _output_base() as base:
        command = [*bazel, f"--output_base={base}", "--max_idle_secs=60"]
        try:
            _run([*command, "build", *_WITHOUT_CACHES, label, f"{label}.provenance"], root, label)
            outputs = Path(_run([*command, "info", "bazel-bin"], root, label).strip())
            folder = outputs / label.removeprefix("//").partition(":")[0]
            made, own = folder / f"{name}.aot", (folder / f"{name}.intoto.json").read_bytes()
            same = _digest(made) == archive.sha256()
            text = "" if same else comparison.as_text(comparison.compare(bundle, str(made)))
        finally:
            # Else the server of a folder that is gone would stay for its minute, with its memory.
            subprocess.run([*command, "shutdown"], cwd=root, check=False, capture_output=True)
    lines = _made_from(build, json.loads(own)["predicate"]["buildDefinition"])
    return Rebuilt(same, len(archive.index["members"]), text, lines, own if same else b"")


def _read(bundle: str, statement: str) -> tuple[Archive, dict[str, Any]]:
    """Return a bundle and its matching statement. Raises StagecError."""
    with blaming(statement, of=()):
        archive = Archive(bundle)
        archive.check_all()
        payload = reading.whole(statement, _LARGEST)
        signed = Statement.read(payload, statement)
        if isinstance(signed, SignedModel):
            raise StagecError(
                Problem(statement, "", "it does not say how the bundle was built", "give the .intoto.json")
            )
        # Before anything is built: a build takes minutes, and a statement about another bundle would blame the sources.
        signed.check(archive, statement, archive.sha256())
    given = strict_json.parse(payload, _LARGEST)  # Statement.read has looked at the rest
    try:
        _BUILD(given["predicate"]["buildDefinition"])
    except json_shapes.Mismatch as error:
        where = f"predicate.buildDefinition{error.where}"
        raise StagecError(Problem(statement, where, error.what, "give the .intoto.json of the build")) from error
    return archive, given


def _others(root: Path, dependencies: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Yield each source of a statement that the checkout has, and whether it is another there.

    Wheels have a URI. The checkout does not contain other repositories, or outputs of the build: the digest of the
    bundle shows whether they were the same.
    """
    for dependency in dependencies:
        path = root / dependency["name"]
        try:
            if "uri" in dependency or paths.fault(dependency["name"]) or not path.exists():
                continue
            digests = {"dirHash": directory_hash(path)} if path.is_dir() else {"sha256": _digest(path)}
        except OSError:  # not a regular file, or not a file name
            digests = {}
        yield dependency["name"], digests != dependency["digest"]


def _package(root: Path, manifest: str) -> str:
    """Return the package of a manifest: the nearest folder above it with a BUILD file. Raises StagecError."""
    for folder in Path(manifest).parents:
        if any((root / folder / name).is_file() for name in ("BUILD", "BUILD.bazel")):
            return "" if folder == Path() else folder.as_posix()
    raise StagecError(Problem(str(root / manifest), "", "no folder above it has a BUILD file", "name the --target"))


@contextmanager
def _output_base() -> Iterator[Path]:
    """A folder for Bazel, which makes its outputs read-only."""
    folder = Path(tempfile.mkdtemp(prefix="stagec-rebuild-"))
    try:
        yield folder
    finally:
        subprocess.run(["chmod", "-R", "u+w", str(folder)], check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: Sequence[str], root: Path, label: str) -> str:
    try:
        done = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True)
    except OSError as error:
        raise StagecError(Problem(command[0], "", f"cannot be started: {error.strerror}", "name --bazel")) from error
    if done.returncode:
        raise StagecError(Problem(label, "", f"the build failed:\n{done.stderr.strip()}"))
    return done.stdout


def _made_from(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the differences of two builds' inputs; `-` marks lines of only the first."""
    before, after = (_parts(build) for build in (first, second))
    lines = []
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            # Versions are whole: the twelfth character is in the middle of the second one.
            given = [(sign, parts[name]) for sign, parts in (("-", before), ("+", after)) if name in parts]
            lines += [f"{sign} {name} {what if name == _PYTHON else what[:12]}" for sign, what in given]
    return lines


_PYTHON = "python"


def _parts(build: Mapping[str, Any]) -> dict[str, str]:
    parts = {
        dependency["name"]: next(iter(dependency["digest"].values())) for dependency in build["resolvedDependencies"]
    }
    return parts | {_PYTHON: ", ".join(build["internalParameters"]["python"])}


def _digest(path: Path) -> str:
    return sha256_of(reading.RegularFile(path))
