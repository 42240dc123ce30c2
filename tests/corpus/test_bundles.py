"""Bundles of every format that docs/releases.md promises to read, as they were written then."""

import json
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jaxlib
import numpy as np
import pytest

import stagec
from stagec.bundle import archive
from stagec.bundle.archive import INDEX
from stagec.core.builds.version import VERSION
from tests.building import checked, stagec as command
from tests.bundles import edited_index
from tests.corpus import write_bundles

FOLDERS = sorted(path for path in Path(__file__).parent.glob("*-bundles") if path.is_dir())
BUNDLES = [path for folder in FOLDERS for path in sorted(folder.glob("*.aot"))]
PLAIN = FOLDERS[-1] / "plain.aot"
X = np.array([1, 2, 3], np.float32)
BOUND = np.array([1, 2, 4], np.float32)
"""The weights of the function `shift`."""
WRITTEN_WITH = "0.10.1"
"""The jaxlib of the corpus so far."""


def index_of(path: Path) -> dict[str, object]:
    with zipfile.ZipFile(path) as file:
        return dict(json.loads(file.read(INDEX)))


def functions_of(path: Path) -> Mapping[str, Callable[..., Any]]:
    """Return the functions of a bundle.

    The loader must refuse a jaxlib that was released after the day until which JAX promises to read its artifacts. Such
    an artifact is then read as itself, which nobody promises, and which works as long as XLA reads it.
    """
    try:
        return stagec.load(path)
    except stagec.LoadError as refusal:
        if jaxlib.__version__ == WRITTEN_WITH or refusal.code != "expired":
            raise
        files = archive.Archive(path)
        return {
            name: partial(stagec.Exported.deserialize(files[one["exported"]]).call, *([BOUND] if one["bind"] else []))
            for name, one in files.index["functions"].items()
        }


@pytest.mark.parametrize("path", BUNDLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_old_bundle_is_read_and_run(path: Path) -> None:
    assert path.stem == index_of(path)["name"]
    assert command("verify", path).returncode == 3  # whole, and nobody was asked who made it
    assert checked("inspect", path).startswith(f"bundle {path.stem} 1: ")
    functions = functions_of(path)
    if "shift" in functions:
        np.testing.assert_array_equal(functions["shift"](X), X + 7)
    if "keyed" in functions:
        result = functions["keyed"]({1: X[:2], 5: X[1:]})
        np.testing.assert_array_equal(result[1], X[:2] + 1)
        np.testing.assert_array_equal(result[5], X[1:] * 2)


def test_the_format_that_is_read_is_in_the_corpus() -> None:
    """If you make a new format, write its bundles into a new folder. Drop a format only after the next one."""
    assert {index_of(path)["format"] for path in BUNDLES} == {archive.FORMAT}
    assert {path.stem for path in BUNDLES} == {*write_bundles.MANIFESTS}


def test_another_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    newer = {"format": 99, "versions": {"stagec": "7.8.9"}}
    path = edited_index(PLAIN, tmp_path / "x.aot", lambda index: index.update(newer))
    with pytest.raises(stagec.LoadError) as refusal:
        stagec.load(path)
    assert refusal.value.code == "format"
    assert str(refusal.value) == (
        f"{path}: index.json: its format is 99, and this stagec reads 1: "
        f"build it again with stagec {VERSION}, or read it with stagec 7.8.9, which wrote it"
    )


@pytest.mark.parametrize(
    ("version", "what"),
    [
        (
            "1000.0.0",
            f"versions.stagec: stagec 1000.0.0 wrote it, and this is {VERSION}, which reads what 0 and older wrote",
        ),
        ("0.999.0", ""),
        ("new", "versions.stagec: expected a version such as 1.2.3, not 'new'"),
    ],
)
def test_the_version_that_wrote_a_bundle_is_looked_at(tmp_path: Path, version: str, what: str) -> None:
    """Another major version may mean other things by the same format: docs/releases.md promises no more."""

    path = edited_index(PLAIN, tmp_path / "x.aot", lambda index: index.update(versions={"stagec": version}))
    if not what:
        functions_of(path)
        return
    with pytest.raises(stagec.LoadError) as refusal:
        stagec.load(path)
    assert refusal.value.code == "format"
    assert what in str(refusal.value)
