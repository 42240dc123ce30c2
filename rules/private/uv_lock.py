"""Reads a uv.lock: what this interpreter installs of it, as a requirements file with hashes.

It has all packages of a project, for all systems and Pythons:
https://docs.astral.sh/uv/concepts/projects/layout/#the-lockfile. `uv export` would read the pyproject.toml of the
project and of each member too.
"""

from __future__ import annotations

import platform
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NAME = "uv.lock"
_FORMAT = 1
# Kinds of sources that are files of the workspace: their modules are `deps` of a function, which Bazel watches.
_OF_WORKSPACE = ("directory", "editable", "virtual")

Package = Mapping[str, Any]


class Refused(Exception):
    """The lock cannot be used. The string has all problems, each with what to write."""


def requirements(text: str, display: str, groups: Sequence[str], architecture: str) -> tuple[str, list[str]]:
    """Return a requirements file with hashes for this interpreter, and the projects beside that are not in it.

    Raises Refused.

    display: what messages call the lock. groups: dependency groups and extras of the project to install besides its
    dependencies. architecture: that of the packages, as `uname -m` has it.
    """
    try:
        lock = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Refused(f"{display}: {error}\n  write it again: uv lock") from error
    if lock.get("version") != _FORMAT:
        raise Refused(
            f"{display}: its format is {lock.get('version')}, and this stagec reads {_FORMAT}: upgrade stagec"
        )
    if "conflicts" in lock:
        raise Refused(
            f"{display}: its project declares groups or extras that conflict, and stagec does not read their markers\n"
            "  export those that you build with: uv export --no-emit-workspace --output-file requirements.lock"
        )
    try:
        reader = _Reader(lock, display, architecture)
        reader.walk([re.sub(r"[-_.]+", "-", group).lower() for group in groups])
        if reader.problems:
            raise Refused("\n".join(dict.fromkeys(reader.problems)))
        return reader.written()
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
        # Also markers and versions that this pip does not read: `platform_release` of some kernels is not a version.
        raise Refused(f"{display}: {type(error).__name__}: {error}\n  write it again: uv lock") from error


class _Reader:
    """What a walk from the project finds. problems: sentences for the user. chosen: packages by name."""

    def __init__(self, lock: Package, display: str, architecture: str) -> None:
        try:
            from pip._vendor.packaging.markers import Marker
            from pip._vendor.packaging.specifiers import SpecifierSet
        except ImportError as error:
            raise Refused(f"{display}: the pip of {sys.executable} cannot read its markers: {error}") from error
        self.marker, self.environment = Marker, {"extra": "", "platform_machine": architecture}
        self.display = display
        self.problems: list[str] = []
        self.chosen: dict[str, Package] = {}
        self.roots: set[str] = set()
        self.packages: dict[str, list[Package]] = {}
        for package in lock.get("package", []):
            self.packages.setdefault(package["name"], []).append(package)
        python = platform.python_version()
        wanted = lock.get("requires-python", "")
        if not SpecifierSet(wanted).contains(python, prereleases=True):
            self.problems.append(
                f"{display}: it is for Python {wanted}, and this one, {sys.executable}, is {python}\n"
                "  name another: STAGEC_PYTHON=/path/to/python3, or python = of stagec.python where it has one"
            )
        systems = lock.get("supported-markers", [])
        if systems and not any(map(self._holds, systems)):
            self.problems.append(
                f"{display}: it is for {' or '.join(systems)} (tool.uv.environments), and not for this system\n"
                "  add this one there, and run uv lock"
            )

    def _holds(self, marker: str | None) -> bool:
        """Whether a marker is true for this interpreter; None is."""
        return not marker or self.marker(marker).evaluate(self.environment)

    def walk(self, groups: Sequence[str]) -> None:
        """Choose what the project and its groups need; a workspace without a project: what all its members need."""
        members = [package for same in self.packages.values() for package in same if _kind(package) in _OF_WORKSPACE]
        roots = [package for package in members if package["source"][_kind(package)] == "."] or members
        if not roots:
            self.problems.append(
                f"{self.display}: it has no project, and stagec installs what a project needs\n"
                "  write [project] into pyproject.toml, and run uv lock"
            )
            return
        kinds = ("optional-dependencies", "dev-dependencies")
        tables = [package[kind] for package in roots for kind in kinds if kind in package]
        there = {group for table in tables for group in table}
        for group in [group for group in groups if group not in there]:
            have = f"it has {', '.join(sorted(there))}" if there else "it has none"
            self.problems.append(f'{self.display}: its project has no group or extra "{group}": {have}')
        self.chosen = {package["name"]: package for package in roots}
        self.roots = set(self.chosen)
        waiting = [entry for package in roots for entry in package.get("dependencies", [])]
        waiting += [entry for table in tables for group in groups for entry in table.get(group, [])]
        seen: set[tuple[str, str]] = set()
        while waiting:
            entry = waiting.pop()
            if not self._holds(entry.get("marker")) or not (package := self._package(entry)):
                continue
            for extra in ("", *entry.get("extra", [])):
                if (package["name"], extra) not in seen:
                    seen.add((package["name"], extra))
                    of_extras = {"": package.get("dependencies", []), **package.get("optional-dependencies", {})}
                    waiting += of_extras.get(extra, [])

    def _package(self, entry: Package) -> Package | None:
        """The package that an entry means for this interpreter; None where that is not one: `problems` says why."""
        name = entry["name"]
        same = [
            package
            for package in self.packages.get(name, [])
            if all(package.get(key) == entry[key] for key in ("version", "source") if key in entry)
        ]
        if len(same) > 1:
            same = [package for package in same if any(map(self._holds, package.get("resolution-markers", [None])))]
        chosen = self.chosen.setdefault(name, same[0]) if len(same) == 1 else None
        if chosen is None or chosen is not same[0]:
            versions = sorted({package.get("version", "?") for package in [*same, *([chosen] if chosen else [])]})
            self.problems.append(
                f"{self.display}: for this Python it has {' and '.join(versions) or 'no version'} of {name}, and an "
                "environment has one\n  write it again: uv lock"
            )
        return chosen

    def written(self) -> tuple[str, list[str]]:
        """Return the requirements file, and the other projects, which are not in it. Raises Refused."""
        lines, projects = [], []
        for name, package in sorted(self.chosen.items()):
            if _kind(package) in _OF_WORKSPACE:
                projects += [name] * (name not in self.roots)
            else:
                lines.append(f"{name}=={package['version']} {' '.join(self._hashes(package))}\n")
        if self.problems:
            raise Refused("\n".join(self.problems))
        return "".join(lines), projects

    def _hashes(self, package: Package) -> Iterator[str]:
        what = f"{self.display}: {package['name']}"
        if _kind(package) != "registry":
            origin = f"{_kind(package)} {package['source'][_kind(package)]}"
            self.problems.append(
                f"{what} is from {origin}, and stagec installs wheels of an index\n"
                "  put a wheel of it into an index, or its sources into the workspace and into deps"
            )
        elif not (wheels := [wheel["hash"] for wheel in package.get("wheels", []) if "hash" in wheel]):
            self.problems.append(
                f"{what} has no wheel with a hash, and stagec builds none\n"
                "  put a wheel of it into an index, and run uv lock"
            )
        else:
            yield from (f"--hash={digest}" for digest in wheels)


def _kind(package: Package) -> str:
    """What a package is from: "registry", "git", "editable", ..."""
    return str(next(iter(package["source"])))
