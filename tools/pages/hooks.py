"""What MkDocs calls while it builds the site: pages outside docs/ become pages too, and linked sources are copied.

In the repository a page links files by relative paths. On the site the same links work: README is its first page, so
docs/index.md has another name there; the other pages outside docs/ keep their paths, and a source file that a page
links is copied to `source/`, as text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "ARCHITECTURE.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "benchmarks/README.md": "benchmarks/README.md",
    "docs/index.md": "pages.md",
    "examples/transformer/README.md": "examples/transformer/README.md",
}
"""Pages whose path on the site is another than in docs/: path in the repository -> path on the site."""

BOOST = {"manifest.md": 2.0, "ARCHITECTURE.md": 0.5, "CHANGELOG.md": 0.5}
"""Pages on the site whose sections a search puts further up (above 1) or further down."""

_LINK = re.compile(r"(?<=\]\()([^)\s:#]+)(#[^)\s]*)?(?=\))")
_PICTURES = (".svg", ".png")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, and the files that any page links."""
    from mkdocs.structure.files import File

    root = _root(config)
    pages = {f"docs/{file.src_uri}": file.src_uri for file in files.documentation_pages()} | OUTSIDE
    for path, uri in OUTSIDE.items():
        if there := files.get_file_from_path(uri):  # docs/index.md, where README goes
            files.remove(there)
        files.append(File.generated(config, uri, content=(root / path).read_text("utf-8")))
    for path in pages:
        for target, _ in _LINK.findall((root / path).read_text("utf-8")):
            linked = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
            uri = _on_site(linked, pages)
            if (root / linked).is_file() and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(root / linked)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page with links as they are on the site. A broken link stays as it is, for MkDocs to report.

    Also say how high a search puts the page, which a file in the repository would show as text.
    """
    uri = page.file.src_uri
    page.meta |= {"search": {"boost": BOOST.get(uri, 1.0)}}
    there = {site: path for path, site in OUTSIDE.items()}
    path = there.get(uri, f"docs/{uri}")
    pages = {f"docs/{file.src_uri}": file.src_uri for file in files.documentation_pages()} | OUTSIDE

    def moved(match: re.Match[str]) -> str:
        linked = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        target = posixpath.relpath(_on_site(linked, pages), posixpath.dirname(uri) or ".")
        return f"{target}{match[2] or ''}" if (_root(config) / linked).is_file() else match[0]

    return _LINK.sub(moved, markdown)


def _on_site(path: str, pages: dict[str, str]) -> str:
    """Return where a file of the repository is on the site."""
    if path in pages or path.startswith("docs/"):
        return pages.get(path, path.removeprefix("docs/"))
    return f"source/{path}" if path.endswith(_PICTURES) else f"source/{path}.txt"


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent
