"""Tell what differs in what two artifacts are made from."""

from __future__ import annotations

import argparse
import sys

from stagec.cli.files import print_json


def arguments(parser: argparse.ArgumentParser) -> None:
    what = "a bundle (.aot), executable (.xla), portable artifact (.exported) or description (.json)"
    parser.add_argument("first", help=f"{what}; or a manifest (.toml) for what would be built now")
    parser.add_argument("second", help="another of the same kind, a bundle that has such a one, or a manifest")
    parser.add_argument(
        "--import-root",
        action="append",
        metavar="FOLDER",
        help="of a manifest: folder below which modules and files are found; may be repeated (default: this folder)",
    )


def run(options: argparse.Namespace) -> int:
    from stagec import explanation

    report = explanation.explain(options.first, options.second, options.import_root or ["."])
    if options.json:
        print_json(report)
    else:
        sys.stdout.write(explanation.as_text(report))
    return 0 if report["equal"] else 1
