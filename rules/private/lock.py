"""Writes a lock of the packages that models import: `bazel run @stagec//:lock -- requirements.in`.

requirements.in names what the models import. The lock, requirements.lock beside it, has those packages and stagec's, in
versions that fit together, each with a wheel, and with the digests of all wheels. Of stagec's own packages it has the
versions that stagec is tested with: the newest that have wheels for this Python. uv asks the indexes, where pip would;
no wheel is downloaded.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pip_installer
import pip_settings
from python_environment import lock_problems, normalized_pins
from uv_installer import Unusable, Uv, normalized

# The Pythons that jaxlib has wheels for. The first is the oldest that stagec runs with.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
_HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
_JAX = ("jax", "jaxlib")
_DEFAULT_INDEX = "https://pypi.org/simple"
_PINNED = re.compile(r"^([a-z0-9-]+)==([^\s;]+)", re.MULTILINE)
_WITH_DIGESTS = re.compile(r"^([a-z0-9-]+)==([^\s;]+)[^\n]*?((?: \\\n +--hash=sha256:[0-9a-f]{64})+)", re.MULTILINE)
_QUESTION = "#?"
"""How a line begins with which `stagec init` asks for a package (compiler/stagec/manifest/workspace.py)."""
_HEADER = "# `bazel run @stagec//:lock -- {}` wrote this: edit that file, and run it again.\n"


class Refused(Exception):
    """The lock cannot be written. problems: all reasons."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems


@dataclass(frozen=True)
class Sources:
    """What is locked. requirements: the user's file; own: stagec's requirements; pins: stagec's lock of them."""

    requirements: Path
    own: Path
    pins: Path

    def words(self) -> list[str]:
        """Say it to uv."""
        return [str(self.requirements), str(self.own), "--constraints", str(self.pins)]

    def without_jax(self, folder: Path) -> Sources:
        """Leave JAX out of what stagec requires. folder: for the file that says so."""
        own = folder / "without_jax.in"
        kept = {name: version for name, version in _versions(self.own).items() if name != "jax"}
        own.write_text("".join(f"{name}=={version}\n" if version else f"{name}\n" for name, version in kept.items()))
        return Sources(self.requirements, own, self.pins)

    def with_any_jax(self, folder: Path) -> Sources:
        """Leave the versions of jax and jaxlib to the user's packages. folder: for the two files that say so."""
        own, pins = folder / "own.in", folder / "pins.lock"
        own.write_text("\n".join(_versions(self.own)) + "\n", encoding="utf-8")
        kept = {name: version for name, version in _versions(self.pins).items() if name not in _JAX}
        pins.write_text("".join(f"{name}=={version}\n" for name, version in kept.items()), encoding="utf-8")
        return Sources(self.requirements, own, pins)


def tested_with(sets: Sequence[tuple[str, str, str]], here: str, requirements: Path, kept: Path | None) -> Sources:
    """Choose from stagec's sets of packages: the one with the jaxlib that is named, or kept, else the newest.

    sets: the oldest Python of each, its requirements and its lock; the newest first. here: this Python.
    """
    fitting = [
        Sources(requirements, Path(own), Path(pins)) for python, own, pins in sets if _minor(python) <= _minor(here)
    ]
    for file in (requirements, kept):
        named = _versions(file) if file else {}
        for sources in fitting:
            if (named.get("jaxlib") or named.get("jax")) == _versions(sources.pins)["jaxlib"]:
                return sources
    return fitting[0]


def write_lock(uv: Uv, sources: Sources, kept: Path | None, lock: Path, without_jax: bool = False) -> list[str]:
    """Write a lock. Returns notes for the user. Raises Refused.

    kept: an older lock, whose versions stay where they fit. without_jax: for models that need none.
    """
    tested = _versions(sources.pins)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        resolved = folder / "requirements.lock"
        if kept:
            shutil.copy(kept, resolved)
        if without_jax:
            sources = sources.without_jax(folder)
        if chosen := set(_JAX).intersection(_versions(sources.requirements)):
            sources = sources.with_any_jax(folder)
        # First the versions for this Python, which the lock for all of them keeps where it can.
        missing, error = _resolve(uv, sources.words(), resolved)
        problems = []
        if error:
            said, more = (_said(error, tested), {}) if chosen else _conflict(uv, sources, tested, error, folder)
            problems, missing = [said], missing | more
        if missing:
            problems.append(_no_wheels(missing, f"Python {_HERE}"))
        oldest = _HERE
        if not problems:
            everywhere = ["--universal", "--fork-strategy", "fewest", "--generate-hashes"]
            everywhere += ["--no-annotate", "--no-emit-index-url"]
            # Some packages have no version for the older ones.
            for oldest in sorted({*PYTHONS, _HERE}, key=_minor):
                missing, error = _resolve(uv, [*sources.words(), *everywhere, "--python-version", oldest], resolved)
                if oldest == _HERE or not (missing or error):
                    break
            problems = [_no_wheels(missing, "one of the systems that the lock is for")] if missing else []
            problems += [_said(error, tested)] if error else []
        if not problems:
            problems = lock_problems(resolved.read_text(encoding="utf-8"), str(sources.requirements))
        if problems:
            raise Refused(*problems)
        _add_digests(uv, resolved, oldest)
        notes = [f"the lock is for Python {oldest} and newer"] if oldest != PYTHONS[0] else []
        for python in PYTHONS:
            if python != _HERE and _minor(python) > _minor(oldest):
                linux = ["--no-deps", "--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
                if missing := _resolve(uv, [str(resolved), *linux], folder / f"python{python}.lock")[0]:
                    notes.append(f"no wheel for Python {python} on Linux x86-64: {', '.join(sorted(missing))}")
        versions = _versions(resolved)
        if without_jax and "jax" in versions:
            raise Refused("one of these packages needs jax: leave it out, or --without-jax")
        if versions["jaxlib"] != tested["jaxlib"]:
            notes.append(
                f"stagec is tested with jaxlib {tested['jaxlib']}, and this has {versions['jaxlib']}: for TPUs and "
                "GPUs, write tpu_lock, cuda_lock and rocm_lock (docs/accelerators.md)"
            )
        if not kept and not chosen:
            notes += _held_back(uv, sources, versions, folder)
        text = _HEADER.format(sources.requirements.name) + resolved.read_text(encoding="utf-8")
        new = lock.with_name(f".{lock.name}.{os.getpid()}")
        new.write_text(text, encoding="utf-8")
        new.replace(lock)
        return notes


def _add_digests(uv: Uv, lock: Path, oldest: str) -> None:
    """Add the digests of the wheels that other indexes have of the same versions.

    uv lists those of the first index alone that has a version, and a mirror may have those for one Python. pip, and uv
    when it installs, take a wheel from any of them.
    """
    flags = list(itertools.pairwise(uv.words.flags))
    indexes = [value for flag, value in flags if flag in ("--index", "--default-index")]
    if "--no-index" not in uv.words.flags and "--default-index" not in uv.words.flags:
        indexes.append(_DEFAULT_INDEX)
    folders = [word for flag, value in flags if flag == "--find-links" for word in (flag, value)]
    if not indexes or len(indexes) + bool(folders) < 2:
        return
    others = [word for word in uv.words.flags if word not in folders]
    text = lock.read_text(encoding="utf-8")
    digests: dict[tuple[str, str], set[str]] = {}
    for index in indexes:
        first = replace(uv, words=replace(uv.words, flags=["--index", index, *others]))
        for package in _listed(first, dict(_PINNED.findall(text)), lock.with_name("pins.in"), oldest):
            wheels = [wheel.get("hashes", {}).get("sha256", "") for wheel in package.get("wheels", [])]
            digests.setdefault((package["name"], package["version"]), set()).update(filter(None, wheels))

    def with_all(match: re.Match[str]) -> str:
        there = set(re.findall("[0-9a-f]{64}", match[3]))
        more = digests.get((match[1], match[2]), set())
        return (
            match[0]
            if more <= there
            else match[0].removesuffix(match[3])
            + "".join(f" \\\n    --hash=sha256:{digest}" for digest in sorted(there | more))
        )

    lock.write_text(_WITH_DIGESTS.sub(with_all, text), encoding="utf-8")


def _listed(uv: Uv, pins: dict[str, str], file: Path, oldest: str) -> list[dict[str, Any]]:
    """The packages of a pylock.toml with all wheels of these versions, without those that no index has."""
    words = ["pip", "compile", "--no-deps", "--universal", "--only-binary", ":all:", "--no-header", "--python-version"]
    words += [oldest, "--index-strategy", "unsafe-best-match", "--format", "pylock.toml", str(file)]
    while pins:
        file.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()), encoding="utf-8")
        try:
            packages: list[dict[str, Any]] = tomllib.loads(uv.run(*words)).get("packages", [])
        except Unusable as error:
            absent = {name for name in pins if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", error.output)}
            if not absent:
                return []
            pins = {name: version for name, version in pins.items() if name not in absent}
        else:
            return packages
    return []


def _minor(python: str) -> int:
    """Return 11 for "3.11"."""
    return int(python.partition(".")[2])


def _resolve(uv: Uv, words: Sequence[str], output: Path) -> tuple[dict[str, str], Unusable | None]:
    """Find versions, and write them to a file.

    uv names one package without a wheel at a time: it is asked again without that one. Returns all of them, with what
    they have instead, and what is wrong besides.
    """
    missing: dict[str, str] = {}
    excluded = output.with_name("excluded.txt")
    command = ["pip", "compile", "--only-binary", ":all:", "--no-header", "--index-strategy", "unsafe-best-match"]
    while True:
        excluded.write_text("".join(f"{name}\n" for name in missing), encoding="utf-8")
        try:
            uv.run(*command, *words, "--output-file", str(output), "--excludes", str(excluded))
        except Unusable as error:
            new = {name: why for name, why in _without_wheel(error.output).items() if name not in missing}
            if not new:
                return missing, error
            missing |= new
        else:
            return missing, None


def _without_wheel(said: str) -> dict[str, str]:
    """The packages for which uv says that no wheel fits, with what there is instead."""
    # Read in uv 0.13.9, which has no other form of this.
    reasons = dict.fromkeys(re.findall(r"Wheels are required for `([^`]+)`", said), "a source distribution alone")
    for name, version, tags in re.findall(r"wheels (?:are available )?for `([^`]+)` \(v([^)]+)\) (.+)", said):
        reasons[name] = f"{version} has wheels " + tags.replace("`", "").replace("with the following ", "for the ")
    for name, version, tag in re.findall(r"([\w.-]+)==(\S+) has no wheels with a matching .*?`(\w+)`", said):
        reasons.setdefault(name, f"{version} has none for {tag}")
    for name, why in reasons.items():
        if wanted := re.search(rf"(\S+) depends on ({re.escape(name)}\S*)", said):
            reasons[name] = f"{why} ({wanted[1]} wants {wanted[2].rstrip(',')})"
    return reasons


def _held_back(uv: Uv, sources: Sources, versions: dict[str, str], folder: Path) -> list[str]:
    """Say of which of the user's packages the lock has another version than they would have without stagec's."""
    alone = folder / "alone.lock"
    if _resolve(uv, [str(sources.requirements)], alone) != ({}, None):
        return []
    free = _versions(alone)
    named = [name for name in _versions(sources.requirements) if free.get(name, "") != versions.get(name, "")]
    wanted = [f"{name} {free[name]}" for name in _JAX if name in free and free[name] != versions[name]]
    reason = f", which is for {' and '.join(wanted)}" if wanted else ""
    return [
        f"{name} is {versions.get(name, 'not in it')}; alone it would be {free.get(name)}{reason}" for name in named
    ]


def _no_wheels(missing: dict[str, str], where: str) -> str:
    lines = [f"no wheel for {where}, and stagec installs nothing else:"]
    lines += [f"{name}: {why}" for name, why in sorted(missing.items())]
    lines += ["write other versions or packages, or make wheels (pip wheel --no-deps NAME) and name their folder"]
    return "\n".join([*lines, "in pip's setting find-links"])


def _conflict(
    uv: Uv, sources: Sources, tested: dict[str, str], error: Unusable, folder: Path
) -> tuple[str, dict[str, str]]:
    """Say what does not fit together, and whether it does with another JAX; return also what has no wheel then."""
    said, other = _said(error, tested), folder / "other.lock"
    missing, failure = _resolve(uv, sources.with_any_jax(folder).words(), other)
    remedy = "write other versions of them"
    if not failure and not missing.keys() & set(_JAX):
        wanted = [f"{name}=={version}" for name, version in _versions(other).items() if name in _JAX]
        remedy += f", or the JAX that they want: {' and '.join(wanted)}"
    elif not any(f"{name}=={tested[name]}" in said for name in _JAX):
        return said, {}
    head = f"your packages want another jaxlib than {tested['jaxlib']}, with which stagec is tested:"
    return "\n".join([head, said, remedy]), missing


def _said(error: Unusable, tested: dict[str, str]) -> str:
    """Say why uv found no versions, without its hints, and which of them are those of stagec's lock."""
    lines = (error.output or str(error)).partition("\nhint:")[0].splitlines()
    kept = [line.removeprefix("error: ").strip().removeprefix("cause: ") for line in lines]
    passed = ("", "No solution found when resolving dependencies")
    said = "\n".join(line for line in kept if line not in passed and not line.startswith("warning:"))
    pins = [f"{name}=={version}" for name, version in tested.items()]
    ours = [pin for pin in pins if re.search(rf"(?<![\w.-]){re.escape(pin)}(?![\w.])", said)]
    return said + (f"\nstagec is tested with {', '.join(ours)}, and locks it" if ours else "")


def _problem(requirements: Path, text: str) -> str:
    """One problem, under the name of the file."""
    first, *more = text.removeprefix(f"{requirements}: ").splitlines()
    return "\n".join([f"{requirements}: {first}", *(f"  {line.strip()}" for line in more)])


def _versions(file: Path) -> dict[str, str]:
    """The packages that a file names, with their pinned versions, or ""."""
    versions = {}
    for line in normalized_pins(file.read_text(encoding="utf-8")):
        if match := re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?\s*(?:==\s*([^\s;,]+))?", line):
            versions[normalized(match[1])] = match[2] or ""
    return versions


def main() -> None:
    """Write the lock that the command line asks for."""
    parser = argparse.ArgumentParser(prog="bazel run @stagec//:lock --", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("requirements", type=Path, help="the file that names what your models import: requirements.in")
    parser.add_argument("--output", type=Path, help="the lock; without, beside the file: requirements.lock")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions, not those of the old lock")
    parser.add_argument(
        "--without-jax", action="store_true", help='leave JAX out: all functions have frontend = "arrays"'
    )
    parser.add_argument("--own", action="append", nargs=3, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--uv", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--without-uv", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    requirements: Path = arguments.requirements
    lock: Path = arguments.output or requirements.with_suffix(".lock")
    try:
        if not requirements.is_file():
            raise Refused("there is no such file: write one that names what your models import, one a line")
        lines = enumerate(requirements.read_text(encoding="utf-8").splitlines(), 1)
        if asked := [f"line {at}: {line[2:].strip()}" for at, line in lines if line.startswith(_QUESTION)]:
            raise Refused(*asked)
        if lock.resolve() == requirements.resolve():
            raise Refused("the lock would be this file; give it another name with --output")
        if reason := arguments.without_uv.read_text(encoding="utf-8").strip():
            raise Refused(f"locks are made by uv, and this machine has none: {reason}")
        settings = pip_settings.of_pip(pip_installer.PIP, pip_installer.environment())
        uv = Uv(arguments.uv, pip_settings.to_uv(settings), pip_settings.cache_folder(settings))
        kept = lock if lock.exists() and not arguments.upgrade else None
        sources = tested_with(arguments.own, _HERE, requirements, kept)
        notes = write_lock(uv, sources, kept, lock, arguments.without_jax)
    except (Refused, pip_settings.NoWord, OSError, UnicodeDecodeError) as error:
        problems = error.problems if isinstance(error, Refused) else (str(error),)
        sys.exit("\n".join(_problem(requirements, problem) for problem in problems))
    print(f"{lock}: {len(_versions(lock))} packages, all with wheels for this Python")
    for note in notes:
        print(f"  note: {note}")


if __name__ == "__main__":
    main()
