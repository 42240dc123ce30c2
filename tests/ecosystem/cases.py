"""What both programs know: the functions of a bundle, and leaves as numpy arrays."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

GROUPS = ("training", "science", "serving")


def functions(group: str) -> dict[str, tuple[str, str]]:
    """Return for each function of a manifest where it is, and where its arguments are: MODULE:NAME."""
    manifest = tomllib.loads((Path(__file__).parent / group / f"{group}.toml").read_text())
    return {
        name: (table["entry"], table["avals"].removesuffix("avals") + "arguments")
        for name, table in manifest["functions"].items()
    }


def differences(expected: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> list[int]:
    """Return the positions of the leaves that are not the same bits, or -1 where there are more of one."""
    if len(expected) != len(found):
        return [-1]
    same = [
        (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()) for a, b in zip(expected, found, strict=True)
    ]
    return [number for number, equal in enumerate(same) if not equal]


def report(name: str, how: str, expected: Sequence[Any], found: Sequence[Any]) -> bool:
    """Print what came out; return whether it is the same."""
    wrong = differences(expected, found)
    said = f"differs in leaves {wrong} of {len(expected)}" if wrong else f"{len(expected)} leaves are equal"
    print(f"{name:20} {how:16} {said}", flush=True)
    return not wrong
