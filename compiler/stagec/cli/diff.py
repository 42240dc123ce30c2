"""Show how two bundles differ."""

from __future__ import annotations

import argparse

from stagec.cli.files import Answer


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", help="a bundle (.aot)")
    parser.add_argument("second", help="another")


def run(options: argparse.Namespace) -> Answer:
    from stagec.reports import comparison

    report = comparison.compare(options.first, options.second)
    return Answer(report, comparison.as_text(report), 0 if report["equal"] else 1)
