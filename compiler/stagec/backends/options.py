"""Compiler options, as `jax.jit` takes them: XLA's flags, and the fields of its ExecutableBuildOptions.

The flags are those of the jaxlib that compiles, which is asked for them. Nothing else here needs it.
"""

from __future__ import annotations

import difflib
import enum
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stagec.core.specs import CompilerOption, Scalar

LEVELS: Mapping[str, int] = {"UNKNOWN": 0, "O0": 9, "O1": 19, "O2": 29, "O3": 39}
"""Levels of effort (https://openxla.org/xla/effort_levels): xla.ExecutionOptions.EffortLevel."""


class InvalidOption(ValueError):
    """A compiler option cannot have a value; `name` is the option, `write` says what to write instead."""

    def __init__(self, name: str, value: object, write: str) -> None:
        super().__init__(f"{name} cannot be {json.dumps(value) if isinstance(value, str) else repr(value)}")
        self.name = name
        self.write = write


def _level(name: str, value: Any) -> int:
    level: Any = LEVELS.get(value) if isinstance(value, str) else value
    if not isinstance(level, int) or isinstance(level, bool) or level not in LEVELS.values():
        levels = ", ".join(f'"{known}" ({number})' for known, number in LEVELS.items())
        raise InvalidOption(name, value, f"write one of {levels}")
    return level


def _effort(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1 <= value <= 1:
        raise InvalidOption(name, value, "write a number from -1.0 (least) to 1.0 (most effort)")
    return float(value)


def _profile(name: str, value: Any) -> bytes:
    if not isinstance(value, str | bytes):
        advice = "write a ProfiledInstructionsProto, as bytes or in protobuf's text format"
        raise InvalidOption(name, value, advice)
    return value.encode() if isinstance(value, str) else value


BUILD_OPTIONS: Mapping[str, Callable[[str, Any], int | float | bytes]] = {
    "exec_time_optimization_effort": _effort,
    "memory_fitting_effort": _effort,
    "optimization_level": _level,
    "memory_fitting_level": _level,
    "fdo_profile": _profile,
}
"""The fields of ExecutableBuildOptions that are options too, as in JAX (`jax._src.compiler.get_compile_options`)."""


def checked(options: Mapping[str, Any]) -> dict[str, CompilerOption]:
    """Return options as plain values: numbers of numpy's become Python's, members of JAX's enum their names.

    Raises InvalidOption for a value that is none, and for one that its field of ExecutableBuildOptions cannot have.
    """
    return {name: _plain(name, value) for name, value in options.items()}


def problems(options: Mapping[str, Any]) -> Iterator[InvalidOption]:
    """Yield what is wrong with each of `options`."""
    for name, value in options.items():
        try:
            _plain(name, value)
        except InvalidOption as error:
            yield error


def _plain(name: str, value: Any) -> CompilerOption:
    if not isinstance(name, str):
        raise InvalidOption("the name of an option", name, "write a string")
    if isinstance(value, enum.Enum):
        value = value.name
    if hasattr(value, "dtype") and not getattr(value, "shape", ()):
        value = value.item()
    if name in BUILD_OPTIONS:
        BUILD_OPTIONS[name](name, value)
    elif not isinstance(value, Scalar):
        raise InvalidOption(name, value, "write a number, a string or a boolean")
    plain: CompilerOption = value
    return plain


def split(options: Mapping[str, CompilerOption]) -> tuple[dict[str, int | float | bytes], list[tuple[str, Scalar]]]:
    """Return the fields of ExecutableBuildOptions among `options`, as XLA takes them, and the flags, sorted."""
    build = {name: BUILD_OPTIONS[name](name, value) for name, value in options.items() if name in BUILD_OPTIONS}
    flags = [(name, value) for name, value in sorted(options.items()) if not isinstance(value, bytes)]
    return build, [(name, value) for name, value in flags if name not in build]


def told(options: Mapping[str, CompilerOption]) -> dict[str, Scalar]:
    """Return options as descriptions have them: with the digest of a profile."""

    def one(name: str, value: CompilerOption) -> Scalar:
        raw = value.encode() if name == "fdo_profile" and isinstance(value, str) else value
        return hashlib.sha256(raw).hexdigest() if isinstance(raw, bytes) else raw

    return {name: one(name, value) for name, value in options.items()}


@functools.cache
def known_options() -> tuple[str, ...]:
    """Return the names of the flags of the XLA in this jaxlib, sorted; empty when none are found.

    jaxlib has no list to ask for, and what it prints for `XLA_FLAGS=--help` is cut short. So the names are read where
    XLA has them: in the descriptor of xla.DebugOptions, which its library holds. It takes a tenth of a second.
    """
    import jaxlib

    from stagec.backends import descriptors, elf  # planning reads the rest of this module

    found: set[str] = set()
    for path in Path(str(jaxlib.__file__)).parent.glob("libjax*.so*"):
        with elf.opened(path) as file:
            found |= set(descriptors.read(file).get("xla.DebugOptions", ()))
    return tuple(sorted(name for name in found if name.startswith("xla_")))


def suggestion(name: str, known: Iterable[str] | None = None) -> str:
    """Return what to write for the unknown option `name`: a sentence with the nearest name; "" when none is near.

    known: the names of the flags that there are; None: `known_options()`.
    """
    names = (*BUILD_OPTIONS, *(known_options() if known is None else known))
    closest = difflib.get_close_matches(name, names, 1)
    return f"did you mean {closest[0]}?" if closest else ""
