"""Until when exports are readable."""

import pytest

from stagec.bundle.expiry import readable_until
from stagec.core.builds.releases import Release


def test_six_months_after_the_release() -> None:
    assert readable_until("0.10.1") == "2026-11-18"
    assert readable_until("0.11.1") == "2027-02-17"


def test_the_end_of_a_shorter_month(monkeypatch: pytest.MonkeyPatch) -> None:
    days = {"1": Release("2026-08-31"), "2": Release("2026-12-31")}
    monkeypatch.setattr("stagec.core.builds.releases.known", lambda: days)
    assert [readable_until(version) for version in "12"] == ["2027-02-28", "2027-06-30"]


def test_a_version_that_is_not_known() -> None:
    assert readable_until("0.9.9") == readable_until(None) == "unknown"
