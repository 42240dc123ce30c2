"""Run an executable that another jaxlib made, and compare its results: 1 if they differ, 2 if this cannot run here."""

from __future__ import annotations

from stagec.cli.files import Answer, Options
from stagec.cli.options import WEIGHTS
from stagec.core.messages.errors import mistake
from stagec.core.messages.refusal import Refusal

OPTIONS = {
    "bundle": "a bundle in which the executable says that it is this jaxlib's",
    "--function NAME": "the function, or FUNCTION-VARIANT",
    "--target TARGET": "of the executable",
    "[--bucket DIM=SIZE]...": "of the executable",
    **WEIGHTS,
}


def run(options: Options) -> Answer:
    from stagec.bundle.archive import Archive
    from stagec.checking import crossing, golden
    from stagec.cli.run import bucket

    sizes = bucket(options.bucket)
    try:
        told = crossing.difference(Archive(options.bundle), options.function, options.target, sizes, options.weights)
    except MemoryError as error:
        raise mistake(f"memory is short: {error}") from error
    except Refusal as error:
        if error.code in (*golden.OTHER_MACHINE, "memory", "weights"):
            raise  # another machine, or with the weights, would say more
        told = str(error)
    return Answer({"difference": told}, told and f"{told}\n", 1 if told else 0)
