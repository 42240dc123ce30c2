"""Until when exports are readable."""

import re
import runpy
import zipfile
from pathlib import Path

import pytest

from stagec.bundle import expiry
from stagec.bundle.expiry import RELEASED, readable_until, released
from stagec.patches import known_builds
from tests.building import COMPILER, ROOT
from tools import known_builds as known_builds_tool


def test_six_months_after_the_release() -> None:
    assert readable_until("0.10.1") == "2026-11-18"
    assert readable_until("0.11.1") == "2027-02-17"


def test_the_day_of_each_release_that_compiles_is_known() -> None:
    """Where it is not, the loader cannot say whether JAX promises that it reads an artifact."""
    versions = {build.version for build in known_builds.rows() if build.library == "libjax_common.so"}
    assert versions <= RELEASED.keys()
    assert all(released(version) for version in RELEASED)
    assert released("9.9.9") is None


def test_the_tool_writes_the_day_of_a_new_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "expiry.py"
    table.write_bytes(Path(expiry.__file__).read_bytes())
    with zipfile.ZipFile(tmp_path / "jaxlib.whl", "w") as wheel:
        wheel.writestr(zipfile.ZipInfo("jaxlib/__init__.py", (2027, 1, 9, 10, 11, 12)), "")
    monkeypatch.setattr(expiry, "__file__", str(table))
    for version in ("0.13.0", "0.10.1"):  # the second is there
        known_builds_tool.write_day(version, known_builds_tool.released(tmp_path / "jaxlib.whl"))
    written = runpy.run_path(str(table))["RELEASED"]
    assert written == {**RELEASED, "0.13.0": "2027-01-09"}


def test_the_end_of_a_shorter_month(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagec.bundle.expiry.RELEASED", {"1": "2026-08-31", "2": "2026-12-31"})
    assert [readable_until(version) for version in "12"] == ["2027-02-28", "2027-06-30"]


def test_a_version_that_is_not_known() -> None:
    assert readable_until("0.9.9") == readable_until(None) == "unknown"


@pytest.mark.parametrize("lock", [COMPILER / "requirements.lock", ROOT / "tests" / "newest.lock"], ids=lambda p: p.name)
def test_the_versions_that_the_locks_pin(lock: object) -> None:
    pinned = re.search(r"^jax==(\S+)", lock.read_text(), re.MULTILINE)  # type: ignore[attr-defined]
    assert pinned
    assert pinned[1] in RELEASED
