"""The keyword parameters of `stagec.jit`, once for the type checker, `jit` and the tracers of all frontends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from stagec.core.builds.specs import CompilerOption


class Options(TypedDict, total=False):
    """The parameters by name, without `frontend`; `staging.jit` explains them."""

    in_shardings: Any
    out_shardings: Any
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Iterable[str] | None
    keep_unused: bool
    inline: bool
    compiler_options: Mapping[str, CompilerOption] | None
    host_callbacks: str


def unknown(options: Options) -> list[str]:
    """Return the names of parameters that `jit` does not have; a call may have any."""
    return [name for name in options if name not in Options.__annotations__]
