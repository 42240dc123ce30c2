"""Copy a bundle to a registry, with its weights and with what is said about it."""

from __future__ import annotations

import re

from stagec.cli.files import Answer, Options
from stagec.core.messages.errors import Problem, StagecError
from stagec_registry.commands.image import CONTAINER, CONTENT, chosen
from stagec_registry.commands.pull import registry_options

OPTIONS = {
    **CONTENT,
    **CONTAINER,
    "image": "where to: registry/repository:tag",
    "[--remove SHA256]": "take out the file of this digest, which says something about the bundle: 12 digits "
    "or more, as of `pull`",
    **registry_options(timeout=300),
}


def run(options: Options) -> Answer:
    from stagec_registry.client import Reference, Registry

    target = Reference.read(options.image)
    if options.remove is not None and not re.fullmatch("[0-9a-f]{12,64}", options.remove):
        what = f"{options.remove!r} is not a SHA-256"
        raise StagecError(Problem("", "--remove", what, "write 12 to 64 digits of it, as `stagec pull` prints them"))
    image = chosen(options)
    registry = Registry(options.plain_http, options.timeout)
    registry.push(image, target)
    kept = registry.remove(target, options.remove) if options.remove else []
    named = f"{target.repository}@{image.image['digest']}"
    value = {"image": options.image, "digest": image.image["digest"], "kept": kept}
    return Answer(value, "".join(f"{line}\n" for line in [*kept, f"pushed {named}"]))
