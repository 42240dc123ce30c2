"""Copy a bundle from a registry to a folder, with its weights and with what is said about it."""

from __future__ import annotations

import argparse
from pathlib import Path

from stagec.cli.files import Answer


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("image", help="what to copy: registry/repository:tag, or ...@sha256:... by its digest")
    parser.add_argument("folder", help="where to write its files")
    add_registry(parser, timeout=60)


def add_registry(parser: argparse.ArgumentParser, timeout: int) -> None:
    """Declare how to speak with a registry. timeout: the default, in seconds."""
    parser.add_argument("--plain-http", action="store_true", help="the registry has no TLS, as one on this machine")
    parser.add_argument(
        "--timeout",
        type=float,
        default=timeout,
        metavar="SECONDS",
        help="give up when the registry has sent and taken less than 64 KiB in so long (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> Answer:
    from stagec.bundle.registry import Reference, Registry

    pulled = Registry(options.plain_http, options.timeout).pull(Reference.read(options.image), Path(options.folder))
    lines = [f"{digest[:12]}  {options.folder}/{path}" for path, digest in pulled.files.items()]
    lines += [f"removed       {options.folder}/{path}: it is about another bundle" for path in pulled.removed]
    lines += [f"left out      sha256 {digest[:12]}: {why}" for digest, why in pulled.left_out.items()]
    return Answer({"image": options.image, **pulled._asdict()}, "\n".join([*lines, ""]))
