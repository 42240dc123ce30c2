"""Options that several commands have."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator

from stagec.cli.files import Options, read_text, write_whole


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


def value(
    what: str, default: object = None, read: Callable[[str], object] | None = None, **more: object
) -> dict[str, object]:
    """Return what is said of an option with a default, or whose value is not a string.

    what: a sentence for help. read: makes the value of a string. more: as argparse has it.
    """
    given = {"default": default, "type": read, **more}
    return {"help": what, **{key: item for key, item in given.items() if item is not None}}


IMPORT_ROOTS = {"[--import-root FOLDER]...": "folder below which modules and files are found, the first wins"}
"""Of a command that Bazel gives all of them."""
MANIFEST_IMPORT_ROOTS = {
    "[--import-root FOLDER]...": "of a manifest: folder below which modules and files are found; may be repeated "
    "(default: this folder)"
}
"""Of a command that people give a manifest."""
SOURCES = {
    "[--source FILE]...": "a file that the model may read",
    "[--names FILE]": "a file with the names of more of these, one a line",
    "[--imports FILE]": "what `stagec imports` wrote of the function",
    "[--unread FILE]": "where to write which of these it did not read, one a line",
}
"""Of a command that runs a model's code."""
ANOTHER_MACHINE = {"[--as-another-machine]": "let this process see another CPU, if this machine can show one"}
"""Of a command that runs a model's code, and must make the same on every machine."""
WEIGHTS = {"[--weights FOLDER]": "the folder with the files of weights beside the bundle (default: its own)"}
"""Of a command that reads a bundle with weights beside it."""
INVENTORY = {"[--inventory FILE]...": "the inventory of an executable (default: those beside the bundle)"}
"""Of a command that compares what executables take."""
PLUGINS = {"[--plugin PLATFORM=FOLDER]...": "packages that only compiling for the platform may import"}
"""Of a command that compiles."""


@contextlib.contextmanager
def telling_unread(options: Options) -> Iterator[None]:
    """Write what `--unread` asks for when the block has been left without an error.

    Raises StagecError if it cannot be written.
    """
    if not options.unread:
        yield
        return
    from stagec.core.builds import imports
    from stagec.frontends.common.reads import Reads

    reads = Reads()
    yield
    lines = reads.unread([*options.source, *(read_text(options.names).splitlines() if options.names else ())])
    if options.names:
        looked = imports.from_json(read_text(options.imports))
        own = [value for value in vars(options).values() if isinstance(value, str)]
        why = reads.names_matter(looked, own)
        lines.append(f"{imports.WHY}{why}" if why else options.names)  # Bazel passes over other lines
    write_whole(options.unread, "".join(f"{line}\n" for line in lines).encode())
