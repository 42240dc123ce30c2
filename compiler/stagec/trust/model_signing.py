"""Signatures of OpenSSF's Model Signing (https://github.com/ossf/model-signing-spec), version 1.0 of its predicate.

A statement has the SHA-256 of each file of a model's folder. It says who published the files, but not how they were
built. The file of a signature is a Sigstore bundle with a DSSE envelope. The package model-signing verifies signatures
of `sign`, and `Envelope` reads signatures of the package.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stagec.core.data.strict_json import shown
from stagec.core.messages.refusal import LoadError
from stagec.core.trees import json_shapes
from stagec.trust import keys
from stagec.trust.dsse import PAYLOAD_TYPE, pae

if TYPE_CHECKING:
    from stagec.bundle.additions import Indexed
    from stagec.trust.keys import PrivateKey

PREDICATE_TYPE = "https://model_signing/signature/v1.0"
SUFFIX = ".sig"
"""A signature lies beside its bundle: `models.aot.sig`."""
_BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_BESIDE = (".dsse.json", ".intoto.json", ".sbom.json", SUFFIX)
_WHOLE = "."
"""The name of a model of one file; the file itself may have any name."""
_STATEMENT = json_shapes.shape(
    {
        "_type": "https://in-toto.io/Statement/v1",
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {"method": "files", "hash_type": "sha256", ...: object},
            "resources": [{"name": str, "algorithm": "sha256", "digest": json_shapes.sha256}],
            ...: object,
        },
        "subject": [object],
        ...: object,
    }
)


class SignedModel(NamedTuple):
    """The signed files of a model. files: SHA-256 (hex) by path in the model's folder."""

    files: Mapping[str, str]

    @staticmethod
    def of(statement: Mapping[str, Any]) -> SignedModel:
        """Read a statement. Raises ValueError, naming the key at fault."""
        _STATEMENT(dict(statement))
        resources = statement["predicate"]["resources"]
        files = {resource["name"]: resource["digest"] for resource in resources}
        if len(files) != len(resources):
            raise ValueError("predicate.resources: a file appears twice")
        return SignedModel(files)

    def check_index(self, index: bytes, whole: Callable[[], str], path: str | Path, bundle: str | Path) -> None:
        """Read the file of a bundle, and check that it was signed under its name.

        Parameters and errors as for `Statement.check_index`.
        """
        digest = whole()
        names = sorted(name for name, file in self.files.items() if file == digest)
        if not names:
            raise LoadError("signature", f"{path}: another model was signed: no file of it has the sha256 {digest}")
        if not any(_is_called(bundle, name) for name in names):
            what = f"{bundle} was signed as {shown(names[0])}; give it that name"
            raise LoadError("signature", f"{path}: another name was signed: {what}")

    def check(self, archive: Indexed, path: str | Path, digest: str | None = None) -> None:
        """Check that the signed weights beside the bundle are those that it needs. Raises LoadError."""
        folders = {name.rpartition("/")[0] for name in self.files if _is_called(archive.path, name)}
        for name, file in archive.index["weights_files"].items():
            signed = {self.files.get(f"{folder}/{name}".lstrip("/"), file["sha256"]) for folder in folders}
            if signed - {file["sha256"]}:
                raise LoadError("signature", f"{path}: other weights were signed: {name} differs")


def _is_called(bundle: str | Path, name: str) -> bool:
    """Whether the path of a bundle ends in `name`, a path in the model's folder."""
    parts = tuple(name.split("/"))
    return name == _WHOLE or Path(bundle).absolute().parts[-len(parts) :] == parts


def sign(name: str, files: Mapping[str, str], key: PrivateKey) -> bytes:
    """Return the content of a signature of a model.

    name: of the model. files: SHA-256 (hex) of each by its path: a bundle and the weights beside it, or a file of
    weights. The signature covers the folder with these files, without the files that stagec puts beside them. Raises
    ValueError for an Ed25519 key, because Model Signing has none.
    """
    public = key.public_key()
    if not hasattr(public, "curve"):
        raise ValueError(
            "Model Signing takes ECDSA keys: openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256"
        )
    files = dict(sorted(files.items()))
    # Model Signing's digest of a folder: over the digests of its files, in the order of their paths.
    root = hashlib.sha256(b"".join(bytes.fromhex(sha256) for sha256 in files.values())).hexdigest()
    # Statements, SBOM and signatures come later than what they are about. model-signing refuses a folder with a file
    # that is neither signed nor ignored.
    stems = {stem for file in files for stem in (file, file.removesuffix(".aot"))}
    beside = sorted(f"{stem}{suffix}" for stem in stems for suffix in _BESIDE)
    serialization = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": beside}
    resources = [{"name": file, "algorithm": "sha256", "digest": sha256} for file, sha256 in files.items()]
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": root}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {"serialization": serialization, "resources": resources},
    }
    payload = json.dumps(statement).encode()
    signature = keys.sign(key, pae(PAYLOAD_TYPE, payload))
    hint = hashlib.sha256(keys.pem_of(public)).hexdigest()
    content = {
        "mediaType": _BUNDLE_TYPE,
        "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return (json.dumps(content) + "\n").encode()
