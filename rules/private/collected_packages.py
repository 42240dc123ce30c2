"""Collects the packages of other rule sets into one folder, for the rule `collected_packages`.

A hub of rules_python has a repository for each package, and leaves out RECORD, the list of its files. Here they come
together as python_environment.py installs a lock: the same wheels are the same files with the same fingerprint.
"""

from __future__ import annotations

import argparse
import base64
import csv
import email.parser
import filecmp
import hashlib
import io
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import byte_code
import installed_files
import python_environment
from uv_installer import normalized

_FOLDER = f"/{python_environment.SITE_PACKAGES}/"
_INFO = ".dist-info"


class Package(NamedTuple):
    """An installed package: name and version as its METADATA has them, and the folder with its folder `.dist-info`."""

    name: str
    version: str
    root: str
    info: str


def collect(files: Iterable[str], folder: Path, needs: Sequence[str]) -> tuple[list[Package], list[str]]:
    """Copy the files of packages into a new folder; return the packages, and what is wrong with them.

    files: paths; what is below a folder site-packages is of a package. needs: names of packages that must be there;
    `a|b`: either.
    """
    roots: dict[str, list[str]] = {}
    problems = []
    for file in files:
        root, below, name = f"./{file}".partition(_FOLDER)
        if below and not file.endswith(".pyc"):
            roots.setdefault(root + _FOLDER, []).append(name)
        elif file.endswith(".py"):
            problems.append(f"{file} is not below a folder site-packages\n  write what is not a package into deps")
    folder.mkdir(exist_ok=True)  # Bazel made it
    packages: dict[str, list[Package]] = {}
    owners: dict[str, tuple[str, set[str]]] = {}  # by file: the root that it was copied from, and its packages
    clashes: dict[tuple[str, str], str] = {}  # by two roots, the first file
    for root, names in sorted(roots.items()):
        own = [package for package in (_package(root, name) for name in names) if package]
        named = {normalized(package.name) for package in own}
        for name in sorted(names):
            target = folder / name
            first, others = owners.setdefault(name, (root, named))
            if first == root:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root + name, target)
            elif not _may_differ(name, named & others) and not filecmp.cmp(root + name, target, shallow=False):
                clashes.setdefault((first, root), name)
        for package in own:
            packages.setdefault(normalized(package.name), []).append(package)
        unlisted = [package for package in own if f"{package.info}/RECORD" not in names]
        if not own:
            problems.append(f"{root.strip('./')} has no package\n  name targets of a hub, such as @pip//jax")
        elif len(own) > 1 and unlisted:
            lists = " and ".join(f"{package.info}/RECORD" for package in unlisted)
            problems.append(
                f"{root.strip('./')} has several packages, and no {lists}\n  name a target for each package"
            )
        elif unlisted:
            _write_record(folder, root, names, own[0])
    for (first, second), name in clashes.items():
        problems.append(
            f"{first.strip('./')} and {second.strip('./')} have {name} with other bytes\n  name one of them"
        )
    for several in packages.values():
        if len({package.version for package in several}) > 1:
            there = " and ".join(f"{package.version} in {package.root}" for package in several)
            problems.append(f"{several[0].name} is there twice: {there}\n  name one of them")
    lacking = [
        names for names in (need.split("|") for need in needs) if packages.keys().isdisjoint(map(normalized, names))
    ]
    if lacking:
        what, label = " and no ".join(map(" or ".join, lacking)), normalized(lacking[0][0]).replace("-", "_")
        problems.append(f"there is no {what}\n  name the target that has it, such as @pip//{label}")
    here = [several[0] for several in packages.values()]
    return here, problems + [problem for package in here for problem in _misfits(folder, package)]


def _package(root: str, name: str) -> Package | None:
    info, _, file = name.partition("/")
    if not info.endswith(_INFO) or file != "METADATA":
        return None
    described = email.parser.HeaderParser().parsestr(Path(root, name).read_text(encoding="utf-8"))
    return Package(described["Name"], described["Version"], root.strip("./"), info)


def _may_differ(name: str, twice: set[str]) -> bool:
    """Whether two roots may have other bytes of a file. twice: the packages that both have."""
    if twice:  # what is in RECORD is compared, and what installers say of themselves is left out
        return name.endswith(tuple(f"{_INFO}/{file}" for file in ("RECORD", *installed_files.OF_INSTALLERS)))
    return not python_environment.is_of_a_module(name)  # as packages of a lock may


def _write_record(folder: Path, root: str, names: Sequence[str], package: Package) -> None:
    """List the files of a root as those of a package, as pip does."""
    record = f"{package.info}/RECORD"
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows([name, *_digest(Path(root, name))] for name in sorted(names))
    (folder / record).write_text(f"{written.getvalue()}{record},,\n", encoding="utf-8")


def _digest(file: Path) -> tuple[str, str]:
    content = file.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"sha256={digest}", str(len(content))


def _misfits(folder: Path, package: Package) -> Iterable[str]:
    """Yield what is wrong with a package that was made for another Python or machine."""
    wheel = folder / package.info / "WHEEL"
    tags = re.findall(r"^Tag: *(\S+)", wheel.read_text(encoding="utf-8"), re.MULTILINE) if wheel.is_file() else []
    if tags and not any(_fits(*tag.split("-", 2)) for tag in tags):
        here = f"Python {'.'.join(map(str, sys.version_info[:2]))} on {platform.machine()}"
        write = "name the hub's own Python: stagec.python(python = ...) or stagec_repositories(python = ...)"
        yield f"{package.name} {package.version} is for {' and '.join(tags)}, and actions run {here}\n  {write}"


def _fits(python: str, abi: str, system: str) -> bool:
    here = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return (python.startswith("py") or abi == "abi3" or here in python.split(".")) and (
        system == "any" or platform.machine() in system
    )


def described(folder: Path, packages: Iterable[Package]) -> Mapping[str, object]:
    """Return what packages.json says. No wheel is known, so a package goes by the list of its files."""
    rows = []
    for package in packages:
        listed = next(name for name in ("RECORD", "METADATA") if (folder / package.info / name).is_file())
        digest = hashlib.sha256((folder / package.info / listed).read_bytes()).hexdigest()
        named = {"name": package.name, "version": package.version}
        rows.append({**named, "filename": f"{package.info}/{listed}", "sha256": digest})
    return {"python": platform.python_version(), "packages": sorted(rows, key=lambda row: str(row["filename"]))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, fromfile_prefix_chars="@")
    parser.add_argument("--output", type=Path, help="the folder; the digest and the list come beside it")
    parser.add_argument("--trimmed", action="store_true", help="leave out packages' own tests, headers and stubs")
    parser.add_argument(
        "--needs", action="append", default=[], help="a package that must be there, or a|b; several times"
    )
    parser.add_argument("files", nargs="*", help="the files")
    arguments = parser.parse_args()
    os.umask(0o022)
    folder = arguments.output.absolute()
    packages, problems = collect(arguments.files, folder, arguments.needs)
    if not problems and (clash := python_environment.shared_files(folder)):
        problems = [clash]
    if problems:
        sys.exit("\n".join(f"stagec: environment: {problem}" for problem in problems))
    installed_files.normalize(folder, arguments.trimmed)
    os.chdir(folder.parent)  # byte code has the paths of its sources
    byte_code.compile_all(Path(python_environment.SITE_PACKAGES), {}, None)
    digest = python_environment.fingerprint(folder, platform.machine())
    Path(python_environment.FINGERPRINT).write_text(f"{digest}\n", encoding="ascii")
    Path(python_environment.PACKAGES).write_text(
        json.dumps(described(folder, packages), indent=1) + "\n", encoding="utf-8"
    )
