"""Installs one locked set of Python packages into a folder, for the repository rule `python_environment`.

It runs with the interpreter that the environment is for, before anything is installed: standard library only. On
success the folder it ran in holds

    site-packages/    the packages, byte-compiled with .pyc files that are never checked against a clock: the same bytes
                      for all who install the lock with this release of Python
    byte-code/        with --stagec: the byte code of stagec's own modules, which Python compares with their sources
    fingerprint.txt   one digest of the packages' files and of the ABI of the interpreter that imports them
    packages.json     the version of the interpreter that actions run, and of each package name, version, file name and
                      sha256 of its wheel
    unknown.txt       with --stagec: the platforms whose compiler, among the packages, is a build that it does not know
    note.txt          a sentence for the user, such as why pip installed the packages; else empty

uv installs, if it can (uv_installer.py), and pip where it cannot (pip_installer.py). The repository rule runs the steps
one by one: each prints what the next one does, and Bazel shows it meanwhile.

On a mistake of the user's (a hash that does not match, no network, ...) it prints one message and exits with status 2,
or with 3 where the indexes have no wheel of a package for this interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import byte_code
import installed_files
import pip_installer
import pip_settings
import uv_installer
import uv_lock
from pip_settings import NoWord
from uv_installer import Unusable, Uv, Wheel

SITE_PACKAGES = "site-packages"
FINGERPRINT = "fingerprint.txt"
PACKAGES = "packages.json"
NOTE = "note.txt"
UNKNOWN = "unknown.txt"
_STATE = "state.json"
_PINS = "pins.txt"
"""What this interpreter installs of a uv.lock."""


def normalized_pins(lock: str) -> list[str]:
    """The requirements of a lock file, one line each and sorted: comments, order and line breaks do not count."""
    joined = lock.replace("\\\r\n", " ").replace("\\\n", " ")
    lines = (re.sub(r"(^|\s)#.*", "", line) for line in joined.splitlines())
    pins = []
    for line in lines:
        words = line.split()
        if words:
            hashes = sorted(word for word in words if word.startswith("--hash="))
            pins.append(" ".join([word for word in words if not word.startswith("--hash=")] + hashes))
    return sorted(pins)


def lock_problems(lock: str, display: str) -> list[str]:
    """What keeps a lock file from naming exactly one set of files; pip itself lets some of it pass."""
    problems = []
    for pin in normalized_pins(lock):
        words = pin.split()
        package = words[0]
        if package.startswith("-"):
            if re.match(r"-[rce]|--(requirement|constraint|editable)\b", package):
                problems.append(f"{display}: {package} is not for lock files\n  write every package in this one")
        elif "==" not in pin.split(";")[0].split(" --hash")[0]:
            problems.append(f"{display}: {package} has no pinned version\n  pin it with == and give its hashes")
        elif "--hash=" not in pin:
            problems.append(
                f"{display}: {package} has no hash\n  generate the lock with hashes (uv pip compile --generate-hashes)"
            )
    return problems


# Folders at the top that packages leave behind by mistake, and that nobody imports from.
_STRAY = {"benchmarks", "bin", "doc", "docs", "etc", "example", "examples", "scripts", "share", "test", "tests"}
# What packages that share a namespace all have.
_OF_NAMESPACES = ("__init__.py", "py.typed")
_KEEP_ONE = (
    "  keep one of them: take the other out of requirements.in and write the lock again;",
    "  if another package wants it, remove its lines from the lock",
)


def shared_files(folder: Path) -> str:
    """What is wrong where two packages bring other bytes for the same modules: only one of them is there. Else ""."""
    owners: dict[str, dict[str, str]] = {}
    for name, digests in uv_installer.recorded(folder).items():
        for path, digest in digests.items():
            owners.setdefault(path, {})[name] = digest
    clashes: dict[tuple[str, ...], list[str]] = {}
    for path, digests in owners.items():
        if len({*digests.values()}) > 1 and is_of_a_module(path):
            clashes.setdefault(tuple(sorted(digests)), []).append(path)
    lines = []
    for names, paths in sorted(clashes.items()):
        files = "the same file" if len(paths) == 1 else f"the same {len(paths)} files"
        others = " and others" if len(paths) > 1 else ""
        lines.append(f"{' and '.join(names)} write {files} with other bytes: {min(paths)}{others}")
    return "\n".join([*lines, *_KEEP_ONE]) if lines else ""


def is_of_a_module(path: str) -> bool:
    """Whether a file is a module, or beside one in its package; not what packages of one namespace all have."""
    inside = "/" in path and path.partition("/")[0] not in _STRAY
    return (inside and Path(path).name not in _OF_NAMESPACES) or ("/" not in path and path.endswith((".py", ".so")))


def fingerprint(folder: Path, architecture: str) -> str:
    """Digest of the packages and of the interpreters that can import them.

    architecture: that of the packages, as `uname -m` has it. The ABI is that of PEP 3149, such as
    cpython-311-x86_64-linux-gnu; the magic number is that of byte code. Python's release is not in it: actions that
    depend on that have it in their environment (rules/toolchain.bzl).
    """
    abi = importlib.machinery.EXTENSION_SUFFIXES[0].split(".")[1].replace(platform.machine(), architecture)
    parts = [f"abi {abi}", f"byte code {importlib.util.MAGIC_NUMBER.hex()}", f"files {installed_files.digest(folder)}"]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _give_up(message: str, status: int = 2) -> NoReturn:
    """Ends with what is wrong, and leaves nothing behind."""
    for folder in (SITE_PACKAGES, byte_code.STAGEC):
        shutil.rmtree(folder, ignore_errors=True)
    for file in (FINGERPRINT, NOTE, PACKAGES, UNKNOWN, _PINS, _STATE):
        Path(file).unlink(missing_ok=True)
    print(message)
    raise SystemExit(status)


@dataclass
class State:
    """What the first step found out: pip's settings, and the wheels that uv installs; None: pip installs."""

    settings: dict[str, str]
    wheels: list[Wheel] | None

    def write(self) -> None:
        """Keep it for the next step. Addresses of indexes may have passwords."""
        Path(_STATE).touch(mode=0o600)
        Path(_STATE).write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls) -> State:
        """Return what `write` kept."""
        state = json.loads(Path(_STATE).read_text(encoding="utf-8"))
        wheels = state["wheels"]
        return cls(state["settings"], None if wheels is None else [Wheel(**wheel) for wheel in wheels])

    def uv(self, program: Path, architecture: str) -> Uv:
        """A uv that is set as pip is. Raises NoWord."""
        words = pip_settings.to_uv(self.settings)
        return Uv(program, words, pip_settings.cache_folder(self.settings), architecture)


class Arguments(argparse.Namespace):
    """What a step is started with: the lock and its name in messages; the uv, or why there is none.

    groups: of a uv.lock.
    """

    lock: Path
    display: str
    groups: list[str]
    uv: Path | None
    without_uv: str | None
    release: str
    architecture: str
    trimmed: bool
    stagec: Path | None
    step: str | None


def choose(arguments: Arguments) -> str:
    """The first step: looks at the lock, and finds its wheels where uv can. Returns what the second does."""
    lock, display = arguments.lock, arguments.display
    Path(NOTE).touch()
    text = lock.read_text(encoding="utf-8")
    if lock.name == uv_lock.NAME:
        text = _of_uv(text, arguments)
        lock = Path(_PINS)
    elif arguments.groups:
        _give_up(f"{display}: groups = {arguments.groups}: only a {uv_lock.NAME} has groups")
    problems = lock_problems(text, display)
    if problems:
        _give_up("\n".join(problems))
    pins = normalized_pins(text)
    state = State({}, [])
    if pins:
        state.wheels = None
        try:
            state.settings = pip_settings.of_pip(pip_installer.PIP, pip_installer.environment())
            if arguments.without_uv:
                raise Unusable(arguments.without_uv)
            if arguments.uv:
                state.wheels = uv_installer.choose(state.uv(arguments.uv, arguments.architecture), lock, pins)
        except (NoWord, Unusable) as error:
            _note_pip(display, error)
    state.write()
    if state.wheels is None:
        return f"installing {display} with pip"
    size = sum(wheel.size for wheel in state.wheels)
    packages = "1 package" if len(state.wheels) == 1 else f"{len(state.wheels)} packages"
    return f"installing {packages}{f' ({size / 1e6:,.0f} MB)' if size else ''} of {display}"


def _of_uv(text: str, arguments: Arguments) -> str:
    """The pins of a uv.lock, which `install` reads too; notes what is not installed."""
    try:
        pins, projects = uv_lock.requirements(text, arguments.display, arguments.groups, arguments.architecture)
    except uv_lock.Refused as error:
        _give_up(str(error))
    if projects:
        note = (
            f"{arguments.display}: what models import of {', '.join(projects)} belongs into deps: it is not installed\n"
        )
        _note(note)
    Path(_PINS).write_text(pins, encoding="utf-8")
    return pins


def install(arguments: Arguments) -> str:
    """The second step: installs the packages. Returns what the third does."""
    display = arguments.display
    state, folder = State.read(), Path(SITE_PACKAGES)
    installed: list[dict[str, str]] | None = None
    if arguments.uv and state.wheels:
        try:
            uv = state.uv(arguments.uv, arguments.architecture)
            installed, damage = uv_installer.install(uv, state.wheels, folder)
            if damage:
                _note(f"{display}: {damage}\n")
        except Unusable as error:
            shutil.rmtree(folder, ignore_errors=True)
            _note_pip(display, error)
    if state.wheels == []:
        folder.mkdir()
        installed = []
    if installed is None:
        folder.mkdir()
        try:
            lock = Path(_PINS) if arguments.lock.name == uv_lock.NAME else arguments.lock
            installed = pip_installer.install(lock, display, folder, arguments.architecture)
        except pip_installer.Failed as error:
            _give_up(str(error), 3 if isinstance(error, pip_installer.NoWheel) else 2)
    if clash := shared_files(folder):
        _give_up(f"{display}: {clash}")
    packages = {"python": arguments.release, "packages": sorted(installed, key=lambda package: package["filename"])}
    Path(PACKAGES).write_text(json.dumps(packages, indent=1) + "\n", encoding="utf-8")
    installed_files.normalize(folder, arguments.trimmed)
    return f"compiling the modules of {display}"


def compile_modules(arguments: Arguments) -> str:
    """The third step: compiles the modules, or takes them from the cache."""
    wheels = {
        package["name"]: package["sha256"]
        for package in json.loads(Path(PACKAGES).read_text(encoding="utf-8"))["packages"]
    }
    byte_code.compile_all(Path(SITE_PACKAGES), wheels, pip_settings.cache_folder(State.read().settings))
    unknown = []
    if arguments.stagec:
        byte_code.compile_stagec(arguments.stagec)
        unknown = unknown_libraries(arguments.stagec, Path(SITE_PACKAGES))
    Path(UNKNOWN).write_text("".join(f"{platform}\n" for platform in unknown), encoding="ascii")
    Path(FINGERPRINT).write_text(fingerprint(Path(SITE_PACKAGES), arguments.architecture) + "\n", encoding="ascii")
    Path(_STATE).unlink()
    Path(_PINS).unlink(missing_ok=True)
    return f"{arguments.display} is installed"


def unknown_libraries(stagec: Path, folder: Path) -> list[str]:
    """The platforms for which packages have a library that stagec does not know. No code of a library runs.

    stagec: the folder of its modules.
    """
    sys.path.insert(0, str(stagec.parent))
    from stagec.core.builds.platforms import PLATFORMS
    from stagec.patches import known_builds

    unknown = []
    for name, compiler in PLATFORMS.items():
        for file in filter(Path.is_file, (folder / path for path in compiler.files)):
            with contextlib.suppress(OSError):  # it cannot be read: an action will say so
                unknown += [] if known_builds.identity(file)[1] else [name]
    return list(dict.fromkeys(unknown))  # a platform may have several


def _note_pip(display: str, error: Exception) -> None:
    _note(f"{display}: pip installs it, not uv, which takes longer: {error}\n")


def _note(line: str) -> None:
    """Tell the user, after what other steps told."""
    with Path(NOTE).open("a", encoding="utf-8") as note:
        note.write(line)


STEPS = {"choose": choose, "install": install, "compile": compile_modules}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lock", type=Path, help="the lock file")
    parser.add_argument("display", help="what messages call the lock file")
    parser.add_argument("--uv", type=Path, help="the uv that installs; without one pip does")
    parser.add_argument("--without-uv", metavar="REASON", help="why there is none")
    parser.add_argument("--release", default=platform.python_version(), help="the Python that actions run: 3.11.9")
    parser.add_argument("--architecture", default=platform.machine(), help="that of the packages, as uname -m has it")
    parser.add_argument("--trimmed", action="store_true", help="leave out packages' own tests, headers and stubs")
    parser.add_argument("--groups", action="append", default=[], help="a group or extra of a uv.lock; several times")
    parser.add_argument("--stagec", type=Path, help="the folder of stagec's modules, to compile them too")
    parser.add_argument("--step", choices=STEPS, help="do this step alone; all without")
    arguments = parser.parse_args(namespace=Arguments())
    os.umask(0o022)  # modes of files are in the keys of some caches
    for name, step in STEPS.items():
        if arguments.step in (None, name):
            print(step(arguments))
