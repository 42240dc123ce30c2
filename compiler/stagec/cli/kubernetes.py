"""Print the manifest of a Pod, or of a service of KServe, that serves a bundle from its container image."""

from __future__ import annotations

from stagec.cli.files import Answer, Options, pair
from stagec.cli.image import CONTENT, layout_of
from stagec.cli.options import value

OPTIONS = {
    **CONTENT,
    "image": "where the container image is, as of `push --container`: registry/repository:tag",
    "--server IMAGE": "the image that has stagec with its extra `serve`",
    "[--kserve]": "a ServingRuntime and an InferenceService (default: a Pod)",
    "[--name NAME]": value("of what is made (default: the bundle's)", ""),
    "[--limit RESOURCE=COUNT]...": "what the container takes of the node, such as nvidia.com/gpu=1",
}


def run(options: Options) -> Answer:
    from stagec.bundle.archive import Archive
    from stagec.bundle.kubernetes import manifests
    from stagec.bundle.registry import Reference

    archive = Archive(options.bundle)
    limits = dict(map(pair, options.limit))
    image = f"{Reference.read(options.image).repository}@{layout_of(options, container=True).image['digest']}"
    text = manifests(archive.index, archive.sha256(), image, options.server, options.name, limits, options.kserve)
    return Answer({"image": image, "manifests": text}, text)
