"""Options that several commands have."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator

from stagec.cli.files import write_whole


def at_least(least: int) -> Callable[[str], int]:
    """Return what reads an option's whole number, which is `least` or more."""

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if int(text) >= least:
                return int(text)
        raise argparse.ArgumentTypeError(f"write a whole number, {least} or more, not {text!r}")

    return read


def more_than_0(text: str) -> float:
    """Read an option's number, which is more than 0."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"write a number of more than 0, not {text!r}")


def add_import_roots(parser: argparse.ArgumentParser) -> None:
    """Declare `--import-root`, of a command that Bazel gives all of them."""
    parser.add_argument(
        "--import-root",
        action="append",
        default=[],
        metavar="FOLDER",
        help="folder below which the user's modules and files are found; may be repeated, the first wins",
    )


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Declare `--sources` and `--unread`, of a command that runs a model's code."""
    parser.add_argument("--sources", nargs="*", default=[], metavar="FILE", help="files that the model may read")
    parser.add_argument("--unread", metavar="FILE", help="where to write which of these it did not read, one a line")


@contextlib.contextmanager
def telling_unread(options: argparse.Namespace) -> Iterator[None]:
    """Write what `--unread` asks for when the block has been left without an error.

    Raises StagecError where it cannot be written.
    """
    if not options.unread:
        yield
        return
    from stagec.frontends.reads import Reads

    reads = Reads()
    yield
    write_whole(options.unread, "".join(f"{path}\n" for path in reads.unread(options.sources)).encode())


def add_manifest_import_roots(parser: argparse.ArgumentParser) -> None:
    """Declare `--import-root`, of a command that people give a manifest; without the option it is None."""
    parser.add_argument(
        "--import-root",
        action="append",
        metavar="FOLDER",
        help="of a manifest: folder below which modules and files are found; may be repeated (default: this folder)",
    )


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Declare `--weights`, of a command that reads a bundle with weights beside it."""
    parser.add_argument(
        "--weights", metavar="FOLDER", help="the folder with the files of weights beside the bundle (default: its own)"
    )


def add_inventory(parser: argparse.ArgumentParser) -> None:
    """Declare `--inventory`, of a command that compares what executables take."""
    parser.add_argument(
        "--inventory",
        action="append",
        default=[],
        metavar="FILE",
        help="the inventory of an executable; may be repeated (default: those beside the bundle)",
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
