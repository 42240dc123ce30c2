"""The pages of docs/ that have a generated part: all after the line `<!-- Generated ... -->`."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
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
        """Return the page as it should be: the part that people write as it is, and the other part new."""
        text = (root / self.path).read_text("utf-8")
        (marker,) = re.findall(r"^<!-- Generated .*-->$", text, re.MULTILINE)
        return f"{text.partition(marker)[0]}{marker}\n\n{_linked(self.generate(root), root / 'docs')}"

    def write(self, root: Path) -> None:
        """Write the page as it should be."""
        (root / self.path).write_text(self.current(root), "utf-8")


def title(page: Path) -> str:
    """Return the title of a page: its first heading."""
    return page.read_text("utf-8").partition("# ")[2].partition("\n")[0]


def _linked(text: str, docs: Path) -> str:
    """Return a text with links to the pages that it names: those of stagec by their titles, and those of JAX."""
    text = re.sub(r"\bdocs/([\w-]+\.md)\b", lambda match: f"[{title(docs / match[1])}]({match[1]})", text)
    return re.sub(r"\((https://docs\.jax\.dev/[^\s)]+)\)", r"([JAX's page](\1))", text)


def _manifest(root: Path) -> str:
    return manifest_reference.as_markdown(json.loads((root / "docs/manifest.schema.json").read_text("utf-8")))


def _python(names: Sequence[str], root: Path) -> str:
    from tools.pages import python_reference  # needs griffe, which is installed for the site alone

    return python_reference.as_markdown(root, names)


PYTHON: Mapping[str, Sequence[str]] = {
    "docs/python.md": (
        *("load", "build", "Bundle", "Function", "device_put", "from_dlpack", "devices"),
        *("make_array_from_single_device_arrays", "distributed", "make_array_from_process_local_data"),
        *("PyTreeNode", "LoadError", "CallError", "RunError"),
    ),
    "docs/python-stages.md": (
        *("jit", "Wrapped", "Traced", "Lowered", "Compiled", "Exported", "Mesh", "PartitionSpec", "NamedSharding"),
        *("StagecError", "CannotLower", "CannotCompile", "NotExported"),
    ),
    "docs/python-arrays.md": (
        *("ShapeDtypeStruct", "symbolic_shape", "enable_x64", "default_matmul_precision"),
        *("grad", "value_and_grad", "vjp", "custom_vjp", "stop_gradient"),
        *("checkpoint", "checkpoint_policies", "checkpoint_name"),
        *("register_dataclass", "register_pytree_node", "set_mesh", "shard_map"),
    ),
}
"""A page of the Python API -> the public names on it, the most common first."""
PAGES = (
    Page("docs/manifest.md", _manifest),
    Page("docs/rules.md", rules_reference.as_markdown),
    *(Page(path, functools.partial(_python, names)) for path, names in PYTHON.items()),
)
