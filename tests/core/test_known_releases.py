"""The table of releases has a row for each that we lock, and the tool adds one.

Modules: `core/builds/releases.py`.
"""

import dataclasses
import datetime
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import jaxlib
import pytest
from jaxlib.mlir.dialects import stablehlo

from stagec.backends.cpu import defects
from stagec.core.builds import releases
from stagec.core.builds.releases import Release
from stagec.patches import known_builds
from tests.building import COMPILER, ROOT
from tools import known_builds as known_builds_tool

LOCKS = sorted([*COMPILER.glob("*.lock"), *(ROOT / "tests").glob("*.lock")])


def test_each_release_that_we_lock_has_a_row() -> None:
    pins = {pin for lock in LOCKS for pin in re.findall(r"^(?:jax|jaxlib)==(\S+)", lock.read_text(), re.MULTILINE)}
    assert len(pins) > 2
    assert pins <= releases.known().keys()
    plugins = {pin for lock in LOCKS for pin in re.findall(r"^libtpu==(\S+)", lock.read_text(), re.MULTILINE)}
    wheels = [release.wheels["libtpu"] for release in releases.known().values()]
    assert plugins
    assert all(any(f"{pin}.".startswith(f"{wheel}.") for wheel in wheels) for pin in plugins)


def test_the_rows_make_sense() -> None:
    days = [datetime.date.fromisoformat(release.day) for release in releases.known().values()]
    assert days == sorted({*days})
    issues = {issue for release in releases.known().values() for issue in release.defects}
    assert issues == {defect.issue for defect in defects.DEFECTS}
    assert releases.release("9.9.9") == Release("")
    assert releases.release(jaxlib.__version__).stablehlo == stablehlo.get_current_version()


def test_the_oldest_release_decides_which_stablehlo_all_read() -> None:
    assert releases.stablehlo_for(["0.12.0", "0.10.2", "0.11.0"]) == "1.17.0"
    assert releases.stablehlo_for(["0.12.0", "9.9.9"]) == "1.22.0"
    assert releases.stablehlo_for(["9.9.9"]) is releases.stablehlo_for([]) is None


def test_the_tool_writes_the_row_of_a_new_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, before = tmp_path / "releases.toml", releases.known()
    table.write_bytes(releases.FILE.read_bytes())
    with zipfile.ZipFile(tmp_path / "jaxlib.whl", "w") as wheel:
        wheel.writestr(zipfile.ZipInfo("jaxlib/__init__.py", (2027, 1, 9, 10, 11, 12)), "")
    monkeypatch.setattr(releases, "FILE", table)
    for version in ("0.13.0", "0.10.1"):  # the second is there
        known_builds_tool.write_release(version, known_builds_tool.released(tmp_path / "jaxlib.whl"), "1.23.0")
    monkeypatch.setattr(releases, "known", releases.known.__wrapped__)
    assert releases.known() == {**before, "0.13.0": Release("2027-01-09", stablehlo="1.23.0")}


def test_a_wheel_is_tried_without_a_row_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, run, tables = known_builds.TABLE.read_bytes(), subprocess.run, []
    row = known_builds.Build("libjax_common.so", "0.13.0", known_builds.python_tag(), "new", {}, [])

    def trying(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "stagec.building.examination" not in command:
            return run(command, **options)
        assert known_builds.TABLE.read_bytes() == before
        ask = "from stagec.patches import known_builds; print(*(row.build_id for row in known_builds.rows()))"
        tables.append(run([sys.executable, "-c", ask], **options).stdout.split())
        return subprocess.CompletedProcess(command, 0, json.dumps(dataclasses.asdict(row)), "")

    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("jaxlib/__init__.py", "")
    monkeypatch.setattr(known_builds_tool, "pip", lambda *_: None)
    monkeypatch.setattr(subprocess, "run", trying)
    made = known_builds_tool.tried(tmp_path / "a.whl", row, sys.executable, "")
    assert made == dataclasses.replace(row, tested=made.tested)
    assert [{*ids} for ids in tables] == [{"new", *(known.build_id for known in known_builds.rows())}]
