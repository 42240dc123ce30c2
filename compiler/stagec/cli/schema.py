"""Print the JSON Schema of manifests, for editors."""

from __future__ import annotations

import argparse
import sys

from stagec.cli.files import write_whole


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", help="write the schema to this file instead of stdout")


def run(options: argparse.Namespace) -> None:
    from stagec.manifest import schema

    if options.output:
        write_whole(options.output, schema().encode())
    else:
        sys.stdout.write(schema())
