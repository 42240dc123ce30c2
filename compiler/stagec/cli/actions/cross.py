"""Run one executable that another jaxlib made, and compare its results; the status is 1 if they differ."""

from __future__ import annotations

from stagec.cli.files import Answer, Options
from stagec.cli.options import WEIGHTS

OPTIONS = {
    "bundle": "a bundle in which the executable says that it is this jaxlib's",
    "--function NAME": "the function, or FUNCTION-VARIANT",
    "--target TARGET": "of the executable",
    "[--bucket DIM=SIZE]...": "of the executable",
    **WEIGHTS,
}


def run(options: Options) -> Answer:
    from stagec.bundle.archive import Archive
    from stagec.checking import crossing
    from stagec.cli.run import bucket

    sizes = bucket(options.bucket)
    told = crossing.difference(Archive(options.bundle), options.function, options.target, sizes, options.weights)
    return Answer({"difference": told}, told and f"{told}\n", 1 if told else 0)
