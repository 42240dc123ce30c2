"""Say what the modules of functions look for when they are imported, among the files that they may read."""

from __future__ import annotations

from pathlib import Path

from stagec.cli.files import Options, read_text, write_whole
from stagec.cli.options import IMPORT_ROOTS

OPTIONS = {
    "--names FILE": "the names of the files, one a line",
    "[--function FILE MODULE]...": "where to write what a module looks for, with all that it imports; MODULE "
    "may be several, with commas between",
    **IMPORT_ROOTS,
}


def run(options: Options) -> None:
    from stagec.core.builds import imports

    paths = read_text(options.names).splitlines()
    files = imports.Files(paths, options.import_root, lambda path: Path(path).read_bytes())
    for output, modules in options.function:
        write_whole(output, files.looked_for(modules.split(",")).to_json().encode())
