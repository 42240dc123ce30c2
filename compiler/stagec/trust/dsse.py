"""DSSE envelopes (https://github.com/secure-systems-lab/dsse, protocol.md and envelope.md): a statement and signatures.

A Sigstore bundle contains an envelope, so `Envelope.read` reads it too.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stagec.core.data import reading, strict_json
from stagec.core.messages.refusal import LoadError
from stagec.core.trees import json_shapes
from stagec.trust import keys

if TYPE_CHECKING:
    from stagec.trust.keys import PrivateKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"
MOST_SIGNATURES = 32
"""Signatures of one envelope: each is tried with each trusted key."""
LARGEST = 64 << 20
"""Bytes of an envelope that are read: its statement names as many members as a bundle may have."""
_MOST_VALUES = 1000
"""JSON values of an envelope: a few, and three for each signature; the statement is one string."""

_ENVELOPE = json_shapes.shape(
    {"payloadType": PAYLOAD_TYPE, "payload": str, "signatures": [{"sig": str, "keyid?": str, ...: object}], ...: object}
)


@dataclass(frozen=True)
class Envelope:
    """A statement and its signatures, none of which is checked yet.

    payload: the bytes of the statement. signatures: (keyid, signature); the keyid is only a hint, and nothing trusts
    it.
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
        """Read the file at `path`. Raises LoadError ("signature") when it is missing, or not such an envelope."""
        try:
            text = reading.whole(path, LARGEST)
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
        data = strict_json.parse(text, LARGEST, _MOST_VALUES)
        if isinstance(data, dict) and "dsseEnvelope" in data:
            data = data["dsseEnvelope"]
        _ENVELOPE(data)
        if len(data["signatures"]) > MOST_SIGNATURES:
            raise ValueError(f"{len(data['signatures'])} signatures are over the limit of {MOST_SIGNATURES}")
        signatures = tuple((signature.get("keyid", ""), _decode(signature["sig"])) for signature in data["signatures"])
        return Envelope(_decode(data["payload"]), signatures)


def sign(statement: bytes, key: PrivateKey, envelope: Envelope | None = None) -> Envelope:
    """Return an envelope of `statement` with the signature of `key`, beside the signatures of `envelope`.

    It replaces a signature by the same key. Raises ValueError when `envelope` has another statement, or is full.
    """
    if envelope is not None and envelope.payload != statement:
        raise ValueError("it signs a different statement")
    name = keys.keyid(key.public_key())
    others = [signature for signature in (envelope.signatures if envelope else ()) if signature[0] != name]
    if len(others) >= MOST_SIGNATURES:
        raise ValueError(f"it has {MOST_SIGNATURES} signatures, and no more are read")
    return Envelope(statement, (*others, (name, keys.sign(key, pae(PAYLOAD_TYPE, statement)))))


def pae(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes that are signed: DSSE's pre-authentication encoding."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def _decode(text: str) -> bytes:
    """Return the bytes of standard or URL-safe base64; verifiers must take both."""
    return base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)
