"""Libraries that stagec does not know: a build examines each once, in a process of its own, and keeps the row.

    examined/STATE              what a file is: "known", or the name of a folder beside it
    examined/BUILD-OTHERS/      the row of a build, by its build-id and all that it was examined with

These are below the folder of a store. A folder with a row is one of the folders of packages of actions: so it is in
their keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from stagec.core.builds import actions
from stagec.core.builds.platforms import PLATFORMS
from stagec.core.data import writing
from stagec.core.messages.errors import mistake
from stagec.core.messages.progress import Progress
from stagec.local import environment
from stagec.local.store import Digests, Store, state

_KNOWN = "known"


def row(
    store: Store, digests: Digests, platform: str, packages: Sequence[str], digest: str, runs: bool
) -> tuple[str, str]:
    """Return the folder with the row of a platform's library, "" if it needs none; and what to tell people.

    packages: folders of packages; digest: what stands for them. runs: whether to examine it, if nobody did.
    Raises StagecError if it is not as the builds that stagec knows.
    """
    file, jaxlib = (
        next(filter(os.path.isfile, (f"{at}/{file}" for file in PLATFORMS[name].files for at in packages)), None)
        for name in (platform, "cpu")
    )
    if file is None or jaxlib is None:  # an action says so
        return "", ""
    # The state comes first: to read what is in a library, and to import what does so, takes a tenth of a second.
    folder = store.folder / "examined"
    libraries = os.environ.get("LD_LIBRARY_PATH", "")
    noted = folder / _sha256([state(file), digest, libraries])
    with contextlib.suppress(OSError):
        kept = noted.read_text()
        if kept == _KNOWN or (folder / kept).is_dir():
            return ("" if kept == _KNOWN else str(folder / kept)), ""
    from stagec.patches import known_builds
    from stagec.patches.machine_code import PatchError

    try:
        build_id, is_known = known_builds.identity(Path(file))
        with_jaxlib, _ = known_builds.identity(Path(jaxlib))
    except PatchError as error:
        raise mistake(str(error), error.write) from error
    sources = str(actions.ENTRY.parent)
    of_stagec = [
        digests.of(f"{sources}/{path}") for path in environment.files_below(sources, (".py", ".json", ".toml"))
    ]
    with_what = [of_stagec, sys.version, with_jaxlib, libraries]  # the examination compiles with all of them
    kept = _KNOWN if is_known else f"{build_id}-{_sha256(with_what)[:16]}"
    said = ""
    if not is_known and not (folder / kept).exists():
        if not runs:
            return "", ""
        what = f"{os.path.basename(file)} {build_id} is not known to stagec"
        said = f"{what}: this build has examined it (docs/install.md)\n"
        with Progress("build") as progress:
            progress.step(f"examine {file}")
            _examine(platform, packages, folder, folder / kept, known_builds.HERE)
    writing.named(str(noted), [kept.encode()])
    return ("" if is_known else str(folder / kept)), said


def _examine(platform: str, packages: Sequence[str], folder: Path, kept: Path, name: str) -> None:
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch, "row")
        made.mkdir()
        words = [*environment.command(), "action", "examine", "--platform", platform, "--output", str(made / name)]
        done = subprocess.run(
            words, env=environment.variables(packages), check=False, capture_output=True, text=True, cwd=scratch
        )
        if done.returncode:
            raise mistake(done.stderr.strip() or f"the process that examines it ended with status {done.returncode}")
        try:
            made.rename(kept)
        except OSError:
            if not kept.is_dir():  # else another build was faster
                raise


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
