"""Expressions in manifests and artifacts, read with Python's own parser. Standard library only."""

import ast
import threading

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
    """Return the syntax tree of a Python file; nothing is run. Raises ValueError for anything else, with the line."""
    try:
        with _PARSING:
            return ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}" if error.lineno else f"not Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"not Python: {error}") from None
