"""Who signed a bundle: DSSE envelopes around its in-toto statement, with Ed25519 keys.

An envelope (https://github.com/secure-systems-lab/dsse, protocol.md and envelope.md) has the statement and any number
of signatures; the statement (https://github.com/in-toto/attestation, spec/v1/statement.md) has the digests of the
bundle and of each member. `cryptography` is imported where a key is read, and only there: a process that checks no
signature does not need it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from stagec.runtime import strict_json
from stagec.runtime.archive import INDEX, Archive
from stagec.runtime.refusal import LoadError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
SUFFIX = ".dsse.json"
"""An envelope lies beside its bundle: `models.aot` and `models.aot.dsse.json`."""

_LARGEST = 64 << 20
"""Bytes of an envelope that are read: over a hundred thousand members."""

Key: TypeAlias = str | Path | bytes
"""A public key in PEM, as `openssl pkey -pubout` writes it (SubjectPublicKeyInfo): the file's path, or its bytes."""


@dataclass(frozen=True)
class Envelope:
    """A statement and its signatures, none of which is checked yet.

    payload: the bytes of the statement. signatures: (keyid, signature); the keyid is a hint and trusted for nothing.
    """

    payload: bytes
    signatures: tuple[tuple[str, bytes], ...]

    def to_json(self) -> str:
        """Return the JSON form, indented, with a newline at the end."""
        values = {
            "payload": base64.b64encode(self.payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"keyid": keyid, "sig": base64.b64encode(sig).decode()} for keyid, sig in self.signatures],
        }
        return json.dumps(values, indent=1) + "\n"

    @staticmethod
    def read(path: str | Path) -> Envelope:
        """Read the file at `path`. Raises LoadError ("signature") when it is missing or no envelope of ours."""
        try:
            with Path(path).open("rb") as file:
                text = file.read(_LARGEST + 1)
        except FileNotFoundError:
            raise LoadError("signature", f"{path}: no such file: the bundle has no signature") from None
        except OSError as error:
            raise LoadError("signature", f"{path}: cannot be read: {error.strerror}") from error
        if len(text) > _LARGEST:
            raise LoadError("signature", f"{path}: not a DSSE envelope: it has more than {_LARGEST:,} bytes")
        try:
            data = strict_json.parse(text, _LARGEST)
            if data["payloadType"] != PAYLOAD_TYPE:
                raise ValueError(f"its payloadType is {data['payloadType']!r}, {PAYLOAD_TYPE!r} is wanted")
            signatures = tuple((str(one.get("keyid", "")), _decode(one["sig"])) for one in data["signatures"])
            return Envelope(_decode(data["payload"]), signatures)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise LoadError("signature", f"{path}: not a DSSE envelope: {what}") from error


def check(archive: Archive, keys: Iterable[Key], threshold: int = 1, signature: str | Path | None = None) -> list[str]:
    """Check that enough of `keys` signed exactly this bundle; return the keyids of those that did.

    Only the bundle's index is looked at. The signed statement has the digest of the index and of every member, so that
    what the archive hands out later, each with the digest that the index says, is what was signed.
    keys: the public keys that are trusted. threshold: how many different ones of them must have signed.
    signature: the envelope; None: the bundle's path with `.dsse.json` after it.
    Raises LoadError: "signature" when a signature is missing, is not right or is of other content; "key" when a key
    cannot be read; "cryptography" when that package is not installed.
    """
    trusted = read_keys(keys)
    check_threshold(threshold, trusted)
    path = signature or f"{archive.path}{SUFFIX}"
    envelope = Envelope.read(path)
    signed = signed_by(envelope, trusted, threshold, path)
    check_subjects(envelope, archive, path)
    return signed


def pae(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes that are signed: DSSE's pre-authentication encoding."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def read_keys(keys: Iterable[Key]) -> dict[str, Ed25519PublicKey]:
    """Return public keys by keyid, the same key once. Raises LoadError ("key", "cryptography")."""
    return {keyid(public): public for public in map(_public_key, keys)}


def keyid(key: Ed25519PublicKey) -> str:
    """Return what a key is called: the SHA-256 (hex) of its SubjectPublicKeyInfo in DER."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def check_threshold(threshold: int, keys: dict[str, Ed25519PublicKey]) -> None:
    """Raise LoadError ("key") for a threshold that none or all signatures would meet."""
    if not 1 <= threshold <= len(keys):
        raise LoadError("key", f"{threshold} signatures cannot come from {len(keys)} different keys")


def signed_by(envelope: Envelope, keys: dict[str, Ed25519PublicKey], threshold: int, path: str | Path) -> list[str]:
    """Return the keyids of those of `keys` that signed the envelope's payload, each once, in the order of `keys`.

    path: what to call the envelope. Raises LoadError ("signature") when there are fewer than `threshold`.
    """
    from cryptography.exceptions import InvalidSignature

    message = pae(PAYLOAD_TYPE, envelope.payload)

    def signed(key: Ed25519PublicKey, signature: bytes) -> bool:
        try:
            key.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    found = [name for name, key in keys.items() if any(signed(key, one) for _, one in envelope.signatures)]
    if len(found) < threshold:
        raise LoadError("signature", f"{path}: {len(found)} of {len(keys)} keys signed it, {threshold} must")
    return found


def subjects(archive: Archive) -> dict[str, str]:
    """Return what a statement of the bundle must name, all but the bundle itself: `<bundle>/<member>` -> SHA-256."""
    members = {name: entry["sha256"] for name, entry in archive.index["members"].items()}
    digests = {INDEX: hashlib.sha256(archive[INDEX]).hexdigest(), **members}
    return {f"{bundle_name(archive)}/{name}": digest for name, digest in digests.items()}


def bundle_name(archive: Archive) -> str:
    """Return what a statement calls the bundle; its file may have been renamed since."""
    return f"{archive.index['name']}.aot"


def check_subjects(envelope: Envelope, archive: Archive, path: str | Path, digest: str | None = None) -> None:
    """Check that the statement's subjects are the bundle and exactly its members.

    path: what to call the envelope. digest: SHA-256 of the bundle's file; None where those of the members, which the
    file is made of, are enough. Raises LoadError ("signature").
    """
    try:
        statement = strict_json.parse(envelope.payload, _LARGEST)
        if statement["_type"] != STATEMENT_TYPE:
            raise ValueError(f"its _type is {statement['_type']!r}")
        listed = [(one["name"], one["digest"]["sha256"]) for one in statement["subject"]]
        found: dict[str, str] = dict(listed)
        if len(found) != len(listed):
            raise ValueError("a subject is there twice")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise LoadError("signature", f"{path}: what is signed is no in-toto statement: {what}") from error
    name, wanted = bundle_name(archive), subjects(archive)
    wanted[name] = digest or found.get(name, "")
    differing = sorted(one for one in {*found, *wanted} if found.get(one) != wanted.get(one))
    if differing:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise LoadError("signature", f"{path}: another bundle was signed: {differing[0]}{more} differs")


def _decode(text: str) -> bytes:
    """Return the bytes of standard or URL-safe base64; verifiers must take both."""
    return base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)


def _public_key(key: Key) -> Ed25519PublicKey:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ModuleNotFoundError as error:
        what = "signatures are checked with the package cryptography, which is not installed"
        raise LoadError("cryptography", f"{what}: pip install stagec[signing]") from error

    named = "the key" if isinstance(key, bytes) else str(key)
    try:
        public = load_pem_public_key(key if isinstance(key, bytes) else Path(key).read_bytes())
    except OSError as error:
        raise LoadError("key", f"{named}: cannot be read: {error.strerror}") from error
    except (ValueError, UnsupportedAlgorithm):
        public = None
    if not isinstance(public, Ed25519PublicKey):
        what = "not an Ed25519 public key in PEM; openssl pkey -pubout writes one"
        raise LoadError("key", f"{named}: {what}")
    return public
