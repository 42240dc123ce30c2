"""Write a bundle without its golden inputs and outputs."""

from __future__ import annotations

import argparse

from stagec.cli.files import digest_of, print_json, write_parts
from stagec.errors import Problem, StagecError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="the bundle (.aot)")
    parser.add_argument("--output", required=True, help="where to write the bundle without them")


def run(options: argparse.Namespace) -> None:
    from stagec.bundle.stripping import strip
    from stagec.runtime.archive import Archive, pieces
    from stagec.runtime.refusal import LoadError

    try:
        members = strip(Archive(options.bundle))
    except LoadError as error:
        raise StagecError(Problem("", "", str(error))) from error
    write_parts(options.output, pieces(members))
    if options.json:
        print_json({"output": options.output, **digest_of(pieces(members))})
