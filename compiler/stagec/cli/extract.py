"""Write members of a bundle to files."""

from __future__ import annotations

import argparse

from stagec.cli.files import Sums, print_json, write_below


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="the bundle (.aot)")
    parser.add_argument(
        "member", nargs="*", help="name of a member, as inspect lists them (default: all, and the index)"
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="folder to write them to")


def run(options: argparse.Namespace) -> None:
    from stagec.bundle import extraction
    from stagec.bundle.archive import Archive

    written = {}
    for name, pieces in extraction.select(Archive(options.bundle), options.member).items():
        written[name] = Sums()
        write_below(options.output, name, written[name].of(pieces))
    if options.json:
        print_json({name: sums.to_plain() for name, sums in written.items()})
    else:
        print("".join(f"{sums.size:>12,} bytes  {name}\n" for name, sums in written.items()), end="")
