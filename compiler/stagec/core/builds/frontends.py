"""The frontends from a manifest's view: the entries of each, and the keys that it does not use.

The code of each is the module of its name in `stagec.frontends`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Frontend:
    """A language in which functions are written.

    name: of the module in `stagec.frontends`.
    endings: of the files that an entry may name; empty: an entry is a Python object, `package.module:attribute`.
    what: what such an entry is, in messages.
    meaningless: keys of a function that have no meaning then. because: why, in messages.
    """

    name: str
    endings: tuple[str, ...] = ()
    what: str = ""
    meaningless: tuple[str, ...] = ()
    because: str = ""


_TRACING = (
    *("args", "kwargs", "avals", "constraints", "static", "variants", "donate_argnums", "donate_argnames"),
    *("keep_unused", "inline", "matmul_precision", "mesh", "in_shardings", "out_shardings", "vjp_order"),
    *("enable_x64", "prng_impl", "environment", "host_callbacks"),
)
_OF_JAX = (
    "inline",
    "prng_impl",
    "host_callbacks",
    "plugins",
)
FRONTENDS = (
    Frontend("jax"),
    Frontend(
        "stablehlo",
        (".mlir", ".mlirbc"),
        "a StableHLO module, which is not traced",
        (*_TRACING, "frontend"),
        "the module itself says it",
    ),
    Frontend("arrays", (), "traced by stagec itself", _OF_JAX, "it says how JAX traces"),
)
TRACERS = tuple(frontend.name for frontend in FRONTENDS if not frontend.endings)
"""Names of the frontends that trace a Python function: the values of the key `frontend`. The first is the default."""


def of_entry(entry: str, name: str | None = None) -> Frontend:
    """Return the frontend of a function by its `entry`: that of the file's ending; of no file, the named one.

    name: the key `frontend`; None, and anything that is not a name: JAX.
    """
    files = (
        frontend for frontend in FRONTENDS if frontend.endings and ":" not in entry and entry.endswith(frontend.endings)
    )
    tracer = next((frontend for frontend in FRONTENDS if not frontend.endings and frontend.name == name), FRONTENDS[0])
    return next(files, tracer)
