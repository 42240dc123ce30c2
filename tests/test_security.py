"""docs/security.md: every promise is attacked, and the attacks that it names are there."""

import re

from tests.building import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text("utf-8")
FOLDERS = (ROOT / "tests", ROOT / "compiler" / "extensions")
TESTS = [
    path for folder in FOLDERS for path in folder.rglob("test_*.py") if "bazel-" not in str(path.relative_to(ROOT))
]


def test_every_attack_that_is_named_is_a_test() -> None:
    functions = (re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.MULTILINE) for path in TESTS)
    known = {*(path.name for path in TESTS), *(name for names in functions for name in names)}
    named = re.findall(r"`(test_[\w.]+)`", PAGE)
    assert len(named) > 30
    assert [name for name in named if name not in known] == []


def test_every_promise_is_attacked() -> None:
    tables = re.findall(r"^\| promise \| by \| attacked by \|\n\|[-| ]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    rows = [row.strip("| ").split(" | ") for table in tables for row in table.splitlines()]
    assert len(tables) >= 5
    assert [row[0] for row in rows if len(row) != 3 or not re.search(r"`tests?[_/]", row[2])] == []
