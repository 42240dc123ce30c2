"""setuptools, outside of the tree; wheels have the same bytes whatever umask, modes and times of files a checkout has.

In the tree, setuptools leaves `build` and an `.egg-info`, and takes what lies in `build` into the next wheel: also
modules that the tree has no more (https://github.com/pypa/setuptools/issues/1347).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from setuptools import build_meta

__all__ = ["build_sdist", "build_wheel", "prepare_metadata_for_build_wheel"]

_BESIDE = ("MANIFEST.in", "README.md", "build_backend.py", "pyproject.toml")
"""The files beside the package that make it."""


def build_wheel(folder: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    """Write the wheel into a folder and return its name, as https://peps.python.org/pep-0517 has it."""
    out = Path(folder).absolute()
    metadata = metadata and str(Path(metadata).absolute())
    with _outside_of_the_tree():
        name: str = build_meta.build_wheel(str(out), settings, metadata)
    wheel, written = out / name, out / f"{name}.part"
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as target:
        for file in source.infolist():
            told = zipfile.ZipInfo(file.filename)  # of 1980
            if "SOURCE_DATE_EPOCH" in os.environ:
                told.date_time = file.date_time
            told.external_attr = (stat.S_IFREG | 0o644) << 16
            told.compress_type = zipfile.ZIP_DEFLATED
            target.writestr(told, source.read(file))
    written.replace(wheel)
    return name


def build_sdist(folder: str, settings: dict[str, Any] | None = None) -> str:
    """Write the source distribution into a folder and return its name."""
    folder = str(Path(folder).absolute())
    with _outside_of_the_tree():
        name: str = build_meta.build_sdist(folder, settings)
    return name


def prepare_metadata_for_build_wheel(folder: str, settings: dict[str, Any] | None = None) -> str:
    """Write the wheel's metadata into a folder and return the name of their own."""
    folder = str(Path(folder).absolute())
    with _outside_of_the_tree():
        name: str = build_meta.prepare_metadata_for_build_wheel(folder, settings)
    return name


@contextlib.contextmanager
def _outside_of_the_tree() -> Iterator[None]:
    """Work in a copy of the sources, which goes with what was left there."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary, "stagec")
        for name in _sources(here):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(here / name, copy / name)
        os.chdir(copy)
        try:
            yield
        finally:
            os.chdir(here)


def _sources(folder: Path) -> list[Path]:
    """Return the files to build of, relative to the folder: those that git has; without git, the package's own."""
    packages = [package.parent for package in folder.glob("stagec*/__init__.py")]  # an extension has another name
    below = [path for package in packages for path in package.glob("**/*")]
    links = [path for path in below if path.is_symlink() and path.is_dir()]
    below += [path for link in links for path in link.glob("*")]  # neither glob nor git follows one
    there = [*map(Path, _BESIDE), *(path.relative_to(folder) for path in below)]
    files = [path for path in there if (folder / path).is_file() and "__pycache__" not in path.parts]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        known = {path.relative_to(folder) for each in (folder, *links) for path in _known(each)}
        if Path("pyproject.toml") in known:
            return [path for path in files if path in known]
    return files


def _known(folder: Path) -> list[Path]:
    """Return the files that git has of a folder. Raises OSError, CalledProcessError if it has none."""
    git = ["git", "-C", str(folder), "ls-files", "-z"]
    names = subprocess.run(git, check=True, capture_output=True, text=True).stdout.split("\0")
    return [folder / name for name in names if name]
