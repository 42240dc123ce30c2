"""Copy a bundle from a registry to a folder, with its weights and with what is said about it."""

from __future__ import annotations

import argparse
from pathlib import Path

from stagec.cli.files import print_json, print_text


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("image", help="what to copy: registry/repository:tag, or ...@sha256:... by its digest")
    parser.add_argument("folder", help="where to write its files")
    parser.add_argument("--plain-http", action="store_true", help="the registry has no TLS, as one on this machine")


def run(options: argparse.Namespace) -> None:
    from stagec.bundle.registry import Reference, Registry

    files = Registry(options.plain_http).pull(Reference.read(options.image), Path(options.folder))
    if options.json:
        print_json({"image": options.image, "files": files})
    else:
        print_text("".join(f"{digest[:12]}  {options.folder}/{path}\n" for path, digest in files.items()))
