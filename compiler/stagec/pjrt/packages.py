"""Where Python packages are that bring libraries; they are found without being imported."""

from __future__ import annotations

from importlib import util
from pathlib import Path

from stagec.core.builds.platforms import Plugin


def folder(package: str) -> Path | None:
    """Return the folder of a Python package without importing it; None when it is not installed."""
    return next(iter(_folders(package)), None)


def file(package: str, name: str) -> Path | None:
    """Return a file of a package that several wheels have a part of; None if no part has it."""
    return next((folder / name for folder in _folders(package) if (folder / name).is_file()), None)


def _folders(package: str) -> list[Path]:
    try:
        spec = util.find_spec(package)
    except ModuleNotFoundError:  # the package around it is missing
        return []
    return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []


def library(plugin: Plugin) -> Path | None:
    """Return the path of a plugin's library; None if it is not installed."""
    where = folder(plugin.package)
    return where / plugin.library if where is not None and (where / plugin.library).is_file() else None
