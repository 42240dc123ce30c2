"""Write members of a bundle to files."""

from __future__ import annotations

import argparse
from pathlib import Path

from stagec.cli.files import digest, print_json, write_whole
from stagec.errors import Problem, StagecError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="the bundle (.aot)")
    parser.add_argument(
        "member", nargs="*", help="name of a member, as inspect lists them (default: all, and the index)"
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="folder to write them to")


def run(options: argparse.Namespace) -> None:
    from stagec.bundle import extraction
    from stagec.runtime.archive import Archive
    from stagec.runtime.refusal import LoadError

    try:
        members = extraction.select(Archive(options.bundle), options.member)
    except LoadError as error:
        raise StagecError(Problem("", "", str(error))) from error
    for name, data in members.items():
        write_whole(str(Path(options.output, name)), bytes(data))
    if options.json:
        print_json({name: digest(data) for name, data in members.items()})
    else:
        print("".join(f"{len(data):>12,} bytes  {name}\n" for name, data in members.items()), end="")
