"""Write a bundle without its golden inputs and outputs."""

from __future__ import annotations

import argparse

from stagec.cli.files import Sums, print_json, write_parts
from stagec.core.telling.errors import Problem, StagecError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="the bundle (.aot)")
    parser.add_argument("--output", required=True, help="where to write the bundle without them")


def run(options: argparse.Namespace) -> None:
    from stagec.bundle.archive import Archive, pieces
    from stagec.bundle.stripping import strip
    from stagec.core.telling.refusal import LoadError

    sums = Sums()
    try:
        write_parts(options.output, sums.of(pieces(strip(Archive(options.bundle)))))
    except LoadError as error:
        raise StagecError(Problem("", "", str(error))) from error
    if options.json:
        print_json({"output": options.output, **sums.to_plain()})
