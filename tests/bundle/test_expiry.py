"""Until when exports are readable."""

import re

import pytest

from stagec.bundle.expiry import readable_until
from stagec.core.builds.releases import Release
from tests.building import COMPILER, ROOT


def test_six_months_after_the_release() -> None:
    assert readable_until("0.10.1") == "2026-11-18"
    assert readable_until("0.11.1") == "2027-02-17"


def test_the_end_of_a_shorter_month(monkeypatch: pytest.MonkeyPatch) -> None:
    days = {"1": Release("2026-08-31"), "2": Release("2026-12-31")}
    monkeypatch.setattr("stagec.core.builds.releases.known", lambda: days)
    assert [readable_until(version) for version in "12"] == ["2027-02-28", "2027-06-30"]


def test_a_version_that_is_not_known() -> None:
    assert readable_until("0.9.9") == readable_until(None) == "unknown"


def test_the_day_in_the_readme() -> None:
    locked = re.search(r"^jax==(\S+)", (COMPILER / "requirements.lock").read_text("utf-8"), re.MULTILINE)
    assert locked
    said = re.search(r"(\S+) for (\S+), the default", (ROOT / "README.md").read_text("utf-8"))
    assert said
    assert said.groups() == (readable_until(locked[1]), locked[1])
