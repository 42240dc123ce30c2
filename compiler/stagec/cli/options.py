"""Options that several commands have."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stagec.cli.files import read_text, write_whole


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


def add_lists(parser: argparse.ArgumentParser, lists: Mapping[str, str]) -> None:
    """Declare options that may be repeated: as a usage line shows each (`--weights NAME=FILE`) -> what it is.

    What is given is a list, of lists where an option has several values.
    """
    for usage, what in lists.items():
        option, *values = usage.split()
        several: dict[str, Any] = {"nargs": len(values), "metavar": tuple(values)} if len(values) > 1 else {}
        shown = several or {"metavar": values[0] if values else None}
        parser.add_argument(option, action="append", default=[], help=f"{what}; may be repeated", **shown)


def add_import_roots(parser: argparse.ArgumentParser) -> None:
    """Declare `--import-root`, of a command that Bazel gives all of them."""
    add_lists(parser, {"--import-root FOLDER": "folder below which modules and files are found, the first wins"})


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Declare `--sources` and `--unread`, of a command that runs a model's code."""
    parser.add_argument("--sources", nargs="*", default=[], metavar="FILE", help="files that the model may read")
    parser.add_argument("--names", metavar="FILE", help="a file with the names of more of these, one a line")
    parser.add_argument("--imports", metavar="FILE", help="what `stagec imports` wrote of the function")
    parser.add_argument("--unread", metavar="FILE", help="where to write which of these it did not read, one a line")


@contextlib.contextmanager
def telling_unread(options: argparse.Namespace) -> Iterator[None]:
    """Write what `--unread` asks for when the block has been left without an error.

    Raises StagecError where it cannot be written.
    """
    if not options.unread:
        yield
        return
    from stagec.core.builds import imports
    from stagec.frontends.reads import Reads

    reads = Reads()
    yield
    lines = reads.unread([*options.sources, *(read_text(options.names).splitlines() if options.names else ())])
    if options.names:
        looked = imports.from_json(read_text(options.imports))
        own = [value for value in vars(options).values() if isinstance(value, str)]
        why = reads.names_matter(looked, own)
        lines.append(f"{imports.WHY}{why}" if why else options.names)  # Bazel passes over other lines
    write_whole(options.unread, "".join(f"{line}\n" for line in lines).encode())


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
    add_lists(parser, {"--inventory FILE": "the inventory of an executable (default: those beside the bundle)"})


def add_plugins(parser: argparse.ArgumentParser) -> None:
    """Declare `--plugin`."""
    add_lists(parser, {"--plugin PLATFORM=FOLDER": "packages that only compiling for the platform may import"})
