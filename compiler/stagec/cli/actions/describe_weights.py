"""Describe a file of weights that stays beside a bundle: its digest, and where its arrays are."""

from __future__ import annotations

import json
import sys

from stagec.cli.files import Options, write_whole
from stagec.core.messages.errors import blaming

OPTIONS = {
    "weights": "a safetensors file",
    "--output OUTPUT": "where to write the description, a JSON file",
}


def preload() -> None:
    import stagec.bundle.external  # noqa: F401


def run(options: Options) -> None:
    from stagec.bundle import external

    with blaming(options.weights, what="not a safetensors file: "):
        described = external.describe(options.weights)
    if copied := external.copied(described["arrays"]):
        print(f"{options.weights}: {copied}", file=sys.stderr)
    write_whole(options.output, f"{json.dumps(described)}\n".encode())
