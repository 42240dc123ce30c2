"""The exact words of messages, in one file beside the tests: a better sentence is one command, and no search in tests.

A test asserts itself where a problem is, by its key, and what of the advice a user can copy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from stagec.core.messages.errors import StagecError
from tests.building import ROOT

WRITE = "STAGEC_WRITE_MESSAGES"
"""The variable that writes the file again, with the messages of all tests that run."""


class Messages:
    """The file: the name of a test, and below it what is said there."""

    def __init__(self, file: Path) -> None:
        self._file, self._writes = file, WRITE in os.environ
        text = "" if self._writes else file.read_text("utf-8")
        self.known = dict(re.findall(r"^## ([^\n]*)\n(.*?)\n(?=\n## |\Z)", text, re.MULTILINE | re.DOTALL))

    def check(self, test: pytest.Item, refusal: StagecError, expected: Sequence[str]) -> None:
        """Assert what a refusal says.

        expected: for each problem its key; behind " -> " what is in its advice.
        """
        for problem, line in zip(refusal.problems, expected, strict=True):
            key, _, advice = line.partition(" -> ")
            assert problem.key == key
            assert advice in problem.write
            assert problem.write
        if self._writes:
            self.known[test.name] = str(refusal)
            self._file.write_text("\n".join(f"## {name}\n{text}\n" for name, text in self.known.items()), "utf-8")
        said = f"it says\n{refusal}\nif these words are right: {WRITE}=1 pytest {test.path.parent.relative_to(ROOT)}"
        assert self.known.get(test.name) == str(refusal), said
