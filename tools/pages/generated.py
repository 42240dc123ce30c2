"""The pages of docs/ that have a generated part: all after the line `<!-- Generated ... -->`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.pages import manifest_reference, rules_reference


@dataclass(frozen=True)
class Page:
    """A page, and what writes its generated part.

    path: in the repository.
    generate: the repository's folder -> the Markdown after the marker.
    """

    path: str
    generate: Callable[[Path], str]

    def current(self, root: Path) -> str:
        """Return the page as it should be: the part that people write as it is, the other part anew."""
        text = (root / self.path).read_text("utf-8")
        (marker,) = re.findall(r"^<!-- Generated .*-->$", text, re.MULTILINE)
        return f"{text.partition(marker)[0]}{marker}\n\n{self.generate(root)}"

    def write(self, root: Path) -> None:
        """Write the page as it should be."""
        (root / self.path).write_text(self.current(root), "utf-8")


def _manifest(root: Path) -> str:
    return manifest_reference.as_markdown(json.loads((root / "docs/manifest.schema.json").read_text("utf-8")))


def _python(root: Path) -> str:
    from tools.pages import python_reference  # needs griffe, which is installed for the site alone

    return python_reference.as_markdown(root)


PAGES = (
    Page("docs/manifest.md", _manifest),
    Page("docs/python.md", _python),
    Page("docs/rules.md", rules_reference.as_markdown),
)
