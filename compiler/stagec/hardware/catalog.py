"""The targets that are checked in, by their short names, of all platforms."""

from __future__ import annotations

import importlib

from stagec.core.builds.platforms import PLATFORMS
from stagec.core.builds.specs import TargetSpec
from stagec.core.messages.errors import mistake, near
from stagec.hardware.tables import Entry, Hardware


def hardware(platform: str) -> Hardware:
    """Return the checked-in hardware of a platform."""
    checked_in: Hardware = importlib.import_module(f"stagec.hardware.{platform}").HARDWARE
    return checked_in


def entries() -> list[Entry]:
    """Return all checked-in hardware, by platforms."""
    return [entry for platform in PLATFORMS for entry in hardware(platform).entries()]


def target(name: str, others: tuple[str, ...] = ()) -> TargetSpec:
    """Return the target of a short name ("cpu-avx2", "h100-sxm") or of a TPU topology ("v5e:2x2").

    others: names that are known besides, for the message.
    Raises StagecError with similar names when there is no such target.
    """
    everywhere = list(map(hardware, PLATFORMS))
    for module in everywhere:
        if spec := module.target(name):
            return spec
    kinds = "a short name that stagec targets lists, or a TPU topology such as v5e:2x2"
    listed = f"one of {', '.join(others)}, " if others else ""
    known = [*others, *(short for module in everywhere for short in module.names())]
    nearly = next(filter(None, (module.advice(name) for module in everywhere)), "")
    write = nearly or near(name, known) or f"write {listed}{kinds}"
    raise mistake(f'unknown target "{name}"', write)
