"""The releases of jax and jaxlib that stagec works with: the rows of manifests/releases.toml."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).absolute().parents[2] / "releases.toml"
"""The table, which manifests/releases.toml links to; it says what its columns mean.

The file itself is here: an action in a worker sees the folders of stagec, and no others.
"""


class Release(NamedTuple):
    """A release.

    day: YYYY-MM-DD; "" for a release that has no row. wheels: version of a plugin's wheel, or a prefix of it, by the
    wheel's name. kernels: XLA's version number for making kernels; None: not known. defects: issues about its XLA:CPU.
    stablehlo: the newest version of StableHLO that its jaxlib reads, such as 1.17.0; "": not known.
    """

    day: str
    wheels: Mapping[str, str] = {}
    kernels: int | None = None
    defects: Sequence[str] = ()
    stablehlo: str = ""


@functools.cache
def known() -> Mapping[str, Release]:
    """Return the releases by version, the oldest first."""
    import tomllib  # most processes that load a bundle ask for no release

    return {version: Release(**row) for version, row in tomllib.loads(FILE.read_text("utf-8")).items()}


def release(version: str) -> Release:
    """Return a release by its version; one without a day if it has no row."""
    return known().get(version, Release(""))


def stablehlo_for(versions: Sequence[str]) -> str | None:
    """Return the newest version of StableHLO that all these releases read; None if none of them has a row."""
    known_ones = [newest for version in versions if (newest := release(version).stablehlo)]
    return min(known_ones, key=lambda version: [*map(int, version.split("."))], default=None)
