"""List the hardware that manifests can name."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from stagec.cli.files import Answer


def arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> Answer:
    from stagec.hardware import catalog, listing

    entries = catalog.entries()
    return Answer({"targets": [asdict(entry) for entry in entries]}, listing.as_text(entries))
