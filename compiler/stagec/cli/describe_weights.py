"""Describe a file of weights that stays beside a bundle: its digest, and where its arrays are."""

from __future__ import annotations

import argparse
import json

from stagec.cli.files import print_json, write_whole
from stagec.core.errors import Problem, StagecError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", help="a safetensors file")
    parser.add_argument("--output", required=True, help="where to write the description, a JSON file")


def preload() -> None:
    import stagec.bundle.external  # noqa: F401


def run(options: argparse.Namespace) -> None:
    from stagec.bundle import external

    try:
        found = external.describe(options.weights)
    except OSError as error:
        raise StagecError(Problem(options.weights, "", f"cannot be read: {error.strerror}")) from error
    except ValueError as error:
        raise StagecError(Problem(options.weights, "", f"not a safetensors file: {error}")) from error
    write_whole(options.output, f"{json.dumps(found)}\n".encode())
    if options.json:
        print_json(found)
