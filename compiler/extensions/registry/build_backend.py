"""setuptools, with wheels that have the same bytes whatever umask, modes and times of files a checkout has."""

from __future__ import annotations

import os
import stat
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_wheel",
]


def build_wheel(folder: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    """Write the wheel into a folder and return its name, as https://peps.python.org/pep-0517 has it."""
    name: str = build_meta.build_wheel(folder, settings, metadata)
    wheel, written = Path(folder, name), Path(folder, f"{name}.part")
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
