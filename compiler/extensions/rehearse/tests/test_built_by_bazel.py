"""What Bazel builds of a rehearsal: the page of `aot_programs` (rules/private/programs.bzl) in examples/rehearsal.

Modules: `stagec_rehearse/commands/program_report.py`, `stagec_rehearse/page.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from compiler.extensions.rehearse.tests.processes import rows, run
from stagec.building.limits import in_bytes
from stagec.jaxcache import jax_entries
from stagec.trust.provenance import BUILDER, LOCAL
from stagec_rehearse import programs
from tests.building import ROOT
from tests.users import needs_isolation

pytestmark = pytest.mark.skipif("STAGEC_PAGE" not in os.environ, reason="Bazel builds it")


def test_the_page_has_all_that_bazel_built() -> None:
    page, cache = Path(os.environ["STAGEC_PAGE"]), Path(os.environ["STAGEC_CACHE"])
    listed = programs.read(str(ROOT / "examples" / "rehearsal" / "rehearsal" / programs.NAME)).programs
    shown = rows(page)
    assert sorted(tuple(cells[4:]) for cells in shown) == sorted(
        (str(each.runs), "cpu-avx2", each.name, each.line) for each in listed
    )
    # A file of the cache has a frame around its executable, of less than a hundred bytes and 5 for each 65535.
    entries = [entry for entry in programs.entries(str(cache)) if entry.module == "jit_step"]
    (name,) = (name for entry in entries for name in entry.names["zlib"].values())
    (step,) = (cells for cells in shown if cells[-2] == "jit_step")
    size = (cache / f"{name}{jax_entries.SUFFIX}").stat().st_size
    assert step[3] in {in_bytes(size - frame) for frame in range(4, 200)}
    assert step[0].endswith("KiB")
    assert not re.search("https?:", page.read_text())


def statement(path: Path) -> dict[str, Any]:
    """A statement without the packages, which are the tests' here, and who built."""
    read: dict[str, Any] = json.loads(path.read_text())
    assert read["predicate"]["runDetails"]["builder"].pop("id") in (BUILDER, LOCAL)
    build = read["predicate"]["buildDefinition"]
    build["resolvedDependencies"] = [each for each in build["resolvedDependencies"] if "uri" not in each]
    return read


@pytest.mark.pinned
def test_the_same_bytes_without_bazel(tmp_path: Path) -> None:
    needs_isolation()
    page, cache = Path(os.environ["STAGEC_PAGE"]), Path(os.environ["STAGEC_CACHE"])
    folder = tmp_path / "workspace" / "examples" / "rehearsal" / "rehearsal"
    shutil.copytree(ROOT / "examples" / "rehearsal" / "rehearsal", folder)
    (tmp_path / "workspace" / "pyproject.toml").touch()
    words = ["--jax-cache", "cache", "--artifacts", "all", "--output", "train.jax_cache.tar", "--statement", "s.json"]
    command = ("-m", "stagec", "build", folder / programs.NAME, "--target", "cpu-avx2", *words)
    done = run(*command, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "store"))
    assert done.returncode == 0, done.stderr
    written = {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    assert written == {path.name: path.read_bytes() for path in cache.iterdir()}
    assert (tmp_path / "all" / page.name).read_bytes() == page.read_bytes()
    assert statement(tmp_path / "s.json") == statement(page.with_name("train.jax_cache.intoto.json"))
