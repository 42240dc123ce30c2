"""Installs the wheels of a lock with uv, which takes seconds where pip takes minutes.

First uv finds the wheels of the lock for this interpreter in the indexes, without downloading one. Of each package the
one wheel that pip would take goes into a pylock.toml (https://packaging.python.org/en/latest/specifications/pylock-toml),
and that is what uv installs: so which wheel was installed, with which digest, is known before. Raises Unusable wherever
uv does not do what pip would: then pip installs, and says what is wrong if it cannot either. pip is on the machine
anyway, people have settings for it, and it installs uv.

Each package in it has the index that it is from, for uv keeps wheels by index. Without it, uv asks again for each wheel
that it has. An index without validators, as many proxies are, then sends the whole wheel, and uv keeps another copy.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tomllib
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pip_settings

PYLOCK = "pylock.toml"
MANYLINUX = "manylinux_2_28"
"""The oldest system that packages for another architecture are for."""

# Options that a lock may have and that uv reads there as pip does.
_OPTIONS = (
    "-f",
    "-i",
    "--extra-index-url",
    "--find-links",
    "--index-url",
    "--no-index",
    "--only-binary",
    "--require-hashes",
)


class Unusable(Exception):
    """uv cannot do it: the text says why, in one line. output: all that uv said."""

    def __init__(self, text: str, output: str = "") -> None:
        super().__init__(text)
        self.output = output


@dataclass(frozen=True)
class Wheel:
    """A wheel of an index or a folder.

    name: normalized. location: its place, as a pylock.toml has it. index: the one that it is from; "": uv does not say.
    size: in bytes; 0: the index does not say.
    """

    name: str
    version: str
    filename: str
    sha256: str
    location: tuple[str, str]
    index: str
    size: int


@dataclass
class Uv:
    """A uv that takes packages from where pip would.

    program: its path. words: pip's settings. cache: where it keeps wheels; None: nowhere.
    architecture: that of the packages, as `uname -m` has it.
    """

    program: Path
    words: pip_settings.Words
    cache: Path | None
    architecture: str = platform.machine()

    def run(self, *arguments: str, cached: bool = True) -> str:
        """Run uv; return what it prints. Raises Unusable with its first sentences."""
        cache = ["--cache-dir", str(self.cache)] if cached and self.cache else ["--no-cache"]
        own = ["--no-config", "--no-python-downloads", "--no-progress", "--quiet", "--preview-features", "pylock"]
        if self.architecture != platform.machine():
            own += ["--python-platform", f"{self.architecture}-{MANYLINUX}"]
        command = [str(self.program), *arguments, *own, *cache, "--python", sys.executable, *self.words.flags]
        try:
            done = subprocess.run(
                command, check=False, env=self._variables(), capture_output=True, encoding="utf-8", errors="replace"
            )
        except OSError as error:
            raise Unusable(f"uv does not start: {error}") from error
        if done.returncode != 0:
            lines = [re.sub(r"^[^\w`]+", "", line) for line in done.stderr.splitlines()]
            said = " ".join([line for line in lines if line and not line.startswith("warning:")][:4])
            raise Unusable(f"uv: {said.removeprefix('error: ') or f'exit status {done.returncode}'}", done.stderr)
        return done.stdout

    def _variables(self) -> dict[str, str]:
        """The environment without what would configure uv otherwise, or names another Python."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("UV_", "CONDA_")) and name != "VIRTUAL_ENV"
        }
        return kept | {"UV_HTTP_RETRIES": "2"} | self.words.variables


def platforms_of(architecture: str) -> list[str]:
    """Return the tags of wheels that `MANYLINUX` of an architecture can use, the best one first."""
    return [*(f"manylinux_2_{minor}_{architecture}" for minor in range(28, 16, -1)), f"manylinux2014_{architecture}"]


def normalized(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def choose(uv: Uv, lock: Path, pins: Sequence[str]) -> list[Wheel]:
    """Find the wheels of a lock for this interpreter. pins: its lines, joined. Raises Unusable."""
    options = {pin.replace("=", " ").split()[0] for pin in pins if pin.startswith("-")}
    if strange := sorted(options.difference(_OPTIONS)):
        raise Unusable(f"uv does not read {strange[0]} in a lock")
    if options & {"-i", "--index-url"} and "--default-index" in uv.words.flags:
        at = uv.words.flags.index("--default-index")
        del uv.words.flags[at : at + 2]
    words = ["pip", "compile", "--no-deps", "--no-header", "--only-binary", ":all:"]
    words += ["--index-strategy", "unsafe-best-match", *uv.words.finding, str(lock)]
    pylock = tomllib.loads(uv.run(*words, "--format", "pylock.toml"))
    annotated = uv.run(*words, "--no-annotate", "--emit-index-annotation")
    indexes = dict(re.findall(r"^([^\s=]+)==.*\n\s+# from (\S+)$", annotated, re.MULTILINE))
    locked: dict[str, set[str]] = {}
    for pin in pins:
        if package := re.match(r"[A-Za-z0-9._-]+", pin):
            hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", pin)
            locked.setdefault(normalized(package[0]), set()).update(hashes)
    packages = pylock.get("packages", [])
    return [
        _best(package, locked[normalized(package["name"])], indexes.get(package["name"], ""), uv.architecture)
        for package in packages
    ]


def _best(package: Mapping[str, Any], locked: set[str], index: str, architecture: str) -> Wheel:
    """The wheel of a package that pip would take: of those that are locked, the one with the best tag."""
    wheels = []
    for wheel in package.get("wheels", []):
        where = "url" if "url" in wheel else "path"
        filename = urllib.parse.unquote(urllib.parse.urlsplit(wheel[where]).path.rpartition("/")[2])
        sha256 = wheel.get("hashes", {}).get("sha256", "")
        if sha256 in locked:
            origin = (where, wheel[where]), index if where == "url" else "", wheel.get("size", 0)
            wheels.append(Wheel(package["name"], package["version"], filename, sha256, *origin))
    if not wheels:
        raise Unusable(f"the index has no wheel of {package['name']} {package['version']} with a sha256 of the lock")
    return min(wheels, key=lambda wheel: _rank(wheel, architecture)) if len(wheels) > 1 else wheels[0]


def _rank(wheel: Wheel, architecture: str) -> tuple[int, int]:
    """Order wheels of one version as pip does for an architecture, the best one first."""
    try:
        from pip._internal.utils.compatibility_tags import get_supported
        from pip._vendor.packaging.utils import parse_wheel_filename
    except ImportError as error:
        raise Unusable(f"there are several wheels of {wheel.name}, and this pip ranks them elsewhere") from error
    _, _, build, tags = parse_wheel_filename(wheel.filename)
    platforms = None if architecture == platform.machine() else platforms_of(architecture)
    places = (place for place, tag in enumerate(get_supported(platforms=platforms)) if tag in tags)
    return next(places, sys.maxsize), -(build[0] if build else 0)


def write_pylock(wheels: Sequence[Wheel], path: Path) -> None:
    """Write what uv is to install. A JSON string is one of TOML too."""
    parts = ['lock-version = "1.0"\ncreated-by = "stagec"\n']
    for wheel in wheels:
        where, location = wheel.location
        hashes = f"hashes = {{ sha256 = {json.dumps(wheel.sha256)} }}"
        parts.append(
            f"\n[[packages]]\nname = {json.dumps(wheel.name)}\nversion = {json.dumps(wheel.version)}\n"
            f"{f'index = {json.dumps(wheel.index)}' if wheel.index else ''}\n"
            f"wheels = [{{ {where} = {json.dumps(location)}, {hashes} }}]\n"
        )
    path.write_text("".join(parts), encoding="utf-8")


def install(uv: Uv, wheels: Sequence[Wheel], folder: Path) -> tuple[list[dict[str, str]], str]:
    """Install wheels into a folder that does not exist, with what pip would install.

    uv looks at a wheel's digest when it downloads it, and keeps it unpacked: what another program, or the file system,
    did to it since then shows in the digests of its RECORD. Such a package is downloaded again.

    Returns name and version, as the packages write them, file name and sha256 of the wheels; and a sentence about a
    damaged cache, or "". Raises Unusable.
    """
    _install(uv, wheels, folder)
    _put_in_order(uv, wheels, folder)
    damage = ""
    damaged = _damaged(folder) if uv.cache else {}
    if damaged:
        _install(uv, [wheel for wheel in wheels if wheel.name in damaged], folder, "--reinstall", cached=False)
        _put_in_order(uv, wheels, folder)
        # What is left is so in the wheel, and pip passes over it.
        if names := sorted(damaged.keys() - _damaged(folder).keys()):
            damage = (
                f"uv's cache {uv.cache} has another {damaged[names[0]]} than the wheel of {names[0]}: it was "
                f"downloaded again (uv cache clean {' '.join(names)} mends the cache)"
            )
    distributions = {normalized(distribution.metadata["Name"]): distribution for distribution in _distributions(folder)}
    installed = []
    for wheel in wheels:
        if wheel.name not in distributions:
            raise Unusable(f"uv did not install {wheel.name}")
        metadata = distributions[wheel.name].metadata
        named = {"name": metadata["Name"], "version": metadata["Version"]}
        installed.append({**named, "filename": wheel.filename, "sha256": wheel.sha256})
    return installed, damage


def _install(uv: Uv, wheels: Sequence[Wheel], folder: Path, *more: str, cached: bool = True) -> None:
    pylock = Path(PYLOCK)
    write_pylock(wheels, pylock)
    # Copies: who edits an installed file must not edit uv's cache, and all environments to come.
    words = ["pip", "install", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--link-mode", "copy"]
    # Those that the lock names: uv looks for wheels of the indexes that it knows.
    indexes = sorted({wheel.index for wheel in wheels}.difference(["", *uv.words.flags]))
    words += [word for index in indexes for word in ("--index", index)]
    try:
        uv.run(*words, "--target", str(folder), "--requirements", str(pylock), *more, cached=cached)
    finally:
        pylock.unlink()
        (folder / ".lock").unlink(missing_ok=True)
    # uv notes the clock of wheels that are files of this machine.
    for note in folder.glob("*.dist-info/uv_cache.json"):
        note.unlink()
        record = note.with_name("RECORD")
        lines = record.read_text(encoding="utf-8").splitlines(keepends=True)
        record.write_text("".join(line for line in lines if "/uv_cache.json," not in line), encoding="utf-8")


def _distributions(folder: Path) -> Iterable[importlib.metadata.Distribution]:
    return importlib.metadata.distributions(path=[str(folder)])


def recorded(folder: Path) -> dict[str, dict[str, str]]:
    """By package, the digests of its files: in the order in which pip installs, the last name first."""
    digests_of = {}
    for distribution in _distributions(folder):
        rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
        digests = {path: digest for path, digest, *_ in rows if digest and not path.startswith("/")}
        digests_of[normalized(distribution.metadata["Name"])] = digests
    return dict(sorted(digests_of.items(), reverse=True))


def _put_in_order(uv: Uv, wheels: Sequence[Wheel], folder: Path) -> None:
    """Install packages again that have another file of one name, such as docs/conf.py: uv installs all at once."""
    files = recorded(folder)
    owners: dict[str, set[str]] = {}
    for digests in files.values():
        for path, digest in digests.items():
            owners.setdefault(path, set()).add(digest)
    shared = {path for path, digests in owners.items() if len(digests) > 1}
    of_name = {wheel.name: wheel for wheel in wheels}
    for name, digests in files.items():
        if not shared.isdisjoint(digests):
            _install(uv, [of_name[name]], folder, "--reinstall")


def _damaged(folder: Path) -> dict[str, str]:
    """By package, the first file whose digest is not that of RECORD."""
    expected = {path: (digest, name) for name, files in recorded(folder).items() for path, digest in files.items()}
    damaged: dict[str, str] = {}
    for path, (digest, name) in sorted(expected.items()):
        if name not in damaged and not _has_digest(folder / path, digest):
            damaged[name] = path
    return damaged


def _has_digest(file: Path, digest: str) -> bool:
    """Whether a file has a digest as in RECORD: "sha256=", and base64 without padding."""
    algorithm, _, expected = digest.partition("=")
    try:
        with file.open("rb") as opened:
            got = hashlib.file_digest(opened, algorithm).digest()
    except OSError:
        return False
    return base64.urlsafe_b64encode(got).decode("ascii").rstrip("=") == expected
