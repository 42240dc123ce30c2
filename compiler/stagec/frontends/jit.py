"""What `jit` of every frontend has in common: which arguments are static, and what a call keeps, under which key.

A frontend's `Tracer` says how it traces and what is known of an array; the key is the same for all: static values and
static data of nodes by type and value (`core.trees.same`), structure, arrays, and every setting that changes a program.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, SupportsIndex, TypeAlias

from jaxlib import _jax

from stagec.core.trees import same
from stagec.pjrt.static_data import StaticData
from stagec.stages.lowered import Lowered

Run: TypeAlias = "Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]"
"""Takes the leaves of a call and what is known of each, and gives those of the result."""


class Arguments(NamedTuple):
    """Some of a function's arguments: static or donated ones, by number and by name."""

    numbers: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    @staticmethod
    def of(
        fun: Callable[..., Any],
        numbers: SupportsIndex | Iterable[SupportsIndex] | None,
        names: str | Iterable[str] | None,
    ) -> Arguments:
        """Read what `jit` is given. As in JAX, None means that the one is found from the other; () means none."""
        found = None if numbers is None else _indices(numbers)
        called = None if names is None else (names,) if isinstance(names, str) else tuple(names)
        if found is None or called is None:
            either = inspect.Parameter.POSITIONAL_OR_KEYWORD
            try:
                pairs = list(enumerate(inspect.signature(fun).parameters.values()))
            except (TypeError, ValueError):
                pairs = []
            named = [(i, parameter.name) for i, parameter in pairs if parameter.kind is either]
            if found is None:
                found = tuple(i for i, name in named if name in (called or ()))
            elif called is None:
                called = tuple(name for i, name in named if i in found)
        return Arguments(found, called or ())

    def places(self, count: int) -> set[int]:
        """Return which of `count` positional arguments they are; negative numbers count from the end."""
        return {number % count for number in self.numbers if -count <= number < count}

    def split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, dict[int | str, Any]]:
        """Return the arguments that are not among these, as `(args, kwargs)`, and those that are."""
        if not self.numbers and not self.names:
            return (args, dict(kwargs)), {}
        places = self.places(len(args))
        others = tuple([value for i, value in enumerate(args) if i not in places])
        own: dict[int | str, Any] = {i: args[i] for i in sorted(places)}
        if not kwargs:
            return (others, {}), own
        named = {name: value for name, value in kwargs.items() if name not in self.names}
        own |= {name: kwargs[name] for name in sorted(kwargs.keys() - named)}
        return (others, named), own

    def merged(self, args: tuple[Any, ...], others: Sequence[Any]) -> list[Any]:
        """Return positional arguments with other values for those that `split` gives first."""
        places, left = self.places(len(args)), iter(others)
        return [value if i in places else next(left) for i, value in enumerate(args)]


NONE = Arguments()


def _indices(numbers: SupportsIndex | Iterable[SupportsIndex]) -> tuple[int, ...]:
    if isinstance(numbers, Iterable):
        return tuple(map(operator.index, numbers))
    return (operator.index(numbers),)


class Tracer(Protocol):
    """How a frontend traces one function, and runs what it traced."""

    def within(self) -> bool:
        """Whether a call is part of something else: of a trace around it, or of a mode in which nothing is compiled."""

    def call_within(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call that is part of something else."""

    def settings(self) -> Hashable:
        """Return all that changes a program and is neither an argument nor an option."""

    def abstract(self, leaf: Any) -> Hashable:
        """Return what a program depends on of an argument. Raises TypeError for what is not an array or a number."""

    def trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the function traced for arguments like these. Raises what the function raises."""

    def runner(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], known: Sequence[Any]) -> tuple[Run, Any]:
        """Return what runs calls like this one, and the structure of their results. known: `abstract` of the leaves."""

    def eval_shape(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return shapes and dtypes of the results, in their structure."""

    def clear(self) -> None:
        """Forget what was traced."""


class Wrapped:
    """A function that is ready to be traced, lowered and compiled; calling it does all of it, once per signature.

    Made by `jit`. Methods are those of `jax.stages.Wrapped`
    (https://docs.jax.dev/en/latest/jax.stages.html#jax.stages.Wrapped) and of what `jax.jit` returns. In a class it is
    a method, as there: the instance is the first argument of a call, `Class.method.lower(instance, ...)` passes it by
    hand.

    A signature is the structure, shapes and dtypes of the arguments, static values by type and value, and all settings
    that change a program, such as `jax.enable_x64` or a mesh.
    """

    def __init__(self, fun: Callable[..., Any], like: Any, static: Arguments, tracer: Tracer) -> None:
        """like: the function, or what has its name and signature."""
        # First of all: the function's attributes come along, and may have names of ours.
        functools.update_wrapper(self, like)
        self.__wrapped__ = fun
        self._static = static
        self._tracer = tracer
        self._compiled: dict[Hashable, list[tuple[StaticData, Run, Any]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on this machine's CPU, in the user's own types.

        A function of JAX's takes numpy or JAX arrays and gives numpy arrays; a PRNG key comes back as its uint32 words.
        A function of `stagec.numpy` gives arrays of stagec's. While JAX traces or transforms a caller, `jax.jit` is
        called; under `jax.disable_jit` the function itself, with the arguments as they are, as in JAX. Inside of a
        function that stagec traces, it is part of that function: shardings are constraints there, and nothing is
        donated. Raises what the function raises while it is traced, ValueError for a static argument without a hash,
        CannotCompile when XLA refuses the program, and NotImplementedError for callbacks into Python.
        """
        tracer = self._tracer
        if tracer.within():
            return tracer.call_within(args, kwargs)
        dynamic, static = self._static.split(args, kwargs)
        leaves, structure = flatten(dynamic)
        known = tuple(map(tracer.abstract, leaves))
        key = static_key(self, static), structure, known, tracer.settings()
        static_data = StaticData.of(structure)
        kept = self._compiled.setdefault(key, [])
        for entry in kept:
            if entry[0].same(static_data):
                break
        else:
            entry = static_data, *tracer.runner(args, kwargs, known)
            kept.append(entry)
        _, run, out_structure = entry
        return out_structure.unflatten(run(leaves, known))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the method of an instance; of the class, this function."""
        return self if instance is None else types.MethodType(self, instance)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function as a `Traced`, for arguments like these: arrays, or `jax.ShapeDtypeStruct`.

        Static arguments are given as values. Raises what the function raises.
        """
        return self._tracer.trace(args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Return the function lowered for CPUs: `trace(*args, **kwargs).lower()`; it raises what these do."""
        lowered: Lowered = self.trace(*args, **kwargs).lower()
        return lowered

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result's shapes and dtypes for arguments like these, as a tree of `ShapeDtypeStruct`.

        As `jax.eval_shape` (https://docs.jax.dev/en/latest/_autosummary/jax.eval_shape.html); nothing is compiled.
        """
        return self._tracer.eval_shape(args, kwargs)

    def clear_cache(self) -> None:
        """Forget what was traced and compiled: the next call does it again."""
        self._tracer.clear()
        self._compiled.clear()

    def __repr__(self) -> str:
        return f"Wrapped({getattr(self, '__name__', self.__wrapped__)})"


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a tree, and jaxlib's PyTreeDef: JAX's where the process has imported JAX."""
    leaves, structure = _jax.pytree.default_registry().flatten(tree)
    return leaves, structure


def static_key(of: Any, static: Mapping[int | str, Any]) -> Hashable:
    """Return the key of static arguments, by place: types and values.

    of: what they are given to, for messages. Raises ValueError for a value without a hash.
    """
    if not static:
        return ()
    for place, value in static.items():
        try:
            hash(value)
        except TypeError as error:
            which = f"{place!r}" if isinstance(place, str) else f"number {place}"
            what = f"{of}: static argument {which} is a {type(value).__qualname__} without a hash: {error}"
            raise ValueError(f"{what}; pass what has one, such as a tuple for a list") from error
    return tuple((place, same.key(value)) for place, value in static.items())
