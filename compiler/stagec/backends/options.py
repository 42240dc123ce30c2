"""The names of XLA's flags, read in the jaxlib that compiles."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from pathlib import Path

from stagec.core.builds.compiler_options import BUILD_OPTIONS
from stagec.core.data import elf
from stagec.patches import descriptors


@functools.cache
def known_options() -> tuple[str, ...]:
    """Return the names of the flags of the XLA in this jaxlib, sorted; empty when none are found.

    jaxlib offers no list, and `XLA_FLAGS=--help` shows 78 of the 311 in 0.10.2. So stagec reads the names from the
    descriptor of xla.DebugOptions in XLA's library. It takes a tenth of a second.
    """
    import jaxlib

    names: set[str] = set()
    for path in Path(str(jaxlib.__file__)).parent.glob("libjax*.so*"):
        with elf.opened(path) as file:
            names |= set(descriptors.read(file).get("xla.DebugOptions", ()))
    return tuple(sorted(name for name in names if name.startswith("xla_")))


def suggestion(name: str, known: Iterable[str] | None = None) -> str:
    """Return the advice for the unknown option `name`: a sentence with the nearest name; "" when none is near.

    known: the names of the flags that there are; None: `known_options()`.
    """
    names = (*BUILD_OPTIONS, *(known_options() if known is None else known))
    closest = difflib.get_close_matches(name, names, 1)
    return f"did you mean {closest[0]}?" if closest else ""
