"""The frontends that there are, as a manifest sees them: what an `entry` may name, and which keys have no meaning then.

The code of each is the module of its name in `stagec.frontends`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Frontend:
    """A language in which functions are written.

    name: of the module in `stagec.frontends`.
    endings: of the files that an entry may name; empty: an entry is a Python object, `package.module:attribute`.
    what: what such a file is, in messages.
    meaningless: keys of a function that have no meaning, because the file says it.
    """

    name: str
    endings: tuple[str, ...] = ()
    what: str = ""
    meaningless: tuple[str, ...] = ()


_TRACING = (
    *("args", "kwargs", "avals", "constraints", "static", "variants", "donate_argnums", "donate_argnames"),
    *("keep_unused", "inline", "matmul_precision", "mesh", "in_shardings", "out_shardings", "vjp_order"),
    *("enable_x64", "prng_impl", "environment", "host_callbacks"),
)
FRONTENDS = (
    Frontend("jax"),
    Frontend("stablehlo", (".mlir", ".mlirbc"), "a StableHLO module, which is not traced", _TRACING),
)


def of_entry(entry: str) -> Frontend:
    """Return the frontend of a function by its `entry`: that of the file's ending, and JAX for what is no file."""
    files = (one for one in FRONTENDS if one.endings and ":" not in entry and entry.endswith(one.endings))
    return next(files, FRONTENDS[0])
