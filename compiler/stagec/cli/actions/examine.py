"""Examine the build of a compiler's library, and write its row, if stagec does not know it."""

from __future__ import annotations

from pathlib import Path

from stagec.cli.files import Options
from stagec.core.builds.platforms import PLATFORMS
from stagec.core.messages.errors import mistake

OPTIONS = {
    f"--platform {{{','.join(PLATFORMS)}}}": "whose compiler",
    "--output OUTPUT": "where to write the row, a JSON file",
}


def run(options: Options) -> None:
    from stagec.building import examination
    from stagec.patches import known_builds
    from stagec.patches.machine_code import PatchError

    try:
        _, is_known = known_builds.identity(examination.library(options.platform))
        known_builds.write(Path(options.output), [] if is_known else [examination.examine(options.platform)])
    except PatchError as error:
        raise mistake(str(error), error.write) from error
