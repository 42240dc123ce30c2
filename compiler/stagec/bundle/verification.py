"""What `stagec verify` does: check a bundle and who signed it, and tell of each check how it went."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stagec.errors import Problem, StagecError
from stagec.runtime import signatures
from stagec.runtime.archive import Archive
from stagec.runtime.refusal import LoadError
from stagec.runtime.signatures import Envelope


def verify(path: str, keys: Sequence[str], threshold: int = 1, signature: str | None = None) -> dict[str, Any]:
    """Return a report on the bundle at `path`: "ok", and "checks", each with "check", "ok" and "told".

    keys: paths of the public keys that are trusted; without any, the container alone is checked. threshold: how many of
    them must have signed. signature: path of the envelope; None: `<path>.dsse.json`.
    Nothing is checked after a check that failed. Raises StagecError for a bundle or key that cannot be read.
    """
    checks: list[dict[str, Any]] = []
    report = {"kind": "verification", "bundle": path, "ok": True, "checks": checks}
    try:
        for check, told in _checks(path, keys, threshold, signature or f"{path}{signatures.SUFFIX}"):
            checks.append({"check": check, "ok": True, "told": told})
    except LoadError as error:
        if error.code in _MISTAKES:
            raise StagecError(Problem("", "", str(error))) from error
        failed = _CHECKS[len(checks)]
        checks.append({"check": failed, "ok": False, "told": str(error).removeprefix(f"{path}: ")})
        report["ok"] = False
    return report


def as_text(report: dict[str, Any]) -> str:
    """Return the report for a person to read: a line for each check, and one that says what comes of it."""
    lines = [f"{'ok' if one['ok'] else 'FAILED':<8}{one['check']:<12}{one['told']}" for one in report["checks"]]
    return "\n".join([*lines, f"{report['bundle']}: {'verified' if report['ok'] else 'do not use it'}"]) + "\n"


_MISTAKES = ("not-found", "key", "cryptography")
"""Codes of what is no verdict on the bundle."""

_CHECKS = ("container", "signatures", "subjects")


def _checks(path: str, keys: Sequence[str], threshold: int, signature: str) -> Iterator[tuple[str, str]]:
    """Do each of _CHECKS, and yield it with what there is to tell. Raises LoadError where one fails."""
    trusted = signatures.read_keys(keys)
    if trusted:
        signatures.check_threshold(threshold, trusted)
    archive = Archive(path)
    members = archive.index["members"]
    for name in members:
        archive[name]  # which checks its digest
    yield "container", f"{len(members)} members, each with the digest that the index says"
    if not trusted:
        return
    envelope = Envelope.read(signature)
    signed = signatures.signed_by(envelope, trusted, threshold, signature)
    names = ", ".join(keyid[:12] for keyid in signed)
    yield "signatures", f"{len(signed)} of {len(trusted)} keys signed, {threshold} must: {names}"
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    signatures.check_subjects(envelope, archive, signature, digest)
    yield "subjects", f"signed were this file and its {len(members)} members"
