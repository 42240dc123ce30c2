"""A small bundle with its statement, and keys to sign it with."""

import hashlib
import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from stagec.bundle.members import encode
from stagec.bundle.writing import Export, Member, gather
from stagec.core.builds.specs import function_spec
from tests.building import checked

PACKAGES = {
    "python": "3.11.2",
    "packages": [
        {
            "name": "jax",
            "version": "0.10.1",
            "filename": "jax-0.10.1-py3-none-any.whl",
            "sha256": hashlib.sha256(b"jax").hexdigest(),
        },
        {
            "name": "ml_dtypes",
            "version": "0.5.1+local",
            "filename": "ml_dtypes-0.5.1+local-cp311-cp311-manylinux_2_17_x86_64.whl",
            "sha256": hashlib.sha256(b"ml_dtypes").hexdigest(),
        },
    ],
}

CURVES = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1(), "P-521": ec.SECP521R1()}


def write_bundle_of(zoo: Path, folder: Path, *functions: str, version: str = "1") -> Path:
    """Write a bundle `zoo.aot` of some functions of the zoo."""
    exports = [export_of(zoo, name) for name in functions]
    stems = [path.with_suffix("") for name in functions for path in sorted(zoo.parent.glob(f"zoo.{name}.*.xla"))]
    suffixes = ".xla", ".json", ".stablehlo.mlirbc"
    members = [Member(stem.name, *(Path(f"{stem}{suffix}").read_bytes() for suffix in suffixes)) for stem in stems]
    path = folder / "zoo.aot"
    path.write_bytes(encode(gather("zoo", version, exports, members)))
    return path


def export_of(zoo: Path, name: str) -> Export:
    """The files of the export action of a function of the zoo."""
    stem = zoo.parent / f"zoo.{name}"
    spec = function_spec(Path(f"{stem}.spec").read_text())
    content, description = (Path(f"{stem}{suffix}").read_bytes() for suffix in (".exported", ".exported.json"))
    return Export(f"zoo.{name}", content, spec, description)


def write_provenance(bundle: Path, *more: str | Path) -> tuple[Path, Path]:
    """Write statement and SBOM of a bundle beside it, with the command."""
    folder = bundle.parent
    (folder / "packages.json").write_text(json.dumps(PACKAGES))
    (folder / "zoo.toml").write_text('[manifest]\nname = "zoo"\n')
    (folder / "model.py").write_text("# A model.\n")
    (folder / "spec.json").write_text("{}")
    statement, sbom = folder / "zoo.intoto.json", folder / "zoo.sbom.json"
    checked(
        *("action", "provenance", "--bundle", bundle, "--output", statement, "--sbom", sbom),
        *("--manifest", f"tests/zoo.toml:{folder}/zoo.toml", "--packages", folder / "packages.json"),
        *("--source", f"tests/model.py:{folder}/model.py", "--spec", f"zoo.loop:{folder}/spec.json"),
        *more,
    )
    return statement, sbom


def write_keys(folder: Path, name: str, passphrase: str = "") -> tuple[Path, Path]:
    """Write an Ed25519 key in PEM; return the paths of its private and its public half."""
    key = Ed25519PrivateKey.generate()
    encryption = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


def write_curve(folder: Path, name: str, curve: ec.EllipticCurve) -> tuple[Path, Path]:
    """Write an ECDSA key in the same way."""
    key = ec.generate_private_key(curve)
    private, public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public
