"""Show how two bundles differ."""

from __future__ import annotations

import argparse

from stagec.cli.files import print_json, print_text


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", help="a bundle (.aot)")
    parser.add_argument("second", help="another")


def run(options: argparse.Namespace) -> int:
    from stagec.reports import comparison

    report = comparison.compare(options.first, options.second)
    if options.json:
        print_json(report)
    else:
        print_text(comparison.as_text(report))
    return 0 if report["equal"] else 1
