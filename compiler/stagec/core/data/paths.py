"""Relative paths that a file names: which of them stay below the folder. Standard library only.

The file may be by a stranger: a bundle, an image, or the output of an action in which a model ran.
"""

from __future__ import annotations

PLAIN = "([A-Za-z0-9_][A-Za-z0-9_.+-]*/)*[A-Za-z0-9_][A-Za-z0-9_.+-]*"
"""A path below the folder whose names read the same everywhere: no blank, no hidden file, nothing that is an option."""


def fault(path: str) -> str:
    """Return why a path does not name a file below the folder that it is relative to; "" if it does.

    It is about the string. A function that opens the path follows no links (`writing.made`).
    """
    if not path.isprintable():
        return "it has characters that do not print"
    if path.startswith("/"):
        return "it is absolute"
    unnamed = next((part for part in path.split("/") if part in ("", ".", "..")), None)
    return "" if unnamed is None else f'one of its names is "{unnamed}"'
