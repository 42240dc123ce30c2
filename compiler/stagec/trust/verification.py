"""`stagec verify`: check a bundle and its signatures, and report the result of each check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stagec.bundle.additions import Indexed, bases
from stagec.bundle.archive import Archive
from stagec.bundle.external import Files
from stagec.core.data import thunks
from stagec.core.messages.refusal import LoadError
from stagec.trust import fleet
from stagec.trust.attestation import LAYER, Subject, Vouching

VERIFIED, INTACT, REFUSED = "verified", "intact", "refused"
"""Verdicts: enough of the keys signed it; not damaged, but no signature was checked; neither."""
UNSIGNED = "An unsigned bundle is code from the person who gave it to you."
"""The limit of "intact": someone who changes a bundle can also compute its digests again."""
STATUS = {VERIFIED: 0, REFUSED: 1, INTACT: 3}
"""Exit statuses of the command: a script must not mix them up."""

_MISTAKES = ("not-found", "key", "cryptography")
"""Codes that are not a verdict on the bundle."""


def verify(
    path: str,
    keys: Sequence[str],
    threshold: int = 1,
    signature: Sequence[str] = (),
    weights: str | None = None,
    base_keys: Sequence[str] = (),
    serves: Sequence[str] = (),
    functions: Sequence[str] = (),
    targets: Sequence[str] = (),
    measured: bool = False,
) -> dict[str, Any]:
    """Return a report on the bundle or layer at `path`: "verdict", and "checks", each with "check", "ok" and "summary".

    keys: paths of the public keys that are trusted; without any, no signature is checked, and the verdict is at best
        INTACT. threshold: how many of them must have signed. signature: paths of envelopes; none: those
        beside the bundle (`trust/attestation.py: envelopes_of`).
    weights: the folder with the files of weights beside the bundle; None: the bundle's.
    base_keys: paths of public keys, one of which must have signed the bundle as it was before the first addition.
    serves: releases of jaxlib; the report then has "serves" and "jaxlibs", the rows of `fleet.serves` for them. They do
        not affect the verdict. functions, targets: those that must be served; none: all. measured: whether executables
        of older jaxlibs count, where they were measured.
    The first failed check is the last one. Raises StagecError for a bundle or key that cannot be read.
    """
    checks: list[dict[str, Any]] = []
    report: dict[str, Any] = {
        "kind": "verification",
        "bundle": path,
        "verdict": VERIFIED if keys else INTACT,
        "checks": checks,
    }
    vouching = None
    try:
        vouching = Vouching(path, keys, threshold, signature) if keys else None
        if path.endswith(LAYER):
            done = _layer_checks(path, vouching)
        else:
            archive = Archive(path, vouch=vouching)
            done = _checks(archive, vouching, weights, [*map(Path, base_keys)], signature)
        for check, summary in done:
            checks.append({"check": check, "ok": True, "summary": summary})
    except LoadError as error:
        if error.code in _MISTAKES:
            raise
        summary = str(error).removeprefix(f"{path}: ")
        checks.append({"check": _failed(error, vouching, checks), "ok": False, "summary": summary})
        report["verdict"] = REFUSED
    # A refused bundle may say anything of itself.
    if serves and report["verdict"] != REFUSED:
        kinds = (lambda member: thunks.kinds(bytes(archive[member]))) if measured else None
        rows = fleet.serves(archive.index, serves, functions, targets, kinds)
        report |= {"serves": all(row["ok"] for row in rows), "jaxlibs": rows}
    return report


def status(report: Mapping[str, Any]) -> int:
    """Return the exit status of the command: also 1 if it does not serve a requested jaxlib."""
    return STATUS[report["verdict"]] if report.get("serves", True) else 1


def as_text(report: dict[str, Any]) -> str:
    """Return the report for a person: a line for each check, and the verdict."""
    lines = [
        f"{'ok' if check['ok'] else 'FAILED':<8}{check['check']:<12}{check['summary']}" for check in report["checks"]
    ]
    verdicts = {
        VERIFIED: "verified",
        INTACT: f"intact, and no signature was checked. {UNSIGNED}",
        REFUSED: "do not use it",
    }
    lines.append(f"{report['bundle']}: {verdicts[report['verdict']]}")
    for jaxlib, of_it in fleet.by_jaxlib(report.get("jaxlibs", ())).items():
        served = all(row["ok"] for row in of_it)
        lines.append(f"{'ok' if served else 'FAILED':<8}{'serves':<12}jaxlib {jaxlib}: {fleet.summary(of_it)}")
    return "\n".join(lines) + "\n"


def _checks(
    archive: Archive,
    vouching: Vouching | None,
    weights: str | None,
    base_keys: Sequence[Path],
    signature: Sequence[str],
) -> Iterator[tuple[str, str]]:
    """Do each check, and yield it with a summary. Raises LoadError if one fails."""
    members = archive.index["members"]
    if vouching is not None:
        yield "signatures", _signers(vouching)
    archive.check_all()
    yield "container", f"{len(members)} members, each with the digest that the index says"
    sha256 = ""
    if vouching is not None:
        # The loader does without, because the signed index has the digest of each member. Here the whole file counts.
        sha256 = archive.sha256()
        vouching.check(archive, sha256)
        yield "subjects", f"signed were this file and its {len(members)} members"
    yield from _base(archive, sha256, base_keys, signature)
    files = Files(archive.path, archive.index, weights, "load")
    if files.names:
        files.open()
        yield "weights", f"{len(files.names)} files beside it, each with the digest that the index says"


def _signers(vouching: Vouching) -> str:
    names = ", ".join(keyid[:12] for keyid in vouching.signed)
    return f"{len(vouching.signed)} of {len(vouching.keys)} keys signed, {vouching.threshold} must: {names}"


def _layer_checks(path: str, vouching: Vouching | None) -> Iterator[tuple[str, str]]:
    """Do each check of a layer with JAX's compilation cache, as `_checks` does."""
    try:
        subject = Subject.of_layer(path)
    except ValueError as error:
        raise LoadError("format", str(error)) from error
    yield "container", f"{len(subject.digests) - 1} files of {subject.name}"
    if vouching is not None:
        vouching.check_layer(subject)
        yield "signatures", _signers(vouching)


def _base(archive: Archive, sha256: str, keys: Sequence[Path], signature: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Check the bundle before its additions, and its signatures. Raises LoadError.

    sha256: of the file, if there are keys. It writes only the first bundle again: a hostile file has many additions,
    and no signature is about the states between. The members of all states are those that were checked.
    """
    before = bases(archive)
    first: Indexed = archive
    if before:
        first, sha256 = before[-1], before[-1].sha256
        before[-1].check()
        times = "once" if len(before) == 1 else f"{len(before)} times"
        members = len(first.index["members"])
        yield "base", f"added to {times}; the {members} members of the bundle {sha256[:12]} are as they were"
    if keys:
        vouching = Vouching(archive.path, keys, 1, signature)
        vouching(first.encoded_index, lambda: sha256)
        vouching.check(first, sha256)
        yield "first", f"the bundle {sha256[:12]} is signed by {', '.join(keyid[:12] for keyid in vouching.signed)}"


def _failed(error: LoadError, vouching: Vouching | None, checks: Sequence[dict[str, Any]]) -> str:
    """Return the check that raised an error. checks: the successful ones before it."""
    done = [check["check"] for check in checks]
    if error.code == "weights":
        return "weights"
    if ("subjects" if vouching else "container") in done:
        return "first" if error.code == "signature" else "base"
    if error.code != "signature":
        return "container"
    return "subjects" if vouching and vouching.signed else "signatures"
