"""Show what is in an artifact or a bundle."""

from __future__ import annotations

import argparse

from stagec.cli.files import print_json, print_text


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--flat", action="store_true", help="list arguments and results in the order of the leaves, without their paths"
    )
    parser.add_argument("file", help="a bundle (.aot), an exported artifact (.exported) or a description (.json)")


def run(options: argparse.Namespace) -> None:
    from stagec.reports import inspection

    report = inspection.inspect(options.file)
    if options.json:
        print_json(report)
    else:
        print_text(inspection.as_text(report, options.flat))
