"""Where Python packages are that bring libraries; they are found without being imported."""

from __future__ import annotations

from importlib import util
from pathlib import Path

from stagec.core.builds.platforms import Plugin


def folder(package: str) -> Path | None:
    """Return the folder of a Python package without importing it; None when it is not installed."""
    try:
        spec = util.find_spec(package)
    except ModuleNotFoundError:  # the package around it is missing
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def library(plugin: Plugin) -> Path | None:
    """Return where the library of a plugin is; None where it is not installed."""
    where = folder(plugin.package)
    return where / plugin.library if where is not None and (where / plugin.library).is_file() else None
