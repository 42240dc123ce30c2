"""What a build reads: the files of a workspace, and the packages of a Python, with what stands for them in keys."""

from __future__ import annotations

import contextlib
import csv
import functools
import hashlib
import importlib.machinery
import itertools
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from stagec.core.builds import actions, extensions
from stagec.core.messages.errors import blaming

if TYPE_CHECKING:
    from stagec.local.store import Digests

_FLAGS = "-B", "-s", "-S"
"""As rules/private/python_environment.bzl has them."""


@dataclass(frozen=True)
class Workspace:
    """What a build reads.

    root: the workspace. name: of it, in the store. sources: paths of files that models may import and read, relative to
    root. packages: folders of packages, and facts about them. plugins: platform -> the folder with packages for
    compiling for it, or several, as PYTHONPATH has them.
    """

    root: Path
    name: str
    sources: Sequence[str]
    packages: Sequence[str]
    facts: Mapping[str, str]
    plugins: Mapping[str, str] = field(default_factory=dict)


def command() -> list[str]:
    """Return the words that run stagec as an action does: PYTHONPATH alone says where packages are."""
    return [sys.executable, *_FLAGS, str(actions.ENTRY)]


def packages(own: Sequence[str]) -> list[str]:
    """Return the folders of this process's packages, in their order.

    own: import roots of the workspace. A process that imports a model by itself may have them; an action gets them.
    """
    paths = sysconfig.get_paths()
    standard = {os.path.realpath(paths[name]) for name in ("stdlib", "platstdlib")}
    left_out = {*standard, *(f"{path}/lib-dynload" for path in standard), *map(os.path.realpath, own)}
    if not sys.flags.safe_path:  # the folder of the script, as of `stagec` itself
        left_out.add(os.path.dirname(os.path.realpath(sys.argv[0])))
    folders = [os.path.abspath(entry) for entry in sys.path if entry and os.path.isdir(entry)]
    return list(dict.fromkeys(entry for entry in folders if os.path.realpath(entry) not in left_out))


def variables(paths: Sequence[str]) -> dict[str, str]:
    """Return the environment of an action with these packages."""
    passed = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
    fixed = {"LC_ALL": "C.UTF-8", "PYTHONNOUSERSITE": "1", "TZ": "UTC", "PYTHONPATH": os.pathsep.join(paths)}
    return {"PATH": os.defpath, **passed, **actions.ENVIRONMENT, **fixed}


def facts(paths: Sequence[str], digests: Digests) -> Mapping[str, str]:
    """Return what stands for this Python in keys.

    "packages": a digest of all folders of packages; "abi" of the interpreter; "libraries": where it looks for shared
    ones; "python": its release, which matters to what runs a model. Raises StagecError for what cannot be read.
    """
    abi = importlib.machinery.EXTENSION_SUFFIXES[0].split(".")[1]
    content = [sorted([*listed, *unlisted]) for listed, unlisted in (_contents(path, digests) for path in paths)]
    text = json.dumps([entries for entries in content if entries])
    return {
        "packages": hashlib.sha256(text.encode()).hexdigest(),
        "abi": abi,
        "libraries": os.environ.get("LD_LIBRARY_PATH", ""),
        "python": sys.version.split()[0],
    }


def unlisted(paths: Sequence[str], digests: Digests) -> dict[str, str]:
    """Return what no list of a package has of these folders, by the name at the top, with a digest of its sources.

    A name may be in several folders: Python puts a namespace together. Left out are the lists themselves, and stagec,
    which may be a checkout.
    """
    tops: dict[str, list[tuple[str, str]]] = {}
    for path in (path for path in paths if not _is_checkout(path)):
        for file, digest in sorted(_contents(path, digests)[1]):
            top = file.partition("/")[0]
            if not top.endswith((".dist-info", ".egg-info")) and top not in extensions.OURS:
                tops.setdefault(top, []).append((file, digest))
    return {top: hashlib.sha256(json.dumps(files).encode()).hexdigest() for top, files in tops.items()}


def _is_checkout(path: str) -> bool:
    """Return whether a folder is stagec's, or an extension's, in a checkout."""
    return os.path.isfile(f"{path}/pyproject.toml") and any(os.path.isdir(f"{path}/{name}") for name in extensions.OURS)


def _contents(folder: str, digests: Digests) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return what is in a folder of packages: the lists of packages, and the files that no list has, with digests.

    Where pip installs, each package has a list of its files with their digests, which is believed. What no list has,
    such as a package without metadata or a checkout that is installed to be edited, is read. Of a folder that packages
    share (a namespace), that is each file that none of them lists. Actions read no .pth file: what a path in one names
    is a folder of packages itself.
    """
    with blaming(folder):
        others, owned, listed = [""], {"__pycache__"}, []
        if os.path.basename(folder) in ("site-packages", "dist-packages"):
            with os.scandir(folder) as entries:
                others = [entry.name for entry in entries if not entry.name.endswith(".pth")]
            for record in (f"{folder}/{name}/RECORD" for name in others if name.endswith(".dist-info")):
                if os.path.isfile(record):
                    digest, *of_package = digests.of(record, _listed).split("\n")
                    listed.append((os.path.basename(os.path.dirname(record)), digest))
                    owned.update(of_package)
        return listed, list(_rest(folder, (name for name in others if name not in owned), owned, digests))


def _rest(folder: str, names: Iterable[str], owned: Collection[str], digests: Digests) -> Iterator[tuple[str, str]]:
    """Yield the files of these names in a folder, or in folders of these names, that no package owns."""
    for name in names:
        path = f"{folder}/{name}".rstrip("/")
        files = (f"{path}/{file}" for file in files_below(path, _READ, _fail)) if os.path.isdir(path) else [path]
        for file in (file for file in files if file.endswith(_READ)):
            relative = os.path.relpath(file, folder)
            if not any(start in owned for start in _starts(relative)):
                yield relative, digests.of(file)


_READ = (".py", ".so", ".json", ".toml")


def _fail(error: OSError) -> NoReturn:
    raise error


def _listed(record: str) -> str:
    """Return a digest of what a RECORD lists, and what the package has alone, in lines: folders, and single files.

    A folder with an `__init__.py` is the package's own, with all that is in it. Left out is what differs where the same
    wheel is installed elsewhere: scripts, which have the path of Python, .pth files, which may have that of a checkout,
    and what installers say of themselves.
    """
    with blaming(record, "install the package again", "it is not a list of files: ", of=(ValueError, csv.Error)):
        rows = [row for row in csv.reader(Path(record).read_text("utf-8").splitlines()) if row]
    own = [
        row for row in rows if not row[0].startswith(("/", "..")) and row[0].rpartition("/")[2] not in _OF_INSTALLERS
    ]
    kept = sorted(row for row in own if not row[0].endswith((".pyc", "/RECORD")) and not _is_pth(row[0]))
    digest = hashlib.sha256(json.dumps(kept).encode()).hexdigest()
    folders = {row[0].removesuffix("/__init__.py") for row in own if row[0].endswith("/__init__.py")}
    read = [row[0] for row in own if row[0].endswith(_READ)]
    units = {next((start for start in _starts(path) if start in folders), path) for path in read}
    return "\n".join([digest, os.path.basename(os.path.dirname(record)), *sorted(units)])


def _is_pth(path: str) -> bool:
    return "/" not in path and path.endswith(".pth")


def _starts(path: str) -> Iterator[str]:
    """Yield the folders that a path leads through, the outermost first, and the path."""
    return itertools.accumulate(path.split("/"), "{}/{}".format)


_OF_INSTALLERS = ("INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json")


_CPU = re.compile(
    r"(vendor_id|cpu family|model|stepping|flags|CPU implementer|CPU variant|CPU part|CPU revision|Features)\s*:.*"
)
"""What /proc/cpuinfo says of the kind of a CPU and of its flags, on x86-64 and on aarch64."""


@functools.cache
def cpu() -> str:
    """Return a digest of what XLA sees of this machine: the kind and the flags of its CPUs, and the number of cores."""
    lines = set[str]()
    with contextlib.suppress(OSError):
        lines = {line for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines() if _CPU.fullmatch(line)}
    return hashlib.sha256(f"{sorted(lines)} {len(os.sched_getaffinity(0))}".encode()).hexdigest()


_NO_SOURCES = ("__pycache__", "node_modules", "site-packages")


def files_below(
    folder: str, endings: tuple[str, ...], unread: Callable[[OSError], object] | None = None
) -> Iterator[str]:
    """Yield the files below a folder whose names have one of these endings ("" for all), relative to it.

    No link to a folder is followed. Left out are hidden folders, virtual environments, and `bazel-*`, which is Bazel's.
    unread: is called for a folder that cannot be read; None: it is left out.
    """
    for here, folders, files in os.walk(folder, onerror=unread):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith((".", "bazel-"))
            and name not in _NO_SOURCES
            and not os.path.exists(f"{here}/{name}/pyvenv.cfg")
        )
        start = f"{here}/".removeprefix(f"{folder}/")
        yield from (f"{start}{name}" for name in sorted(files) if name.endswith(endings) and not name.startswith("."))
