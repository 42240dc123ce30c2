"""Sign a bundle, or what JAX's compilation cache reads: a layer or a folder. Add a signature to those it has."""

from __future__ import annotations

import getpass
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from stagec.cli.files import Answer, Options, read, write_whole
from stagec.core.messages.errors import Problem, StagecError, blaming

if TYPE_CHECKING:
    from stagec.trust.keys import PrivateKey

PASSPHRASE = "STAGEC_KEY_PASSPHRASE"

OPTIONS = {
    "bundle": "the bundle (.aot), or a layer (.tar); with --model-signing also a file of weights (.safetensors), or a "
    "folder of entries for JAX's compilation cache",
    "(--statement STATEMENT | --model-signing)": (
        "its in-toto statement (.intoto.json)",
        (
            "write a signature of OpenSSF's Model Signing, of the bundle and of the weights beside it, which other "
            "programs verify; it takes an ECDSA key"
        ),
    ),
    "--key KEY": "the private key: Ed25519 or ECDSA, PKCS #8 in PEM, as `openssl genpkey -algorithm ed25519` "
    f"writes; where it is encrypted, its passphrase is in the variable {PASSPHRASE} or asked for",
    "[--output OUTPUT]": "where the envelope is written, or gets one signature more (default: BUNDLE.dsse.json; "
    "BUNDLE.sig with --model-signing)",
}


def run(options: Options) -> Answer:
    from stagec.bundle.archive import Archive
    from stagec.trust import attestation, dsse, keys
    from stagec.trust.attestation import Statement, Subject

    def passphrase() -> bytes:
        try:
            return (os.environ.get(PASSPHRASE) or getpass.getpass(f"passphrase of {options.key}: ")).encode()
        except EOFError as error:
            what = "it is encrypted, and nobody is there to be asked for its passphrase"
            raise StagecError(Problem(options.key, "", what, f"set the variable {PASSPHRASE}")) from error

    key = keys.private_key(options.key, read(options.key, keys.LARGEST), passphrase)
    if options.model_signing:
        return _sign_files(options, key)
    output = options.output or f"{options.bundle}{attestation.SUFFIX}"
    statement = read(options.statement)
    with blaming(output, "remove it, or name another --output", of=(ValueError,)):
        # Who signs says that this is the bundle: it is looked at before.
        signed = Statement.read(statement, options.statement)
        if options.bundle.endswith(attestation.LAYER) and isinstance(signed, Statement):
            signed.check_subject(Subject.of_layer(options.bundle), options.statement)
        else:
            archive = Archive(options.bundle)
            signed.check(archive, options.statement, archive.sha256())
        envelope = dsse.sign(statement, key, dsse.Envelope.read(output) if Path(output).is_file() else None)
    write_whole(output, envelope.to_json().encode())
    return _signed(options.bundle, output, [keyid for keyid, _ in envelope.signatures])


def _sign_files(options: Options, key: PrivateKey) -> Answer:
    from stagec.bundle import external
    from stagec.bundle.archive import Archive
    from stagec.jaxcache import jax_entries
    from stagec.trust import keys, model_signing

    path = Path(options.bundle)
    output = options.output or f"{path}{model_signing.SUFFIX}"
    if path.is_dir():
        # A reader needs only the digest of the index, which has those of the others; another verifier wants all.
        name, files = path.name, {file.name: hashlib.sha256(read(str(file))).hexdigest() for file in path.iterdir()}
        if jax_entries.INDEX not in files:
            what = f"it has no {jax_entries.INDEX}: stagec did not build it for JAX's compilation cache"
            raise StagecError(Problem(options.bundle, "", what, "give the folder that aot_jax_cache wrote"))
    elif path.suffix == ".safetensors":
        with blaming(options.bundle, what="not a safetensors file: "):
            name, files = path.stem, {path.name: external.describe(path)["sha256"]}
    else:
        archive = Archive(options.bundle)
        archive.check_all()
        listed = archive.index["weights_files"]
        name, files = archive.index["name"], {path.name: archive.sha256()}
        files |= {file: entry["sha256"] for file, entry in listed.items()}
    with blaming(options.key, of=(ValueError,)):
        content = model_signing.sign(name, files, key)
    write_whole(output, content)
    return _signed(options.bundle, output, [keys.keyid(key.public_key())])


def _signed(bundle: str, output: str, keyids: list[str]) -> Answer:
    by = ", ".join(keyid[:12] for keyid in keyids)
    return Answer({"bundle": bundle, "output": output, "keyids": keyids}, f"{output}: signed by {by}\n")
