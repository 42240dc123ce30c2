"""Callbacks into the Python process that traced a model: no artifact can hold those.

`sentences` and `problems` find their lines; `handling` leaves those without results out while a model is traced.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import jax
import jax.export

from stagec.core.builds.specs import FunctionSpec
from stagec.core.messages.errors import Problem
from stagec.frontends.common import patched, user_code

_CALLBACKS = frozenset(patch.object.name for patch in patched.CALLBACKS)
"""Names of the primitives that call back into Python."""
_VARIABLES = {"equinox": ("EQX_ON_ERROR", 'its checks then give NaN where they fail; with "off" it checks nothing')}
"""Libraries with a variable that turns off callbacks, and the effect of the value "nan"."""
_HANDLING: Any = jax.make_user_context(None)
"""How to bind callbacks: "drop", or a `_Seen` that keeps their locations; None: as in JAX.

JAX keeps what it traced under another value apart (https://docs.jax.dev/en/latest/_autosummary/jax.make_user_context.html).
"""
_Frames = tuple[tuple[str, int], ...]
"""File name and line of each frame of a call stack, the innermost first."""


@dataclass(eq=False)
class _Seen:
    """Where callbacks were bound."""

    frames: list[_Frames] = field(default_factory=list)


@dataclass(frozen=True)
class Callback:
    """A callback in a program.

    location: FILE:LINE in the model; "" if it is not known. primitive: name of the operation that calls back.
    library: the distribution that adds it, with its version, and the line there; "" if the model itself does.
    distribution: name of that. results: whether it has any.
    """

    location: str
    primitive: str
    library: str
    distribution: str
    results: bool

    def what(self, entry: str) -> str:
        """Return the fault. entry: the name in the message if no line of the model is known."""
        of_library = f" of {self.library}" if self.library else ""
        return f"{self.location or entry}: a host callback ({self.primitive}){of_library} cannot be built ahead of time"

    def write(self, drop: str, declare: str, environment: Mapping[str, str]) -> str:
        """Return the correction.

        drop: how to drop callbacks without results. declare: how to set a variable, with {} for name and value.
        environment: variables that were declared.
        """
        if not self.results:
            return f"write {drop} to build the function without it, or take it out"
        variable, meaning = _VARIABLES.get(self.distribution, ("", ""))
        only = f"{drop} would not help: this callback has results"
        if variable and variable not in environment:
            return f"{declare.format(variable, 'nan')}: {meaning}\n{only}"
        if self.library:
            return f"{declare.format('NAME', 'VALUE')} if {self.distribution} has a variable that turns it off\n{only}"
        return f"take it out of the function; what it computes can be a result\n{only}"


def handling(host_callbacks: str) -> AbstractContextManager[object]:
    """Let JAX trace with callbacks as "refuse" or "drop" says; dropped ones are as if they were not in the source.

    It holds for this thread alone.
    """
    if host_callbacks == "refuse":
        return nullcontext()
    _watch()
    context: AbstractContextManager[object] = _HANDLING(host_callbacks)
    return context


def _watch() -> None:
    """Make the primitives check `_HANDLING` from now on when they are bound."""
    for patch in patched.CALLBACKS:
        patch.forever(_bind)


def _bind(bind: Callable[..., Any], *operands: Any, **params: Any) -> Any:
    how = _HANDLING.value
    # What is never bound is in no jaxpr, and no transformation of JAX sees it. So a source without the callback gives
    # the same bytes.
    if how == "drop" and not params.get("result_avals"):
        return []
    if isinstance(how, _Seen):
        how.frames.append(_stack())
    return bind(*operands, **params)


def _stack() -> _Frames:
    return tuple((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe(2)))


def problems(spec: FunctionSpec, jaxpr: Any) -> list[Problem]:
    """Return a problem for each callback of the model, in the order of the program."""

    def problem(callback: Callback) -> Problem:
        declare = 'write environment = {{ {} = "{}" }}'
        write = callback.write('host_callbacks = "drop"', declare, spec.environment)
        return Problem(spec.manifest, spec.key, callback.what(spec.entry), write)

    return list(map(problem, callbacks(jaxpr, spec.platforms)))


def sentences(jaxpr: Any, platforms: Sequence[str], entry: str) -> list[str]:
    """Return two lines for each callback of the model, in the order of the program: the fault, the correction.

    platforms: those of the lowering. entry: the name in the message if no line is known.
    """
    declare = 'set os.environ["{}"] = "{}" before the library is imported'
    return [
        f"{callback.what(entry)}\n  " + callback.write('host_callbacks="drop"', declare, {}).replace("\n", "\n  ")
        for callback in callbacks(jaxpr, platforms)
    ]


def callbacks(jaxpr: Any, platforms: Sequence[str]) -> list[Callback]:
    """Return the callbacks of a program that is lowered for `platforms`, in its order; those of one line once."""
    lowered: dict[str, _Frames | None] = {}
    by_line: dict[tuple[str, str, str], Callback] = {}
    for equation, outside in _leaves(jaxpr, ()):
        inside: _Frames | None = ()
        if equation.primitive.name not in _CALLBACKS:
            key = f"{equation.primitive} {[str(variable.aval) for variable in equation.invars]} {equation.params}"
            if key not in lowered:
                lowered[key] = _lowers_to_a_callback(equation, platforms)
            inside = lowered[key]
        if inside is not None:
            callback = _callback(equation, (*inside, *_frames(equation), *outside))
            by_line.setdefault((callback.location, callback.primitive, callback.distribution), callback)
    return list(by_line.values())


def _callback(equation: Any, frames: _Frames) -> Callback:
    frame = user_code.library(frames)
    name, version, line = _distribution(*frame) if frame else ("", "", "")
    library = f"{name} {version}".strip() + f" ({line})" if frame else ""
    return Callback(user_code.location(frames), equation.primitive.name, library, name.lower(), bool(equation.outvars))


def _distribution(module: str, line: str) -> tuple[str, str, str]:
    """Return the distribution of a module, its version, and the line in it; the module itself if it has none."""
    name = next(iter(metadata.packages_distributions().get(module, [])), "")
    return (name, metadata.version(name), line) if name else (module, "", line)


def _leaves(jaxpr: Any, outside: _Frames) -> Iterator[tuple[Any, _Frames]]:
    """Yield each equation that has no jaxpr inside, and the frames of the equations around it.

    Where a library has jitted a function, call stacks inside begin there: those outside have the model's line.
    """
    for equation in jaxpr.eqns:
        inside = [inner for value in equation.params.values() for inner in _jaxprs(value)]
        if not inside or equation.primitive.name in _CALLBACKS:
            yield equation, outside
        for inner in inside:
            yield from _leaves(inner, (*_frames(equation), *outside))


def _lowers_to_a_callback(equation: Any, platforms: Sequence[str]) -> _Frames | None:
    """Return the location where an operation binds a callback during lowering (no jaxpr shows it); None: nowhere."""

    def alone(*operands: Any) -> Any:
        return equation.primitive.bind(*operands, **equation.params)

    _watch()
    seen = _Seen()
    try:
        operands = [jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype) for variable in equation.invars]
        with _HANDLING(seen):
            jax.export.export(jax.jit(alone), platforms=list(platforms))(*operands)
    except Exception as error:  # noqa: BLE001 - an operation that wants more around it raises anything
        if isinstance(error, NotImplementedError) and "callback" in str(error):
            return seen.frames[0] if seen.frames else ()
    return None


def _frames(equation: Any) -> _Frames:
    """Return the location that made an equation; () if it is not known."""
    stack = equation.source_info.traceback
    frames = [(frame.file_name, frame.line_num) for frame in stack.frames] if stack else []
    # vmap of an io_callback leaves no call stack: the function that is called back is in the model as well.
    function = inspect.unwrap(getattr(equation.params.get("callback"), "callback_func", None) or len)
    code = getattr(function, "__code__", None)
    return (*frames, (code.co_filename, code.co_firstlineno)) if code else tuple(frames)


def vjp_jaxpr(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], order: int) -> Any:
    """Return the jaxpr of a vector-Jacobian product of `function`, taken `order` times."""

    def flat(arguments: Any) -> list[Any]:
        return _inexact(function(*arguments[0], **arguments[1]))

    def derived(of: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
        def product(arguments: Any) -> list[Any]:
            results, pull = jax.vjp(of, arguments)
            return _inexact(pull(jax.tree.map(jax.numpy.ones_like, results)))

        return product

    product: Callable[[Any], list[Any]] = flat
    for _ in range(order):
        product = derived(product)
    return jax.make_jaxpr(product)((args, kwargs)).jaxpr


def _inexact(tree: Any) -> list[Any]:
    """The leaves that have a derivative."""
    return [leaf for leaf in jax.tree.leaves(tree) if jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)]


def _jaxprs(value: Any) -> list[Any]:
    """The jaxprs in a parameter of an equation: closed or open ones, alone or in containers."""
    if isinstance(value, list | tuple):
        return [jaxpr for item in value for jaxpr in _jaxprs(item)]
    if isinstance(value, Mapping):
        return _jaxprs(list(value.values()))
    inner = getattr(value, "jaxpr", value)
    return [inner] if hasattr(inner, "eqns") else []
