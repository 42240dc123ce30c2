"""A short run of tests/bundle/fuzz.py, which says what is changed and what must happen then."""

import json
from pathlib import Path

from stagec.runtime.archive import Archive
from tests.bundle.fuzz import SUBJECTS, fuzz, small_bundle

MUTATIONS = 3000


def test_the_bundle_that_is_changed_has_members_of_every_kind(zoo: Path) -> None:
    archive = Archive("x", small_bundle(zoo.parent))
    members = list(archive.index["members"])
    kinds = {name.partition("/")[0] if "/" in name else name.rpartition(".")[2] for name in members}
    assert kinds == {"exported", "xla", "json", "mlirbc", "weights", "golden"}
    assert any("abi" in json.loads(archive[name]) for name in members if name.endswith(".json"))


def test_changed_artifacts_are_refused(zoo: Path) -> None:
    ends, faults = fuzz(zoo.parent, MUTATIONS)
    assert faults == []
    assert sum(ends.values()) == MUTATIONS
    for subject, _ in SUBJECTS:
        assert any(how.startswith(f"{subject.__name__}, refused") for how in ends)
