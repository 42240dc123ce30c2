"""What the newest JAX changes for stagec: run this on the day of a release.

    python tools/newest.py [--python PYTHON] [--folder FOLDER] [--pre]

Installs the newest jax and jaxlib of the index, and the other packages of tests/newest.in, into a virtual environment,
and prints what breaks there: builds of jaxlib, the plugins for GPUs and libtpu without a row, with what is other in
them or the row that they would get, private names that are gone, members of `jax.jit`, `jax.stages` and `jax.export`
that stagec does not have, files and artifacts that are read in another way, and whether a small program runs. It also
prints JAX's own dates: deprecations that these tests meet, and comments about what JAX will do when.
The status is 1 if something breaks. `tools/known_builds.py add WHEEL` writes the rows of new builds.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).absolute().parent.parent
TESTS = {
    "a program, compiled, stored, loaded and called": ("tests/pjrt/test_probe.py",),
    "members of jax.jit, jax.stages and jax.export": (
        "tests/conformance/test_members.py",
        "-k",
        "forgotten or ahead_of_time",
    ),
    "settings and parameters of JAX": ("tests/frontends/test_contract.py",),
    "bytes of Exported": ("tests/stages/test_serialization.py",),
    "artifacts that JAX wrote": ("tests/corpus/test_artifacts.py",),
}
"""What breaks first, by tests. The whole suite runs with `--config=other_versions`, once tests/newest.lock names it."""
_DATE = re.compile(
    r"\b\d{1,2}/\d{1,2}/(?:20)?\d\d\b|\b(?:January|February|March|April|May|June|July|August|September"
    r"|October|November|December)\s+(?:\d{1,2}(?:st|nd|rd|th)?,?\s+)?20\d\d\b"
)


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="a Python that the newest JAX has wheels for")
    parser.add_argument("--folder", type=Path, help="keep the environment here (default: a folder that is removed)")
    parser.add_argument("--pre", action="store_true", help="take pre-releases too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        python = installed(options.python, options.folder or Path(scratch), ["--pre"] if options.pre else [])
        return 1 if looked_at(python) else 0


def installed(python: str, folder: Path, options: Sequence[str]) -> Path:
    """Return the Python of a virtual environment with the newest of all packages of tests/newest.in."""
    lines = (ROOT / "tests" / "newest.in").read_text("utf-8").splitlines()
    names = [line.partition("==")[0] for line in lines if line and not line.startswith("#")]
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    own = folder / "bin" / "python"
    subprocess.run([own, "-m", "pip", "install", "--quiet", "--upgrade", *options, *names], check=True)
    return own


def looked_at(python: Path) -> int:
    """Print what breaks in an environment, and JAX's dates. Return how much breaks."""
    broken = 0
    ask = "from importlib import metadata; print(metadata.version('jaxlib'), *metadata.requires('jax'), sep='\\n')"
    said = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout
    version, *needs = said.splitlines()
    # The newest libtpu may be for a jaxlib that is not there yet.
    libtpu = next((need.partition(";")[0].strip() for need in needs if need.startswith("libtpu")), "libtpu")
    builds = (f"jaxlib=={version}", f"jax-cuda13-pjrt=={version}", "jax-rocm7-pjrt", libtpu)
    looks = {
        **{f"the build of {build}": ["-s", "tools/known_builds.py", "examine", build] for build in builds},
        "private names": ["-s", "tools/private_names.py"],
        **{title: ["-m", "pytest", "-q", "-p", "no:cacheprovider", *words] for title, words in TESTS.items()},
    }
    dated: set[str] = set()
    for title, words in looks.items():
        done = subprocess.run([python, *words], cwd=ROOT, capture_output=True, text=True, check=False)
        said = (done.stdout + done.stderr).splitlines()
        dated.update(deprecations(said))
        print(f"{'ok     ' if done.returncode == 0 else 'BREAKS '} {title}", flush=True)
        for line in said if done.returncode else said[-1:]:
            print(f"        {line}", flush=True)
        broken += done.returncode != 0
    where = "import jax, pathlib; print(pathlib.Path(jax.__file__).parent)"
    jax = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    for line in [*sorted(dated), *dates(Path(jax))]:
        print(f"date    {line}", flush=True)
    return broken


def deprecations(lines: Sequence[str]) -> Iterator[str]:
    """Yield JAX's deprecations in what pytest printed."""
    for line in lines:
        if "DeprecationWarning: " in line and "jax" in line:
            yield line.strip()


def dates(jax: Path) -> Iterator[str]:
    """Yield what comments of `jax.export` and `jax.stages` say of a day, with their place."""
    for file in [*sorted((jax / "_src" / "export").glob("*.py")), jax / "_src" / "stages.py"]:
        comments = enumerate(file.read_text("utf-8").splitlines(), 1)
        for number, line in comments:
            if line.lstrip().startswith("#") and _DATE.search(line) and not line.startswith("# Version"):
                yield f"{file.relative_to(jax)}:{number}: {line.strip(' #')}"


if __name__ == "__main__":
    sys.exit(main())
