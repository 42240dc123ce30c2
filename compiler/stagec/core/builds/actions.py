"""How Bazel's actions run a command of stagec, for reports that run one without Bazel."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

ENVIRONMENT: Mapping[str, str] = {
    "JAX_PLATFORMS": "cpu",
    # Threads of numpy's would be in the way of a worker's forks, and add up numbers in another order.
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONSAFEPATH": "1",
}
"""The variables that change the behavior of a command. `tools/platforms.py` writes them for the rules."""
ENTRY = Path(__file__).absolute().parents[2] / "__main__.py"
"""The command."""


def environment(home: Path) -> dict[str, str]:
    """Return the variables of a command that runs as in an action: those, and where this process finds packages."""
    passed = {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    return {**passed, **ENVIRONMENT, "HOME": str(home)}


def command() -> list[str]:
    """Return how a process with the packages of this one runs the command: the interpreter, its flags and `ENTRY`."""
    site = [*(["-s"] if sys.flags.no_user_site else []), *(["-S"] if sys.flags.no_site else [])]
    return [sys.executable, "-B", *site, str(ENTRY)]
