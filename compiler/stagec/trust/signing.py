"""Sign a bundle's statement. `stagec.trust.attestation` has the format, and checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagec.trust import keys
from stagec.trust.dsse import MOST_SIGNATURES, PAYLOAD_TYPE, Envelope, pae

if TYPE_CHECKING:
    from stagec.trust.keys import PrivateKey


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
