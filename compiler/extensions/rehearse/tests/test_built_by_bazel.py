"""What Bazel builds of a rehearsal: the page of `aot_programs` (rules/private/programs.bzl) in examples/rehearsal.

Modules: `stagec_rehearse/commands/program_report.py`, `stagec_rehearse/page.py`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from compiler.extensions.rehearse.tests.processes import rows
from stagec.building.limits import in_bytes
from stagec.jaxcache import jax_entries
from stagec_rehearse import programs
from tests.building import ROOT


@pytest.mark.skipif("STAGEC_PAGE" not in os.environ, reason="Bazel builds it")
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
