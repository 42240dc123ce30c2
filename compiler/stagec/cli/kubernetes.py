"""Print the manifest of a Pod, or of a service of KServe, that serves a bundle from its container image."""

from __future__ import annotations

import argparse

from stagec.cli.files import Answer, split
from stagec.cli.image import add_content, layout_of


def arguments(parser: argparse.ArgumentParser) -> None:
    add_content(parser)
    parser.add_argument("image", help="where the container image is, as of `push --container`: registry/repository:tag")
    what = "the image that has stagec with its extra `serve`"
    parser.add_argument("--server", required=True, metavar="IMAGE", help=what)
    what = "a ServingRuntime and an InferenceService (default: a Pod)"
    parser.add_argument("--kserve", action="store_true", help=what)
    parser.add_argument("--name", default="", help="of what is made (default: the bundle's)")
    what = "what the container takes of the node, such as nvidia.com/gpu=1; may be repeated"
    parser.add_argument("--limit", action="append", default=[], metavar="RESOURCE=COUNT", help=what)


def run(options: argparse.Namespace) -> Answer:
    from stagec.bundle.archive import Archive
    from stagec.bundle.kubernetes import manifests
    from stagec.bundle.registry import Reference

    archive = Archive(options.bundle)
    limits = dict(split(text, 2) for text in options.limit)
    image = f"{Reference.read(options.image).repository}@{layout_of(options, container=True).image['digest']}"
    text = manifests(archive.index, archive.sha256(), image, options.server, options.name, limits, options.kserve)
    return Answer({"image": image, "manifests": text}, text)
