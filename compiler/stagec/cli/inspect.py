"""Show what is in an artifact or a bundle."""

from __future__ import annotations

import argparse

from stagec.cli.files import Answer


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--flat", action="store_true", help="list arguments and results in the order of the leaves, without their paths"
    )
    parser.add_argument("file", help="a bundle (.aot), an exported artifact (.exported) or a description (.json)")


def run(options: argparse.Namespace) -> Answer:
    from stagec.reports import inspection

    report = inspection.inspect(options.file)
    return Answer(report, inspection.as_text(report, options.flat))
