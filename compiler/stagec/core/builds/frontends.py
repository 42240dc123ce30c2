"""The frontends from a manifest's view: the entries of each, and the keys that it does not use.

The code of each is a module of `stagec.frontends`, or one of an extension (`core/builds/extensions.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Frontend:
    """A language in which functions are written.

    name: as the key `frontend` has it.
    module: the module that has the functions of `frontends.frontend.Frontend`.
    tracer: the module whose `tracers` traces for `stagec.jit`; "": no function has this frontend.
    package: what must be installed for it, besides the core.
    preloaded: more modules that a process imports before it forks for exports.
    endings: of the files that an entry may name; empty: an entry is a Python object, `package.module:attribute`.
    what: what such an entry is, in messages.
    meaningless: keys of a function that have no meaning then. because: why, in messages.
    """

    name: str
    module: str
    tracer: str = ""
    package: str = "stagec"
    preloaded: tuple[str, ...] = ()
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
    Frontend("jax", "stagec.frontends.jax.export", "stagec.frontends.jax.tracer", "jax"),
    Frontend(
        "stablehlo",
        "stagec.frontends.stablehlo",
        endings=(".mlir", ".mlirbc"),
        what="a StableHLO module, which is not traced",
        meaningless=(*_TRACING, "frontend"),
        because="the module itself says it",
    ),
    Frontend(
        "arrays",
        "stagec_arrays.frontend.export",
        "stagec_arrays.frontend.staging",
        "stagec_arrays",
        ("stagec_arrays.numpy", "stagec_arrays.lax"),
        what="traced by stagec itself",
        meaningless=_OF_JAX,
        because="it says how JAX traces",
    ),
)
TRACERS = {frontend.name: frontend for frontend in FRONTENDS if frontend.tracer}
"""The frontends that trace a Python function, by the values of the key `frontend`. The first is the default."""


def of_entry(entry: str, name: str | None = None) -> Frontend:
    """Return the frontend of a function by its `entry`: that of the file's ending; of no file, the named one.

    name: the key `frontend`; None, and anything that is not a name: JAX.
    """
    files = (
        frontend for frontend in FRONTENDS if frontend.endings and ":" not in entry and entry.endswith(frontend.endings)
    )
    return next(files, TRACERS.get(name or "", FRONTENDS[0]))
