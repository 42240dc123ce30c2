"""`stagec action call`: what an older jaxlib made is called here, and described for this jaxlib where it is right.

Modules: `checking/crossing.py`, `cli/actions/call.py`.
"""

from pathlib import Path

import jaxlib
import numpy as np
import pytest

from stagec.bundle.archive import Archive
from stagec.bundle.description import Description
from tests.building import ROOT, checked, stagec

BUNDLE = ROOT / "tests" / "corpus" / "2026-11-bundles" / "plain.aot"


@pytest.fixture
def words(tmp_path: Path) -> list[str | Path]:
    """The command for an executable of jaxlib 0.10.1, whose results are there: they are those of this jaxlib."""
    archive = Archive(BUNDLE)
    (entry, *_) = archive.index["functions"]["shift"]["executables"]
    for which in ("executable", "description"):
        (tmp_path / which).write_bytes(archive[entry[which]])
    command = ["action", "call", f"--executable={tmp_path / 'executable'}"]
    checked(*command, f"--description={of_jaxlib(tmp_path, jaxlib.__version__)}", "--output", tmp_path / "results")
    return [*command, f"--description={tmp_path / 'description'}"]


def of_jaxlib(folder: Path, release: str) -> Path:
    """Write the description as if another release had compiled the executable; return the file."""
    file = folder / f"description.{release}"
    described = Description.from_json((folder / "description").read_bytes())
    file.write_text(described._replace(versions={**described.versions, "jaxlib": release}).to_json())
    return file


def test_an_executable_is_described_for_this_jaxlib(words: list[str | Path], tmp_path: Path) -> None:
    results, described = tmp_path / "results", tmp_path / "described"
    checked(*words, "--output", described, "--results", results)
    before, after = (Description.from_json(file.read_bytes()) for file in (tmp_path / "description", described))
    assert (before.versions["jaxlib"], after.versions["jaxlib"]) == ("0.10.1", jaxlib.__version__)
    assert after == before._replace(versions=after.versions)


def test_results_that_are_not_right(words: list[str | Path], tmp_path: Path) -> None:
    results = tmp_path / "results"
    array = np.frombuffer(results.read_bytes(), np.float32)
    last = ["--output", tmp_path / "described", "--results", results, "--label=//m:m.shift"]
    for given, said in (
        (array * np.float32(1 + 1e-6), ""),
        (array + np.float32(1), "result has a largest error of 1, relative "),
        (np.full_like(array, np.nan), "result has a largest error of inf, relative inf"),
        (array[1:], "it has results of other sizes"),
    ):
        results.write_bytes(given.tobytes())
        done = stagec(*words, *last)
        assert (done.returncode == 0) == (not said), done.stderr
        if said:
            what, write = done.stderr.splitlines()
            assert what.startswith(f"//m:m.shift: with jaxlib {jaxlib.__version__}: {said}")
            assert what.endswith(": manifest.runs_on)")
            assert (
                write == f'  compile it for that release: jaxlib = ["0.10.1", "{jaxlib.__version__}"] (docs/fleet.md)'
            )
    (tmp_path / "executable").write_bytes(b"")
    done = stagec(*words, *last)
    assert "it is not the executable of its description" in done.stderr


@pytest.mark.parametrize("release", [jaxlib.__version__, "999.0.0"])
def test_a_release_runs_what_an_older_one_made(words: list[str | Path], tmp_path: Path, release: str) -> None:
    described = f"--description={of_jaxlib(tmp_path, release)}"
    done = stagec(*words[:-1], described, "--output", tmp_path / "described", "--results", tmp_path / "results")
    here = jaxlib.__version__
    what = f"jaxlib {release} made it, and here is {here}: a release runs what an older one made"
    assert done.returncode == 2
    assert done.stderr == f"m.toml: manifest.runs_on: {what}\n  leave this release out of runs_on: {here}\n"
    assert not (tmp_path / "described").exists()


def test_results_are_of_the_release_that_made_it(words: list[str | Path], tmp_path: Path) -> None:
    done = stagec(*words, "--output", tmp_path / "again")
    assert done.returncode == 2
    assert "jaxlib 0.10.1 made it, and here is " in done.stderr
    assert done.stderr.splitlines()[1:] == ["  call it with jaxlib 0.10.1"]
