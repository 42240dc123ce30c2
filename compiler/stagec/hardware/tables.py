"""The checked-in hardware as it is written: manifests/targets/*.toml."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagec.core.builds.platforms import PLATFORMS

_FOLDER = Path(__file__).parent.parent / "targets"
"""A link to manifests/targets; in an installed package, the files themselves."""


@dataclass(frozen=True)
class Entry:
    """What a person wants to read of a checked-in target.

    name: its short name; of a TPU generation, its name in topologies. platform: "cpu", "cuda" or "tpu".
    doc: one line. source: where the numbers are from.
    memory: bytes; flops: peak bfloat16 operations a second; bandwidth: bytes a second from memory; links: bytes a
        second of all links to other devices, in one direction. All are of one device or chip, and None for CPUs: an
        instruction set says nothing of them. links is None too where there are none.
    examples: names of targets with it: the short name, or topologies. devices: how many devices each of those has.
    """

    name: str
    platform: str
    doc: str
    source: str
    memory: int | None
    flops: float | None
    bandwidth: float | None
    links: float | None
    examples: tuple[str, ...]
    devices: tuple[int, ...]


@functools.cache
def read(platform: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the tables of a platform's file by their names."""
    return tomllib.loads((_FOLDER / PLATFORMS[platform].catalog).read_text("utf-8"))
