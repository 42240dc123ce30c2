"""Names of sizes: nearly all symbolic dimensions are one, and need no parser. Standard library only."""

import keyword
import re

FUNCTIONS = ("floordiv", "max", "min", "mod")
"""The functions of two arguments that JAX knows in dimension expressions."""
_NAME = re.compile(r"[A-Za-z_]\w+|[A-Za-z]", re.ASCII)


def is_name(text: str) -> bool:
    """Whether a dimension expression is a name and nothing more."""
    return bool(_NAME.fullmatch(text)) and text not in FUNCTIONS and not keyword.iskeyword(text)
