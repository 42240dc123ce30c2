"""Sign a bundle's statement. `stagec.bundle.attestation` has the format, and checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stagec.bundle.attestation import MOST_SIGNATURES, PAYLOAD_TYPE, PEM, Envelope, keyid, pae
from stagec.core.errors import Problem, StagecError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def private_key(path: str, pem: bytes, passphrase: Callable[[], bytes]) -> Ed25519PrivateKey:
    """Return the key in the content of a PEM file: PKCS #8, as `openssl genpkey -algorithm ed25519` writes.

    passphrase: asked for where the key is encrypted. Raises StagecError, naming `path`.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ModuleNotFoundError as error:
        what = "signing takes the package cryptography, which is not installed"
        raise StagecError(Problem("", "", what, "pip install stagec[signing]")) from error

    if pem.count(PEM) > 1:
        raise StagecError(Problem(path, "", f"it has {pem.count(PEM)} keys", "give one key a file"))
    try:
        try:
            key = load_pem_private_key(pem, None)
        except TypeError:  # it is encrypted
            key = load_pem_private_key(pem, passphrase())
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        if b"ENCRYPTED" in pem:
            raise StagecError(Problem(path, "", "the passphrase does not open this key")) from error
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        what, write = "not an Ed25519 private key in PEM", "openssl genpkey -algorithm ed25519 writes one"
        raise StagecError(Problem(path, "", what, write))
    return key


def sign(statement: bytes, key: Ed25519PrivateKey, envelope: Envelope | None = None) -> Envelope:
    """Return an envelope of `statement` with the signature of `key`, beside those that `envelope` has already.

    A signature of the same key is replaced. Raises ValueError when `envelope` is of another statement, or full.
    """
    if envelope is not None and envelope.payload != statement:
        raise ValueError("its signatures are of another statement")
    name = keyid(key.public_key())
    others = [one for one in (envelope.signatures if envelope else ()) if one[0] != name]
    if len(others) >= MOST_SIGNATURES:
        raise ValueError(f"it has {MOST_SIGNATURES} signatures, and no more are read")
    return Envelope(statement, (*others, (name, key.sign(pae(PAYLOAD_TYPE, statement)))))
