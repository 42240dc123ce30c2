"""What `stagec verify` does: check a bundle and who signed it, and report how each check went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stagec.bundle.archive import Archive
from stagec.bundle.attestation import Vouching
from stagec.bundle.external import Files
from stagec.core.telling.refusal import LoadError

VERIFIED, INTACT, REFUSED = "verified", "intact", "refused"
"""Verdicts: signed by enough of the keys; not damaged, and nobody was asked who made it; neither."""
UNSIGNED = "An unsigned bundle is code of the person who gave it to you."
"""What "intact" does not say: someone who changes a bundle computes its digests again."""
STATUS = {VERIFIED: 0, REFUSED: 1, INTACT: 3}
"""Exit statuses of the command: a script must not mix them up."""

_MISTAKES = ("not-found", "key", "cryptography")
"""Codes that are not a verdict on the bundle."""


def verify(
    path: str, keys: Sequence[str], threshold: int = 1, signature: Sequence[str] = (), weights: str | None = None
) -> dict[str, Any]:
    """Return a report on the bundle at `path`: "verdict", and "checks", each with "check", "ok" and "summary".

    keys: paths of the public keys that are trusted; without any, no signature is checked, and the verdict is at best
        INTACT. threshold: how many of them must have signed. signature: paths of envelopes; none: those
        beside the bundle (`bundle/attestation.py: envelopes_of`).
    weights: the folder with the files of weights beside the bundle; None: the bundle's.
    Nothing is checked after a check that failed. Raises StagecError for a bundle or key that cannot be read.
    """
    checks: list[dict[str, Any]] = []
    report = {"kind": "verification", "bundle": path, "verdict": VERIFIED if keys else INTACT, "checks": checks}
    vouching = None
    try:
        vouching = Vouching(path, keys, threshold, signature) if keys else None
        for check, summary in _checks(path, vouching, weights):
            checks.append({"check": check, "ok": True, "summary": summary})
    except LoadError as error:
        if error.code in _MISTAKES:
            raise
        summary = str(error).removeprefix(f"{path}: ")
        checks.append({"check": _failed(error, vouching), "ok": False, "summary": summary})
        report["verdict"] = REFUSED
    return report


def as_text(report: dict[str, Any]) -> str:
    """Return the report for a person to read: a line for each check, and what comes of them."""
    lines = [
        f"{'ok' if check['ok'] else 'FAILED':<8}{check['check']:<12}{check['summary']}" for check in report["checks"]
    ]
    verdicts = {
        VERIFIED: "verified",
        INTACT: f"intact, and no signature was checked. {UNSIGNED}",
        REFUSED: "do not use it",
    }
    return "\n".join([*lines, f"{report['bundle']}: {verdicts[report['verdict']]}"]) + "\n"


def _checks(path: str, vouching: Vouching | None, weights: str | None) -> Iterator[tuple[str, str]]:
    """Do each check, and yield it with a summary. Raises LoadError where one fails."""
    archive = Archive(path, vouch=vouching)
    members = archive.index["members"]
    if vouching is not None:
        names = ", ".join(keyid[:12] for keyid in vouching.signed)
        summary = f"{len(vouching.signed)} of {len(vouching.keys)} keys signed, {vouching.threshold} must: {names}"
        yield "signatures", summary
    archive.check_all()
    yield "container", f"{len(members)} members, each with the digest that the index says"
    if vouching is not None:
        vouching.check(archive, archive.sha256())
        yield "subjects", f"signed were this file and its {len(members)} members"
    files = Files(path, archive.index, weights, "load")
    if files.names:
        files.open()
        yield "weights", f"{len(files.names)} files beside it, each with the digest that the index says"


def _failed(error: LoadError, vouching: Vouching | None) -> str:
    """Return the check that an error is of."""
    if error.code != "signature":
        return "weights" if error.code == "weights" else "container"
    return "subjects" if vouching and vouching.signed else "signatures"
