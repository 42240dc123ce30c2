"""The pages of docs/: `python -m tools.pages generate`, `build`, or `serve`, the last two with options of MkDocs.

generate: write the generated parts of pages again.    build: write the site.    serve: show it while pages are edited.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tools.pages.generated import PAGES


def main(arguments: list[str]) -> None:
    """Do what the first argument says, in the workspace that `bazel run` was called in, or in this checkout."""
    root = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY") or Path(__file__).absolute().parents[2])
    match arguments:
        case ["generate"]:
            for page in PAGES:
                page.write(root)
        case ["build" | "serve", *_]:
            from mkdocs.__main__ import cli

            os.chdir(root)
            cli(arguments, prog_name="pages")
        case _:
            sys.exit("write generate, build or serve")


if __name__ == "__main__":
    main(sys.argv[1:])
