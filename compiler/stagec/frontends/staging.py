"""`jit`: the first stage of every function, by the frontend that traces it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, Self, TypeVar, overload

from stagec.core.builds.frontends import TRACERS
from stagec.core.builds.specs import CompilerOption
from stagec.core.telling.errors import either, missing_package, near

if TYPE_CHECKING:
    from stagec.stages.lowered import Lowered


P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Jitted(Protocol[P, R_co]):
    """What `jit` gives, for type checkers: a `Wrapped` of either frontend, which takes what the function takes.

    It gives what the function gives, with NumPy's or stagec's arrays in the places of those that are traced.
    """

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the function."""

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., R_co]: ...

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Return a `Traced`, for arguments like these: arrays, or `ShapeDtypeStruct`."""

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Return the function lowered for CPUs."""

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Return shapes and dtypes of the result."""

    def clear_cache(self) -> None:
        """Forget what was compiled."""


@overload
def jit(
    fun: Callable[P, R_co],
    /,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: Mapping[str, CompilerOption] | None = None,
    host_callbacks: str = "refuse",
    frontend: str = "jax",
) -> Jitted[P, R_co]: ...


@overload
def jit(
    fun: None = None,
    /,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: Mapping[str, CompilerOption] | None = None,
    host_callbacks: str = "refuse",
    frontend: str = "jax",
) -> Callable[[Callable[P, R_co]], Jitted[P, R_co]]: ...


def jit(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: Mapping[str, CompilerOption] | None = None,
    host_callbacks: str = "refuse",
    frontend: str = "jax",
    **refused: Any,
) -> Any:
    """Return `fun` as a `Wrapped`; without `fun`, a decorator.

    Parameters mean what they mean in `jax.jit` (https://docs.jax.dev/en/latest/_autosummary/jax.jit.html):

    in_shardings, out_shardings: trees of shardings, JAX's or `NamedSharding`; None leaves them to XLA.
    static_argnums, static_argnames: arguments that are Python values at tracing time.
    donate_argnums, donate_argnames: arguments whose buffers a call may overwrite (device arrays; numpy's are copied).
    keep_unused: whether arguments that the function does not use stay parameters of the program.
    inline: whether the function is inlined into those that call it.
    compiler_options: XLA flags, without dashes. And, as in JAX, `optimization_level` and `memory_fitting_level`
        ("O0" to "O3", or XLA's number), `exec_time_optimization_effort` and `memory_fitting_effort` (-1.0 to 1.0), and
        `fdo_profile` (a ProfiledInstructionsProto, as bytes).
    host_callbacks: "drop" leaves callbacks into Python out that have no results, such as `jax.debug.print`; "refuse"
        raises for all. If an environment variable turns those of a library off, set
        it before you import the library.
    frontend: what traces the function. "jax": JAX. "arrays": stagec itself, a function of `stagec.numpy`; then there
        are no callbacks.
    Raises TypeError for `device`, `backend` and `abstracted_axes`, saying what to write instead, ValueError for
    another `host_callbacks` or `frontend`, and ModuleNotFoundError where JAX is wanted and not installed.
    """
    shared: dict[str, Any] = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "keep_unused": keep_unused,
        "in_shardings": in_shardings,
        "out_shardings": out_shardings,
    }
    of_jax = {"inline": inline}
    if frontend == "arrays":
        from stagec.frontends import array_stages

        given = [name for name, value in {**of_jax, **refused}.items() if value]
        if given or host_callbacks != "refuse":
            raise TypeError(f'jit() does not take {", ".join(given) or "host_callbacks"} with frontend = "arrays"')
        wrap: Callable[..., Any] = functools.partial(array_stages.jit, **shared, compiler_options=compiler_options)
        return wrap if fun is None else wrap(fun)
    if frontend not in TRACERS:
        raise ValueError(f"frontend is {frontend!r}; {near(frontend, TRACERS) or f'write {either(TRACERS)}'}")
    try:
        wrapped = importlib.import_module("stagec.frontends.wrapped")
    except ModuleNotFoundError as error:
        sentence = missing_package(error, "stagec.jit")
        if sentence is None:
            raise
        instead = 'or write frontend="arrays" for a function of stagec.numpy'
        raise ModuleNotFoundError(f"{sentence}, {instead}", name=error.name) from None
    return wrapped.jit(fun, {**shared, **of_jax}, compiler_options or {}, host_callbacks, refused)
