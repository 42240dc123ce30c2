"""Options that several commands have."""

from __future__ import annotations

import argparse


def add_import_roots(parser: argparse.ArgumentParser) -> None:
    """Declare `--import-root`, of a command that Bazel gives all of them."""
    parser.add_argument(
        "--import-root",
        action="append",
        default=[],
        metavar="FOLDER",
        help="folder below which the user's modules and files are found; may be repeated, the first wins",
    )


def add_manifest_import_roots(parser: argparse.ArgumentParser) -> None:
    """Declare `--import-root`, of a command that people give a manifest; without the option it is None."""
    parser.add_argument(
        "--import-root",
        action="append",
        metavar="FOLDER",
        help="of a manifest: folder below which modules and files are found; may be repeated (default: this folder)",
    )


def add_plugins(parser: argparse.ArgumentParser) -> None:
    """Declare `--plugin`."""
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="PLATFORM=FOLDER",
        help="packages that only compiling for the platform may import; may be repeated",
    )
