"""Describe a file of weights that stays beside a bundle: its digest, and where its arrays are."""

from __future__ import annotations

import argparse
import json
import sys

from stagec.cli.files import Answer, write_whole
from stagec.core.telling.errors import blaming


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", help="a safetensors file")
    parser.add_argument("--output", required=True, help="where to write the description, a JSON file")


def preload() -> None:
    import stagec.bundle.external  # noqa: F401


def run(options: argparse.Namespace) -> Answer:
    from stagec.bundle import external

    with blaming(options.weights, what="not a safetensors file: "):
        described = external.describe(options.weights)
    starts = [array["start"] % external.ALIGNMENT for array in described["arrays"].values()]
    if copied := sum(map(bool, starts)):
        what = f"{copied} of {len(starts)} arrays do not start at a multiple of {external.ALIGNMENT} bytes"
        print(f"{options.weights}: {what}: a CPU copies them instead of sharing the file", file=sys.stderr)
    write_whole(options.output, f"{json.dumps(described)}\n".encode())
    return Answer(described)
