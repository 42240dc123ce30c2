"""List the hardware that manifests can name."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from stagec.cli.files import print_json


def arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> None:
    from stagec.hardware import catalog, listing

    if options.json:
        print_json({"targets": [asdict(entry) for entry in catalog.entries()]})
    else:
        sys.stdout.write(listing.as_text(catalog.entries()))
