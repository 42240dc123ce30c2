"""Write members of a bundle to files."""

from __future__ import annotations

import argparse

from stagec.cli.files import Answer, Sums, write_below


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="the bundle (.aot)")
    parser.add_argument(
        "member", nargs="*", help="name of a member, as inspect lists them (default: all, and the index)"
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="folder to write them to")


def run(options: argparse.Namespace) -> Answer:
    from stagec.bundle import extraction
    from stagec.bundle.archive import Archive

    written = {}
    for name, pieces in extraction.select(Archive(options.bundle), options.member).items():
        written[name] = Sums()
        write_below(options.output, name, written[name].of(pieces))
    text = "".join(f"{sums.size:>12,} bytes  {name}\n" for name, sums in written.items())
    return Answer({name: sums.to_plain() for name, sums in written.items()}, text)
