"""The names of XLA's options, asked of the jaxlib that compiles."""

from __future__ import annotations

import difflib
import functools
import mmap
import re
from pathlib import Path

_NAME = re.compile(rb"\n([\x04-\x7f])(xla_[a-z0-9_]+)\x18")
"""A field of a message in a stored protobuf descriptor: tag, length, name, and the tag of the field's number."""


@functools.cache
def known_options() -> tuple[str, ...]:
    """Return the names of the options of the XLA in this jaxlib, sorted; empty when none are found.

    jaxlib has no list to ask for, and what it prints for `XLA_FLAGS=--help` is cut short. So the names are read where
    XLA has them: in the descriptor of xla.DebugOptions, which its library holds as bytes. It takes half a second.
    """
    import jaxlib

    found: set[str] = set()
    for path in Path(str(jaxlib.__file__)).parent.glob("libjax*.so*"):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for match in _NAME.finditer(content):
                if match[1][0] == len(match[2]):
                    found.add(match[2].decode())
    return tuple(sorted(found))


def suggestion(name: str) -> str:
    """Return what to write for the unknown option `name`: a sentence with the nearest name; "" when none is near."""
    closest = difflib.get_close_matches(name, known_options(), 1)
    return f"did you mean {closest[0]}?" if closest else ""
