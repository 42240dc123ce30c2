"""Files about a bundle: statements, SBOMs and envelopes, with names that begin like the bundle's.

Anybody with write access to a registry can put files there. So stagec takes only files about the bundle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stagec.bundle.additions import bases
from stagec.core.data import strict_json
from stagec.core.messages.refusal import LoadError
from stagec.core.trees import json_shapes
from stagec.trust.attestation import SUFFIX, Statement, numbered
from stagec.trust.dsse import LARGEST, Envelope

if TYPE_CHECKING:
    from stagec.bundle.additions import Indexed
    from stagec.bundle.archive import Archive
    from stagec.trust.model_signing import SignedModel

STATEMENT_SUFFIX, SBOM_SUFFIX = ".intoto.json", ".sbom.json"
_SBOM = json_shapes.shape(
    {
        "bomFormat": "CycloneDX",
        "metadata": {"component": {"hashes": [{"alg": str, "content": str}], ...: object}, ...: object},
        ...: object,
    }
)


def names(bundle: str, suffix: str) -> Iterator[str]:
    """Yield the names of files about a bundle: envelopes add to its name, others to its name without `.aot`."""
    return numbered(bundle if suffix == SUFFIX else bundle.removesuffix(".aot"), suffix)


def check(suffix: str, content: bytes, path: str, bundle: str, archive: Archive, digest: str) -> None:
    """Check that the content of the file at `path` is about exactly this bundle, or its state before an addition.

    suffix: how the names of such files end. bundle: path of its file. digest: SHA-256 (hex) of that. Raises LoadError.
    """
    said = _read(suffix, content, path)
    states: list[tuple[Indexed, str]] = [(archive, digest), *((base, base.sha256) for base in bases(archive))]
    if isinstance(said, set):
        if said.isdisjoint(sha256 for _, sha256 in states):
            raise LoadError("signature", f"{path}: it is about another bundle: none of its hashes is {digest}")
        return
    refused = []
    for state, sha256 in states:
        try:
            if not isinstance(said, Statement):
                said.check_index(b"", lambda sha256=sha256: sha256, path, bundle)  # type: ignore[misc]
            said.check(state, path, sha256)
        except LoadError as error:
            refused.append(error)
        else:
            return
    raise refused[0]


def is_about(suffix: str, content: bytes, path: str, digests: Collection[str]) -> bool:
    """Whether the content of a file is about a bundle with one of these SHA-256 (hex), without reading its index.

    Raises LoadError if it is not a file about a bundle.
    """
    said = _read(suffix, content, path)
    if isinstance(said, set):
        return not said.isdisjoint(digests)
    if isinstance(said, Statement):
        return said.subjects.get(f"{said.name}.aot") in digests
    return not {*said.files.values()}.isdisjoint(digests)


def _read(suffix: str, content: bytes, path: str) -> Statement | SignedModel | set[str]:
    """Return the content of a file; for an SBOM, the hashes of its subject. Raises LoadError."""
    try:
        if suffix == SBOM_SUFFIX:
            bill = strict_json.parse(content, LARGEST)
            _SBOM(bill)
            return {hashed["content"] for hashed in bill["metadata"]["component"]["hashes"]}
        if suffix == STATEMENT_SUFFIX:
            said = Statement.read(content, path)
            if not isinstance(said, Statement):
                raise ValueError("it does not say how a bundle was built")
            return said
        envelope = Envelope.from_json(content)
        if not envelope.signatures:
            raise ValueError("nobody signed it")
        return Statement.read(envelope.payload, path)
    except ValueError as error:
        kinds = {SBOM_SUFFIX: "an SBOM of CycloneDX", STATEMENT_SUFFIX: "a statement of a bundle"}
        what = f"not {kinds.get(suffix, 'a DSSE envelope')}: {error}"
        raise LoadError("signature", f"{Path(path)}: {what}") from error
