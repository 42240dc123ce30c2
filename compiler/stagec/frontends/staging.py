"""`jit`: the first stage of every function, by the frontend that traces it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack, overload

from stagec.core.builds import extensions
from stagec.core.builds.frontends import TRACERS
from stagec.core.messages.errors import either, missing_package, near
from stagec.frontends.common.options import Options

if TYPE_CHECKING:
    from stagec.frontends.common.jit import P, R_co, Tracing, Wrapped


@overload
def jit(fun: Callable[P, R_co], /, *, frontend: str = ..., **options: Unpack[Options]) -> Wrapped[P, R_co]: ...


@overload
def jit(
    fun: None = None, /, *, frontend: str = ..., **options: Unpack[Options]
) -> Callable[[Callable[P, R_co]], Wrapped[P, R_co]]: ...


def jit(fun: Callable[..., Any] | None = None, /, *, frontend: str = "jax", **options: Unpack[Options]) -> Any:
    """Return `fun` as a `Wrapped`; without `fun`, return a decorator.

    Parameters have the meaning that they have in `jax.jit`
    (https://docs.jax.dev/en/latest/_autosummary/jax.jit.html):

    in_shardings, out_shardings: trees of shardings, of JAX or `NamedSharding`. None leaves them to XLA.
    static_argnums, static_argnames: arguments that are Python values at tracing time, by positions and by names.
    donate_argnums, donate_argnames: arguments whose buffers a call may overwrite (device arrays; numpy's are copied).
    keep_unused: whether arguments that the function does not use stay parameters of the program. False: they do not.
    inline: whether the function is inlined into its callers. False: it is not.
    compiler_options: XLA flags, without dashes. And, as in JAX, `optimization_level` and `memory_fitting_level`
        ("O0" to "O3", or XLA's number), `exec_time_optimization_effort` and `memory_fitting_effort` (-1.0 to 1.0;
        XLA has them before jaxlib 0.11.1), and `fdo_profile` (a ProfiledInstructionsProto, as bytes).
    host_callbacks: "drop" leaves out callbacks into Python that have no results, such as `jax.debug.print`. "refuse",
        the default, raises for all callbacks. If an environment variable turns off those of a library, set it before
        you import the library.
    frontend: the tracer of the function. "jax" means JAX. "arrays" means stagec itself, for functions of
        `stagec_arrays.numpy`; these cannot have callbacks.

    Raises TypeError for `device`, `backend` and `abstracted_axes`, and explains the alternative; ValueError for another
    `host_callbacks` or `frontend`; and ModuleNotFoundError if `frontend` is "jax" and JAX is not installed.

    >>> import numpy as np
    >>> double = stagec.jit(lambda x: x * 2)
    >>> double(np.ones(3, np.float32))
    array([2., 2., 2.], dtype=float32)
    >>> stored = double.lower(np.ones(3, np.float32)).compile().serialize()
    """
    tracer = _tracers(frontend)(options)
    from stagec.frontends.common.jit import Wrapped

    def wrap(fun: Callable[..., Any]) -> Wrapped[..., Any]:
        return Wrapped(fun, tracer(fun))

    return wrap if fun is None else wrap(fun)


def _tracers(frontend: str) -> Callable[[Options], Callable[[Callable[..., Any]], Tracing]]:
    """Return a function that takes the parameters of `jit`, refuses unsupported ones, and makes tracers."""
    if frontend not in TRACERS:
        raise ValueError(f"frontend is {frontend!r}; {near(frontend, TRACERS) or f'write {either([*TRACERS])}'}")
    try:
        tracers: Callable[[Options], Callable[[Callable[..., Any]], Tracing]] = extensions.imported(
            TRACERS[frontend].tracer, f"stagec.jit(frontend={frontend!r})"
        ).tracers
    except ModuleNotFoundError as error:
        sentence = missing_package(error, "stagec.jit")
        if sentence is None:
            raise
        instead = 'or write frontend="arrays" for a function of stagec_arrays.numpy'
        raise ModuleNotFoundError(f"{sentence}, {instead}", name=error.name) from None
    return tracers
