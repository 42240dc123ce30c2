"""Expressions in texts of manifests and artifacts, read with Python's own parser. Standard library only."""

import ast
import threading

_PARSING = threading.Lock()
"""Python 3.11 counts the recursion of all threads together in `ast.parse`, and may end with a SystemError."""


def parse(text: str) -> ast.expr:
    """Return the syntax tree of a Python expression; nothing is evaluated. Raises ValueError where it is none."""
    try:
        with _PARSING:
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"not an expression: {error}") from None


def module(text: str) -> ast.Module:
    """Return the syntax tree of a Python file; nothing is run. Raises ValueError where it is none, with the line."""
    try:
        with _PARSING:
            return ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"not Python: {error}") from None
