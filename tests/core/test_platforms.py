"""The table of platforms, and what is there for each of them."""

import importlib
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

from stagec.backends import compilation
from stagec.core.builds import specs
from stagec.core.builds.platforms import PLATFORMS
from stagec.hardware import catalog
from stagec.manifest.models import TARGETS
from stagec.patches import known_builds
from stagec.pjrt import packages
from tools import platforms


def members(protocol: Any) -> set[str]:
    return {name for name in vars(protocol) if not name.startswith("_")}


def test_the_rules_have_the_table() -> None:
    assert platforms.FILE.read_text("utf-8") == platforms.text(), "run: python tools/platforms.py --write"


def test_planning_imports_nothing_heavy() -> None:
    assert {"jax", "jaxlib", "numpy"}.isdisjoint(name.split(".")[0] for name in platforms.planning())


@pytest.mark.parametrize(("platform", "usual", "other"), [("cuda", 13, 12), ("rocm", 7, 10)])
def test_the_plugin_that_is_installed_counts(
    platform: str, usual: int, other: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual one, if none is."""
    if packages.folder(f"jax_plugins.xla_{platform}{usual}"):
        pytest.skip(f"jax-{platform}{usual}-pjrt is installed")

    def distribution() -> str:
        plugin = PLATFORMS[platform].plugin
        assert plugin is not None
        return plugin.distribution

    assert distribution() == f"jax-{platform}{usual}-pjrt"
    package = tmp_path / "jax_plugins" / f"xla_{platform}{other}"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    assert distribution() == f"jax-{platform}{other}-pjrt"
    library = package / f"xla_{platform}_plugin.so"
    assert known_builds.package_of(library) == f"jax-{platform}{other}-pjrt"
    assert (
        known_builds.package_of(package.with_name(f"xla_{platform}{usual}") / library.name)
        == f"jax-{platform}{usual}-pjrt"
    )


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_platform_is_whole(name: str) -> None:
    assert members(compilation.Backend) <= {*dir(compilation.backend(name))}
    kinds = [
        kind
        for kind in typing.get_args(specs.TargetSpec)
        if name in typing.get_args(typing.get_type_hints(kind)["platform"])
    ]
    described = typing.get_type_hints(
        TARGETS[name].describe, {"specs": specs, **vars(importlib.import_module("pathlib"))}
    )
    assert [*(typing.get_args(described["return"]) or [described["return"]])] == kinds
    assert catalog.hardware(name).entries()
