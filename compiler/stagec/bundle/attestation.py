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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from stagec.bundle.archive import INDEX, Archive
from stagec.core import json_shapes, reading, strict_json
from stagec.core.refusal import LoadError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
"""What a statement says of its subjects: how they were built. A signature of anything else is no word for them."""
BUILD_TYPE = "urn:stagec:build:bazel:1"
"""What the parameters of the predicate mean: docs/provenance.md. 1 (November 2026): the first."""
PEM = b"-----BEGIN "
"""What each block of a PEM file begins with (RFC 7468)."""
SUFFIX = ".dsse.json"
"""An envelope lies beside its bundle: `models.aot` and `models.aot.dsse.json`."""

MOST_SIGNATURES = 32
"""Signatures of one envelope: each is tried with each trusted key."""
_LARGEST = 64 << 20
"""Bytes of an envelope that are read: its statement names as many members as a bundle may have."""
LARGEST_KEY = 1 << 16
"""Bytes of a key's file."""
_MOST_VALUES = 1000
"""JSON values of an envelope: a few, and three for each signature; the statement is one text."""

_ENVELOPE = json_shapes.record(
    {
        "payloadType": json_shapes.constant(PAYLOAD_TYPE),
        "payload": json_shapes.text,
        "signatures": json_shapes.array(
            json_shapes.record({"sig": json_shapes.text}, {"keyid": json_shapes.text}, rest=json_shapes.anything)
        ),
    },
    rest=json_shapes.anything,
)
_SUBJECT = json_shapes.record(
    {"name": json_shapes.text, "digest": json_shapes.record({"sha256": json_shapes.sha256}, rest=json_shapes.text)}
)
_PARAMETERS = json_shapes.record({"name": json_shapes.text, "version": json_shapes.text}, rest=json_shapes.anything)
_BUILD = json_shapes.record(
    {"buildType": json_shapes.constant(BUILD_TYPE), "externalParameters": _PARAMETERS}, rest=json_shapes.anything
)
_STATEMENT = json_shapes.record(
    {
        "_type": json_shapes.constant(STATEMENT_TYPE),
        "predicateType": json_shapes.constant(PREDICATE_TYPE),
        "predicate": json_shapes.record({"buildDefinition": _BUILD}, rest=json_shapes.anything),
        "subject": json_shapes.array(_SUBJECT),
    },
    rest=json_shapes.anything,
)

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
            text = reading.whole(path, _LARGEST)
        except FileNotFoundError:
            raise LoadError("signature", f"{path}: no such file: the bundle has no signature") from None
        except OSError as error:
            raise LoadError("signature", f"{path}: cannot be read: {error.strerror}") from error
        try:
            return Envelope.from_json(text)
        except ValueError as error:
            raise LoadError("signature", f"{path}: not a DSSE envelope: {error}") from error

    @staticmethod
    def from_json(text: bytes) -> Envelope:
        """Read what `to_json` wrote, or another program. Raises ValueError, naming the key at fault."""
        data = strict_json.parse(text, _LARGEST, _MOST_VALUES)
        _ENVELOPE(data)
        if len(data["signatures"]) > MOST_SIGNATURES:
            raise ValueError(f"{len(data['signatures'])} signatures are over the limit of {MOST_SIGNATURES}")
        signatures = tuple((one.get("keyid", ""), _decode(one["sig"])) for one in data["signatures"])
        return Envelope(_decode(data["payload"]), signatures)


class Statement(NamedTuple):
    """What was signed: the bundle and its members by their digests, and how they were built.

    name, version: of the bundle. subjects: `<bundle>.aot` and `<bundle>.aot/<member>` -> SHA-256 (hex).
    """

    name: str
    version: str
    subjects: Mapping[str, str]

    @staticmethod
    def read(payload: bytes, path: str | Path) -> Statement:
        """Read a statement, in the file at `path`. Raises LoadError ("signature") when it is none that stagec writes.

        The same key may have signed other statements of the same subjects, a failed test for example: they vouch for
        nothing.
        """
        try:
            data = strict_json.parse(payload, _LARGEST)
            _STATEMENT(data)
            listed = [(one["name"], one["digest"]["sha256"]) for one in data["subject"]]
            subjects = dict(listed)
            if len(subjects) != len(listed):
                raise ValueError("a subject is there twice")
        except ValueError as error:
            what = f"what is signed is no provenance of a bundle: {error}"
            raise LoadError("signature", f"{path}: {what}") from error
        parameters = data["predicate"]["buildDefinition"]["externalParameters"]
        return Statement(parameters["name"], parameters["version"], subjects)

    def check_index(self, index: bytes, path: str | Path) -> None:
        """Check that the bytes of a bundle's index are what was signed, before anything parses them.

        path: what to call the envelope. Raises LoadError ("signature").
        """
        wanted = self.subjects.get(f"{self.name}.aot/{INDEX}")
        if hashlib.sha256(index).hexdigest() != wanted:
            raise LoadError("signature", f"{path}: another bundle was signed: {INDEX} differs")

    def check(self, archive: Archive, path: str | Path, digest: str | None = None) -> None:
        """Check that the subjects are the bundle and exactly its members.

        path: what to call the envelope. digest: SHA-256 (hex) of the bundle's file; None where those of the members,
        which the file is made of, are enough. Raises LoadError ("signature").
        """
        name, wanted = bundle_name(archive), subjects(archive)
        wanted[name] = digest or self.subjects.get(name, "")
        differing = sorted(one for one in {*self.subjects, *wanted} if self.subjects.get(one) != wanted.get(one))
        if not differing and (self.name, self.version) != (archive.index["name"], archive.index["version"]):
            differing = [f"{self.name} {self.version}"]
        if differing:
            more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            shown = strict_json.shown(differing[0])
            raise LoadError("signature", f"{path}: another bundle was signed: {shown}{more} differs")


class Vouching:
    """What vouches for a bundle: an envelope that enough of the trusted keys signed.

    keys: by keyid. threshold: how many must have signed. signed: keyids of those that did, once it was asked.
    statement: what they signed.
    """

    signed: tuple[str, ...] = ()
    statement: Statement

    def __init__(self, keys: Iterable[Key], threshold: int, signature: str | Path) -> None:
        """keys: the public keys that are trusted. threshold: how many different ones of them must have signed.

        signature: the envelope's path. Raises LoadError: "key", "cryptography".
        """
        self.keys = read_keys(keys)
        if not 1 <= threshold <= len(self.keys):
            raise LoadError("key", f"{threshold} signatures cannot come from {len(self.keys)} different keys")
        self.threshold, self._path = threshold, signature

    def __call__(self, index: bytes) -> None:
        """Check that the bytes of a bundle's index were signed. Raises LoadError ("signature")."""
        envelope = Envelope.read(self._path)
        found = signed_by(envelope, self.keys)
        if len(found) < self.threshold:
            what = f"{len(found)} of {len(self.keys)} keys signed it, {self.threshold} must"
            raise LoadError("signature", f"{self._path}: {what}")
        self.signed = tuple(found)
        self.statement = Statement.read(envelope.payload, self._path)
        self.statement.check_index(index, self._path)

    def check(self, archive: Archive, digest: str | None = None) -> None:
        """Check that exactly this bundle was signed, as `Statement.check` does."""
        self.statement.check(archive, self._path, digest)


def open_signed(
    path: str | Path, keys: Iterable[Key], threshold: int = 1, signature: str | Path | None = None
) -> Archive:
    """Open a bundle that enough of `keys` signed. Nothing of it is parsed before, but where its members are.

    The signed statement has the digest of the index and of every member, so that what the archive hands out later,
    each with the digest that the index says, is what was signed.
    keys, threshold: as for `Vouching`. signature: the envelope; None: the bundle's path with `.dsse.json` after it.
    Raises LoadError: "signature" when a signature is missing, is not right or is of other content; "key" when a key
    cannot be read; "cryptography" when that package is not installed; and what `Archive` raises.
    """
    vouching = Vouching(keys, threshold, signature or f"{path}{SUFFIX}")
    archive = Archive(path, vouch=vouching)
    vouching.check(archive)
    return archive


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


def signed_by(envelope: Envelope, keys: Mapping[str, Ed25519PublicKey]) -> list[str]:
    """Return the keyids of those of `keys` that signed the envelope's payload, each once, in the order of `keys`."""
    from cryptography.exceptions import InvalidSignature

    message = pae(PAYLOAD_TYPE, envelope.payload)
    different = list(dict.fromkeys(signature for _, signature in envelope.signatures))

    def signed(key: Ed25519PublicKey, signature: bytes) -> bool:
        try:
            key.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    return [name for name, key in keys.items() if any(signed(key, signature) for signature in different)]


def subjects(archive: Archive) -> dict[str, str]:
    """Return what a statement of the bundle must name, all but the bundle itself: name -> SHA-256.

    Its members are `<bundle>/<member>`; files of weights beside it have their names in the index.
    """
    members = {name: entry["sha256"] for name, entry in archive.index["members"].items()}
    digests = {INDEX: hashlib.sha256(archive[INDEX]).hexdigest(), **members}
    inside = {f"{bundle_name(archive)}/{name}": digest for name, digest in digests.items()}
    return inside | {name: file["sha256"] for name, file in archive.index.get("weights_files", {}).items()}


def bundle_name(archive: Archive) -> str:
    """Return what a statement calls the bundle; its file may have been renamed since."""
    return f"{archive.index['name']}.aot"


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
        pem = key if isinstance(key, bytes) else reading.whole(key, LARGEST_KEY)
    except OSError as error:
        raise LoadError("key", f"{named}: cannot be read: {error.strerror}") from error
    if pem.count(PEM) > 1:
        raise LoadError("key", f"{named}: it has {pem.count(PEM)} keys; give each a file, and name all of them")
    try:
        public = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        public = None
    if not isinstance(public, Ed25519PublicKey):
        what = "not an Ed25519 public key in PEM; openssl pkey -pubout writes one"
        raise LoadError("key", f"{named}: {what}")
    return public
