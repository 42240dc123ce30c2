"""Installed packages among a model's dependencies, as rules of other rule sets hand them over (`@pip//flax`).

They come behind the packages of stagec's own environment. A package that both have must be the same one: Python would
import the environment's, whatever the other lock says.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stagec.core.builds.distributions import normalized
from stagec.core.builds.specs import FunctionSpec
from stagec.core.messages.errors import Problem, StagecError

_INFO = ".dist-info"


class _Package(NamedTuple):
    name: str
    version: str
    folder: str


def are_in(folder: str) -> bool:
    """Return whether a folder has installed packages."""
    return Path(folder).name == "site-packages" or bool(_installed([folder]))


def check(spec: FunctionSpec, roots: Sequence[str]) -> None:
    """Raise StagecError if packages below `roots` have other versions than the environment's."""
    brought = _installed(roots)
    if not brought:
        return
    ours = _installed([entry for entry in sys.path if entry not in {str(Path(root).absolute()) for root in roots}])
    problems = []
    for key, package in sorted(brought.items()):
        other = ours.get(key)
        if other and _release(other.version) != _release(package.version):
            problems.append(
                Problem(
                    spec.manifest,
                    spec.key,
                    f"{package.folder} in deps has {package.name} {package.version}, stagec's environment has "
                    f"{other.version}, and Python takes that",
                    f"write {other.name}=={other.version} in the lock of {package.folder},\n"
                    f"or {package.name}=={package.version} in stagec's: stagec.python(lock = ...)",
                )
            )
    if problems:
        raise StagecError(*problems)


def _installed(folders: Sequence[str]) -> dict[str, _Package]:
    """Return the packages of folders, the first one's first, by normalized name.

    Names and versions are those of wheels' own folders (https://packaging.python.org/specifications/binary-distribution-format).
    """
    packages: dict[str, _Package] = {}
    for folder in folders:
        for path in sorted(Path(folder).glob(f"*{_INFO}")):
            name, _, version = path.name.removesuffix(_INFO).partition("-")
            packages.setdefault(normalized(name), _Package(name, version, folder))
    return packages


def _release(version: str) -> str:
    """Return a version without the zeros at its end, because they mean nothing."""
    return re.sub(r"(\.0)+$", "", version)
