"""Keys that sign: Ed25519, and ECDSA on the curves P-256, P-384 and P-521.

ECDSA hashes with SHA-256, SHA-384 or SHA-512, depending on the length of the curve (FIPS 186-5, 6.1.1; Sigstore does
the same). Only reading a key imports `cryptography`: a process that checks no signature does not need it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

from stagec.core.data import reading
from stagec.core.messages.errors import Problem, StagecError, install, mistake
from stagec.core.messages.refusal import LoadError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import (
        ECDSA,
        EllipticCurve,
        EllipticCurvePrivateKey,
        EllipticCurvePublicKey,
    )
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    PublicKey: TypeAlias = Ed25519PublicKey | EllipticCurvePublicKey
    PrivateKey: TypeAlias = Ed25519PrivateKey | EllipticCurvePrivateKey

Key: TypeAlias = str | os.PathLike[str] | bytes
"""A public key in PEM, as `openssl pkey -pubout` writes it (SubjectPublicKeyInfo): the file's path, or its bytes."""
LARGEST = 1 << 16
"""Bytes of a key's file."""
_PEM = b"-----BEGIN "
"""The start of each block of a PEM file (RFC 7468)."""
_HASHES = {"secp256r1": "SHA256", "secp384r1": "SHA384", "secp521r1": "SHA512"}
"""Curves, by the names of SEC 2, and the hash that each one signs."""
_KINDS = "Ed25519 or ECDSA (P-256, P-384, P-521)"


def read_keys(keys: Iterable[Key]) -> dict[str, PublicKey]:
    """Return public keys by keyid, the same key once. Raises LoadError ("key", "cryptography")."""
    # By the key, and not by its file: a threshold counts different keys, and one may be named twice.
    return {keyid(public): public for public in map(_public_key, keys)}


def keyid(key: PublicKey) -> str:
    """Return the name of a key: the SHA-256 (hex) of its SubjectPublicKeyInfo in DER."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def pem_of(key: PublicKey) -> bytes:
    """Return a key in PEM, as SubjectPublicKeyInfo."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def is_signed(key: PublicKey, signature: bytes, message: bytes) -> bool:
    """Whether `signature` is one of `message`, by the private half of the key."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        if isinstance(key, Ed25519PublicKey):
            key.verify(signature, message)
        else:
            key.verify(signature, message, _algorithm(key.curve))
    except InvalidSignature:
        return False
    return True


def sign(key: PrivateKey, message: bytes) -> bytes:
    """Return a signature."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return key.sign(message) if isinstance(key, Ed25519PrivateKey) else key.sign(message, _algorithm(key.curve))


def private_key(path: str, pem: bytes, passphrase: Callable[[], bytes]) -> PrivateKey:
    """Return the key in the content of a PEM file: PKCS #8, as `openssl genpkey -algorithm ed25519` writes.

    passphrase: returns the passphrase; called if the key is encrypted. Raises StagecError, naming `path`.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ModuleNotFoundError:
        what = "signing takes the package cryptography, which is not installed"
        raise mistake(what, install("cryptography")) from None

    if pem.count(_PEM) > 1:
        raise StagecError(Problem(path, "", f"it has {pem.count(_PEM)} keys", "give one key a file"))
    try:
        try:
            key = load_pem_private_key(pem, None)
        except TypeError:  # it is encrypted
            key = load_pem_private_key(pem, passphrase())
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        if b"ENCRYPTED" in pem:
            raise StagecError(Problem(path, "", "the passphrase does not open this key")) from error
        key = None
    if not _is_known(key, "PrivateKey"):
        what, write = f"not a private key in PEM, {_KINDS}", "openssl genpkey -algorithm ed25519 writes one"
        raise StagecError(Problem(path, "", what, write))
    known: PrivateKey = key  # type: ignore[assignment]
    return known


def _public_key(key: Key) -> PublicKey:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ModuleNotFoundError:
        what = "signatures are checked with the package cryptography, which is not installed"
        raise LoadError("cryptography", f"{what}: {install('cryptography')}") from None

    named = "the key" if isinstance(key, bytes) else str(key)
    try:
        pem = key if isinstance(key, bytes) else reading.whole(key, LARGEST)
    except OSError as error:
        raise LoadError("key", f"{named}: cannot be read: {error.strerror}") from error
    if pem.count(_PEM) > 1:
        raise LoadError("key", f"{named}: it has {pem.count(_PEM)} keys; give each a file, and name all of them")
    try:
        public = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        public = None
    if not _is_known(public, "PublicKey"):
        raise LoadError("key", f"{named}: not a public key in PEM, {_KINDS}; openssl pkey -pubout writes one")
    known: PublicKey = public  # type: ignore[assignment]
    return known


def _is_known(key: object, half: str) -> bool:
    """Whether stagec signs with keys of this kind. half: "PrivateKey" or "PublicKey"."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    if isinstance(key, getattr(ec, f"EllipticCurve{half}")):
        return key.curve.name in _HASHES
    return isinstance(key, getattr(ed25519, f"Ed25519{half}"))


def _algorithm(curve: EllipticCurve) -> ECDSA:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

    return ECDSA(getattr(hashes, _HASHES[curve.name])())
