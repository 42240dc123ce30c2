"""Until when exports are readable, and what a build says before that."""

import datetime

import pytest

from stagec.bundle.archive import Archive
from stagec.bundle.expiry import ends_soon, newer_jax, readable_until
from stagec.cli.actions import bundle
from stagec.core.builds import releases
from stagec.core.builds.releases import Release
from tests.building import ROOT


def test_six_months_after_the_release() -> None:
    assert readable_until("0.10.1") == "2026-11-18"
    assert readable_until("0.11.1") == "2027-02-17"


def test_the_end_of_a_shorter_month(monkeypatch: pytest.MonkeyPatch) -> None:
    days = {"1": Release("2026-08-31"), "2": Release("2026-12-31")}
    monkeypatch.setattr("stagec.core.builds.releases.known", lambda: days)
    assert [readable_until(version) for version in "12"] == ["2027-02-28", "2027-06-30"]


def test_a_version_that_is_not_known() -> None:
    assert readable_until("0.9.9") == readable_until(None) == "unknown"


def test_it_ends_soon() -> None:
    day = datetime.date(2026, 12, 17)
    ninety = day - datetime.timedelta(days=90)
    assert [ends_soon("2026-12-17", today) for today in (ninety, ninety + datetime.timedelta(days=1))] == [False, True]
    assert ends_soon("2026-12-17", day + datetime.timedelta(days=1))
    assert not ends_soon("unknown", day)


def test_what_to_lock_then() -> None:
    *_, before, newest = releases.known()
    lock = (
        "write jax=={0} and jaxlib=={0} into requirements.in, and run bazel run @stagec//:lock -- requirements.in\n"
        "without Bazel: python3 -m pip install jax=={0} jaxlib=={0}"
    )
    assert newer_jax("0.10.2", ["0.10.2", before]) == lock.format(before)
    python = "this Python has no newer jax: take a newer Python (for Bazel: STAGEC_PYTHON=/path/to/python3)\n"
    assert newer_jax("0.10.2", ["0.10.1", "0.10.2"]) == python + lock.format(newest)
    assert newer_jax(newest, [newest]) == newer_jax("99.0", []) == "upgrade stagec: this one knows no newer jax"


def test_what_a_build_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a bundle of the corpus: its day is over, whatever today is."""
    bundle._warn_of_an_end(Archive(ROOT / "tests" / "corpus" / "2026-11-bundles" / "several.aot").index, [])
    said = capsys.readouterr().err
    what = "JAX promises that its releases until 2026-11-18 read what jax 0.10.1 exports; later ones may refuse it"
    assert said.startswith(f"warning: {what}\n  ")
    assert "==0.1" in said
