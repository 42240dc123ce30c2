"""What the machine in front of us can run."""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the flags of /proc/cpuinfo; empty where there is no such file or it lists none."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "flags":
                    return frozenset(value.split())
    except OSError:
        pass
    return frozenset()


def missing_cpu_flags(required: tuple[str, ...]) -> list[str]:
    """Return those of `required` that this machine does not have, sorted."""
    return sorted(set(required) - cpu_flags())
