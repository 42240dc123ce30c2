"""Expressions in manifests and artifacts, read with Python's own parser. Standard library only."""

import ast
import re
import threading

_MOST_PARTS = 1000
_PARTS = re.compile(r"[\w\s.\\]+")
_PARSING = threading.Lock()
"""Python 3.11 counts the recursion of all threads together in `ast.parse`, and may end with a SystemError."""


def parse(text: str) -> ast.expr:
    """Return the syntax tree of a Python expression; nothing is evaluated. Raises ValueError for anything else."""
    try:
        with _PARSING:
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # before 3.11.4 a null byte is a ValueError
        raise ValueError(f"not an expression: {error}") from None


def module(text: str) -> ast.Module:
    """Return the syntax tree of a Python file; nothing is run. Raises ValueError for anything else, with the line.

    Python's parser joins the parts of `import a.b.c` one by one: 400 KB of them take it a minute, so they have a limit.
    """
    if text.count(".") > _MOST_PARTS and any(run[0].count(".") > _MOST_PARTS for run in _PARTS.finditer(text)):
        raise ValueError(f"not Python that is read: a name has over {_MOST_PARTS:,} parts")
    try:
        with _PARSING:
            return ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}" if error.lineno else f"not Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"not Python: {error}") from None
