"""Compiler options, as `jax.jit` takes them: XLA's flags, and the fields of its ExecutableBuildOptions."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stagec.core.builds.specs import CompilerOption, Scalar

LEVELS: Mapping[str, int] = {"UNKNOWN": 0, "O0": 9, "O1": 19, "O2": 29, "O3": 39}
"""Levels of effort (https://openxla.org/xla/effort_levels): xla.ExecutionOptions.EffortLevel."""


class InvalidOption(ValueError):
    """A compiler option cannot have a value; `name` is the option, `write` is the correction."""

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

    Raises InvalidOption for an invalid value, and for one that its field of ExecutableBuildOptions cannot have.
    """
    return {name: _plain(name, value) for name, value in options.items()}


def problems(options: Mapping[str, Any]) -> Iterator[InvalidOption]:
    """Yield the faults of `options`."""
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


def described(options: Mapping[str, CompilerOption]) -> dict[str, Scalar]:
    """Return options as descriptions have them: with the digest of a profile."""

    def scalar(name: str, value: CompilerOption) -> Scalar:
        raw = value.encode() if name == "fdo_profile" and isinstance(value, str) else value
        return hashlib.sha256(raw).hexdigest() if isinstance(raw, bytes) else raw

    return {name: scalar(name, value) for name, value in options.items()}
