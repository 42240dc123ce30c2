"""Until when exports are readable."""

import re

import pytest

from stagec.bundle.expiry import RELEASED, readable_until
from tests.building import COMPILER, ROOT


def test_six_months_after_the_release() -> None:
    assert readable_until("0.10.1") == "2026-11-18"
    assert readable_until("0.11.1") == "2027-02-17"


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
