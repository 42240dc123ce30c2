"""Show which lines an operation or an error comes from."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from stagec.cli.files import Answer, Options
from stagec.core.messages.errors import blaming

OPTIONS = {
    "file": "the module with source locations (.debug.mlir)",
    "text": "name of an operation, such as jit(f)/tanh, or the whole message of an error",
}


def run(options: Options) -> Answer:
    from stagec.stages import locations

    with blaming(options.file, "give a file of output group debug"):
        operations = locations.find(Path(options.file), options.text)
    if not operations and not options.json:
        print(f"{options.file}: no operation in this file matches the text", file=sys.stderr)
    value = {"operations": [asdict(operation) for operation in operations]}
    return Answer(value, locations.as_text(operations) if operations else "", 0 if operations else 1)
