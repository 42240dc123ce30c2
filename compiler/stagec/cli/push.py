"""Copy a bundle to a registry, with its weights and with what is said about it."""

from __future__ import annotations

import argparse

from stagec.cli.files import print_json
from stagec.cli.image import add_content, layout_of


def arguments(parser: argparse.ArgumentParser) -> None:
    add_content(parser)
    parser.add_argument("image", help="where to: registry/repository:tag")
    parser.add_argument("--plain-http", action="store_true", help="the registry has no TLS, as one on this machine")


def run(options: argparse.Namespace) -> None:
    from stagec.bundle.registry import Reference, Registry

    target = Reference.read(options.image)
    image = layout_of(options)
    Registry(options.plain_http).push(image, target)
    named = f"{target.repository}@{image.image['digest']}"
    if options.json:
        print_json({"image": options.image, "digest": image.image["digest"]})
    else:
        print(f"pushed {named}")
