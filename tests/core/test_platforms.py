"""The table of platforms, and what is there for each of them."""

import importlib
import typing
from typing import Any

import pytest

from stagec.backends import compilation
from stagec.core.builds import specs
from stagec.core.builds.platforms import PLATFORMS
from stagec.hardware import catalog
from stagec.manifest.models import TARGETS
from tools import platforms


def members(protocol: Any) -> set[str]:
    return {name for name in vars(protocol) if not name.startswith("_")}


def test_the_rules_have_the_table() -> None:
    assert platforms.FILE.read_text("utf-8") == platforms.text(), "run: python tools/platforms.py --write"


def test_planning_imports_nothing_heavy() -> None:
    assert {"jax", "jaxlib", "numpy"}.isdisjoint(name.split(".")[0] for name in platforms.planning())


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
