"""TOML that may be anything, and the key path of a place in it.

Python's parser reads it recursively, and takes memory by the square of a dotted key.
"""

import re
import tomllib
from typing import Any, TypeAlias

from stagec.core.messages.errors import show

Location: TypeAlias = tuple[str | int, ...]
"""Where a value is: the keys of tables and the numbers in arrays that lead to it."""
LARGEST = 4 << 20
"""Bytes of a manifest (4 MiB): one of some ten thousand functions."""
DEEPEST = 100
"""How many tables and arrays may lie in each other, as in the tree of an artifact."""
MOST_TABLES = 200_000
"""How many tables and arrays there may be: each takes a kilobyte, and twenty microseconds."""
_TOKEN = re.compile(
    r'''"""(?:\\.|[^\\])*?"{3,5}|'{3}.*?'{3,5}|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|#[^\n]*|[\[{.]''', re.DOTALL
)
"""Strings and comments, and outside these the starts of tables and arrays, including a dot in a key."""
_KEY = re.compile(r"[\w \t.\"'\[\]-]*")
_LARGEST_NUMBER = 2**63


def parse(text: str) -> dict[str, Any]:
    """Return the value of a TOML document.

    Raises TOMLDecodeError for its syntax, another ValueError for nesting deeper than DEEPEST, for more than
    MOST_TABLES, and for an integer of more than 64 bits.
    """
    if sum(len(token[0]) == 1 and token[0] != "#" for token in _TOKEN.finditer(text)) > MOST_TABLES:
        raise ValueError(f"more than {MOST_TABLES:,} tables and arrays")
    too_deep = f"nested deeper than {DEEPEST} levels"
    # Possible keys; a value that looks like a key has the same limit.
    for part in re.split(r"[=\n{,]", text):
        if part.count(".") > DEEPEST and _KEY.fullmatch(part):
            raise ValueError(too_deep)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError(too_deep) from None
    except ValueError:  # Python does not convert a string of thousands of digits
        raise ValueError("an integer has more than 64 bits") from None
    level: list[Any] = [data]
    for _ in range(DEEPEST + 1):
        inner = [value for value in level if isinstance(value, dict | list)]
        level = [item for value in inner for item in (value.values() if isinstance(value, dict) else value)]
        if any(type(value) is int and not -_LARGEST_NUMBER <= value < _LARGEST_NUMBER for value in level):
            raise ValueError("an integer has more than 64 bits")
        if not level:
            return data
    raise ValueError(too_deep)


_END = "end it with the quote that it begins with"
_AT_LINE = re.compile(r"(.*) \(at line (\d+), column \d+\)")


def explained(error: tomllib.TOMLDecodeError, text: str) -> tuple[str, str]:
    """Return what is wrong with the syntax of a document, and what to write. Python's words say what its parser did."""
    said = _AT_LINE.fullmatch(str(error))
    if said:
        where, line = f"not TOML: line {said[2]}: ", text.splitlines()[int(said[2]) - 1]
        if twice := re.fullmatch(r"Cannot declare \((.*?),?\) twice", said[1]):
            table = ".".join(part.strip(" '\"") for part in twice[1].split(","))
            return f"{where}the table [{table}] is there twice", "join the two, or give one of them another name"
        if said[1] == "Cannot overwrite a value":
            key = line.partition("=")[0].strip() if "=" in line else ""
            return f"{where}the key {key} is there twice".replace(
                "key  is", "key of this value is"
            ), "keep one of the two"
        if said[1] == r"Illegal character '\n'":
            return f"{where}the string has no quote at its end", _END
    if str(error).startswith("Unterminated string"):
        return "not TOML: the last string has no quote at its end", _END
    return f"not TOML: {error}", "see https://toml.io for the syntax"


def key_path(location: Location) -> str:
    """The TOML key path of a location: `functions.predict.args[1].w`; keys that need quotes get them."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else show(part))
    return text
