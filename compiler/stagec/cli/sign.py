"""Sign a bundle, or add a signature to those it has."""

from __future__ import annotations

import argparse
import getpass
import os
from pathlib import Path

from stagec.cli.files import print_json, read, write_whole
from stagec.core.errors import Problem, StagecError

PASSPHRASE = "STAGEC_KEY_PASSPHRASE"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="the bundle (.aot)")
    parser.add_argument("--statement", required=True, help="its in-toto statement (.intoto.json)")
    parser.add_argument(
        "--key",
        required=True,
        help="the private key: Ed25519, PKCS #8 in PEM, as `openssl genpkey -algorithm ed25519` writes; where it is "
        f"encrypted, its passphrase is in the variable {PASSPHRASE} or asked for",
    )
    parser.add_argument(
        "--output", help="where the envelope is written, or gets one signature more (default: BUNDLE.dsse.json)"
    )


def run(options: argparse.Namespace) -> None:
    from stagec.bundle import attestation, signing
    from stagec.bundle.archive import Archive
    from stagec.bundle.attestation import Envelope, Statement
    from stagec.core.refusal import LoadError

    def passphrase() -> bytes:
        try:
            return (os.environ.get(PASSPHRASE) or getpass.getpass(f"passphrase of {options.key}: ")).encode()
        except EOFError as error:
            what = "it is encrypted, and nobody is there to be asked for its passphrase"
            raise StagecError(Problem(options.key, "", what, f"set the variable {PASSPHRASE}")) from error

    key = signing.private_key(options.key, read(options.key, attestation.LARGEST_KEY), passphrase)
    output = options.output or f"{options.bundle}{attestation.SUFFIX}"
    statement = read(options.statement)
    try:
        # Who signs says that this is the bundle: it is looked at before.
        archive = Archive(options.bundle)
        Statement.read(statement, options.statement).check(archive, options.statement, archive.sha256())
        envelope = signing.sign(statement, key, Envelope.read(output) if Path(output).exists() else None)
    except LoadError as error:
        raise StagecError(Problem("", "", str(error))) from error
    except ValueError as error:
        raise StagecError(Problem(output, "", str(error), "remove it, or name another --output")) from error
    write_whole(output, envelope.to_json().encode())
    keyids = [keyid for keyid, _ in envelope.signatures]
    if options.json:
        print_json({"bundle": options.bundle, "output": output, "keyids": keyids})
    else:
        print(f"{output}: signed by {', '.join(keyid[:12] for keyid in keyids)}")
