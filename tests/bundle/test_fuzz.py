"""A short run of tests/bundle/fuzz.py, which says what is changed and what must happen then."""

from pathlib import Path

from tests.bundle.fuzz import SUBJECTS, fuzz

MUTATIONS = 3000


def test_changed_artifacts_are_refused(zoo: Path) -> None:
    ends, faults = fuzz(zoo.parent, MUTATIONS)
    assert faults == []
    assert sum(ends.values()) == MUTATIONS
    for subject, _ in SUBJECTS:
        assert any(how.startswith(f"{subject.__name__}, refused") for how in ends)
