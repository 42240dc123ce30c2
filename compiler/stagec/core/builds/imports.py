"""Read the names that modules import, and find the function's files with those names.

A new file then causes no rebuild of functions that do not look for it. This need not find every name: the export
notices what a model imports in other ways (`frontends/common/reads.py`).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from stagec.core.sizes import expressions

WHY = "# built again whenever a file is added: "
"""The mark before the reason, in the file that lists the paths that a function did not read."""
_ALL = "*"
"""Instead of a name: all names of a folder, as `from package import *` may take them."""
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_CACHED = "__pycache__"


class Looked(NamedTuple):
    """The names that a function's import looks for, by the paths of folders in its action.

    names: folder -> name that it looks for there -> the paths below the folder that exist for this name.
    roots: import root -> everything that is in it, because any package may look for any name there.
    """

    names: Mapping[str, Mapping[str, Sequence[str]]]
    roots: Mapping[str, Sequence[str]]

    def to_json(self) -> str:
        """Return the canonical JSON form."""
        return json.dumps(self._asdict(), sort_keys=True, indent=0) + "\n"

    def has_path(self, path: str) -> bool:
        """Return whether adding this path would change the result.

        It does if a root has no such file or folder yet, or if all names of its folder, or below it, count. For byte
        code it does if the function looks for the source.
        """
        folder, _, name = path.rpartition("/")
        if _ALL in {**self.names.get(path, {}), **self.names.get(folder, {})}:
            return True
        if folder.rpartition("/")[2] == _CACHED:
            source = f"{folder.removesuffix(_CACHED)}{_stem(name)}".removesuffix("/__init__")
            folder, _, name = source.rpartition("/")
            return self.has(folder or ".", name)
        for root, there in self.roots.items():
            start = "" if root == "." else f"{root}/"
            inside = path.startswith(start) and (start or not path.startswith("../"))
            if path == root or (inside and path.removeprefix(start).partition("/")[0] not in there):
                return True
        return False

    def has(self, folder: str, name: str) -> bool:
        """Return whether a new file for this name in this folder would change the result."""
        looked = self.names.get(folder, {})
        if name in looked or _ALL in looked:
            return True
        if folder in self.roots:  # of a name that a root has, a file and a folder are two things
            return name not in {_stem(there) for there in self.roots[folder]}
        return self.has_path(folder)


def from_json(text: str) -> Looked:
    """Read the JSON form of `Looked.to_json`."""
    return Looked(**json.loads(text))


class Files:
    """The files that functions may import and read."""

    def __init__(self, paths: Iterable[str], roots: Iterable[str], read: Callable[[str], bytes]) -> None:
        """Take the paths of files and of import roots. read: returns the content of a file; raises OSError."""
        self._roots = [root.removesuffix("/") or "." for root in roots]
        self._read = read
        self._below: dict[str, set[str]] = {}
        self._imported: dict[tuple[str, str], list[tuple[str, bool]]] = {}
        for path in paths:
            folder = path
            while folder:
                folder, _, name = folder.rpartition("/")
                self._below.setdefault(folder or ".", set()).add(name)

    def looked_for(self, modules: Iterable[str]) -> Looked:
        """Return the names that these modules look for, and all their imports."""
        names: dict[str, dict[str, list[str]]] = {}
        waiting, done = [(module, False) for module in modules], set[tuple[str, bool]]()
        while waiting:
            module, takes_all = waiting.pop()
            if (module, takes_all) in done:
                continue
            done.add((module, takes_all))
            for root in self._roots:
                waiting += self._follow(root, module, takes_all, names)
        return Looked(names, {root: sorted(self._below.get(root, ())) for root in self._roots})

    def _follow(
        self, root: str, module: str, takes_all: bool, names: dict[str, dict[str, list[str]]]
    ) -> Iterator[tuple[str, bool]]:
        """Note where Python looks for a module; yield the imports of the sources on the way."""
        folder, parent = root, ""
        for name in module.split("."):
            there = names.setdefault(folder, {})[name] = self._there(folder, name)
            if not there:  # then nothing below it exists either
                return
            parent = f"{parent}.{name}" if parent else name
            folder = _join(folder, name)
            yield from self._imports_of(f"{folder}.py", parent, parent.rpartition(".")[0])
            yield from self._imports_of(_join(folder, "__init__.py"), parent, parent)
        if takes_all and folder in self._below:
            looked = names.setdefault(folder, {})
            looked.update({stem: self._there(folder, stem) for stem in map(_stem, self._below[folder])})
            looked[_ALL] = sorted(self._below[folder])

    def _there(self, folder: str, name: str) -> list[str]:
        """Return the paths that Python may use for a name: files, a folder, files that make it a package, byte code."""
        inner = _join(folder, name)
        there = [file for file in self._below.get(folder, ()) if _stem(file) == name]
        for where, stem in ((_CACHED, name), (name, "__init__"), (f"{name}/{_CACHED}", "__init__")):
            there += [f"{where}/{file}" for file in self._below.get(_join(folder, where), ()) if _stem(file) == stem]
        return sorted([*there, *([f"{name}/"] if inner in self._below else [])])

    def _imports_of(self, source: str, module: str, package: str) -> list[tuple[str, bool]]:
        """Return the modules that a source names, each with whether all of it is taken."""
        folder, _, name = source.rpartition("/")
        if name not in self._below.get(folder or ".", ()):
            return []
        if (source, module) not in self._imported:
            try:
                tree = expressions.module(self._read(source).decode())
            except (OSError, ValueError):  # the export reports it
                tree = ast.Module([], [])
            self._imported[source, module] = list(_imports(tree, package))
        return self._imported[source, module]


def _imports(tree: ast.AST, package: str) -> Iterator[tuple[str, bool]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*filter(None, above), *([node.module] if node.module else [])])
            if base:
                yield base, any(alias.name == _ALL for alias in node.names)
                yield from ((f"{base}.{alias.name}", False) for alias in node.names if alias.name != _ALL)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _MODULE.fullmatch(node.value):
            yield node.value, True  # importlib may get it, or importlib.resources


def _join(folder: str, name: str) -> str:
    return name if folder == "." else f"{folder}/{name}"


def _stem(name: str) -> str:
    return name.partition(".")[0]
