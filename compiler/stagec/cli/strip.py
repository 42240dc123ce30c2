"""Write a bundle without its golden inputs and outputs."""

from __future__ import annotations

import argparse

from stagec.cli.files import Answer, Sums, write_parts


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="the bundle (.aot)")
    parser.add_argument("--output", required=True, help="where to write the bundle without them")


def run(options: argparse.Namespace) -> Answer:
    from stagec.bundle.archive import Archive, pieces
    from stagec.bundle.stripping import strip

    sums = Sums()
    write_parts(options.output, sums.of(pieces(strip(Archive(options.bundle)))))
    return Answer({"output": options.output, **sums.to_plain()})
