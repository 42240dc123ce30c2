"""Say what the modules of functions look for when they are imported, among the files that they may read."""

from __future__ import annotations

import argparse
from pathlib import Path

from stagec.cli.files import read_text, write_whole
from stagec.cli.options import add_import_roots, add_lists


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--names", required=True, metavar="FILE", help="the names of the files, one a line")
    what = (
        "where to write what a module looks for, with all that it imports; MODULE may be several, with commas between"
    )
    add_lists(parser, {"--function FILE MODULE": what})
    add_import_roots(parser)


def run(options: argparse.Namespace) -> None:
    from stagec.core.builds import imports

    paths = read_text(options.names).splitlines()
    files = imports.Files(paths, options.import_root, lambda path: Path(path).read_bytes())
    for output, modules in options.function:
        write_whole(output, files.looked_for(modules.split(",")).to_json().encode())
