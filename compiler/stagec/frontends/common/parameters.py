"""The arguments of `jit`: some of a call's, which are static or donated, and the key of static ones."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex

from jaxlib import _jax

from stagec.core.trees import same
from stagec.frontends.common.user_code import positional


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
        """Return the arguments that `jit` was given. As in JAX, None is derived from the other; () means none."""
        indices = None if numbers is None else _indices(numbers)
        called = None if names is None else (names,) if isinstance(names, str) else tuple(names)
        if indices is None or called is None:
            either = inspect.Parameter.POSITIONAL_OR_KEYWORD
            try:
                pairs = list(enumerate(inspect.signature(fun).parameters.values()))
            except (TypeError, ValueError):
                pairs = []
            named = [(i, parameter.name) for i, parameter in pairs if parameter.kind is either]
            if indices is None:
                indices = tuple(i for i, name in named if name in (called or ()))
            elif called is None:
                called = tuple(name for i, name in named if i in indices)
        return Arguments(indices, called or ())

    def places(self, count: int) -> set[int]:
        """Return their indices among `count` positional arguments; negative numbers count from the end."""
        return {number % count for number in self.numbers if -count <= number < count}

    def split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, dict[int | str, Any]]:
        """Return the other arguments, as `(args, kwargs)`, and these arguments."""
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
        """Return positional arguments with other values for the first result of `split`."""
        places, left = self.places(len(args)), iter(others)
        return [value if i in places else next(left) for i, value in enumerate(args)]

    def other_parameters(self, fun: Callable[..., Any]) -> tuple[str, ...]:
        """Return the names of a function's positional parameters that are not these; the last may be `*name`."""
        names = positional(fun)
        own = {*self.names, *(names[i] for i in self.places(len(names)))}
        return tuple(name for name in names if name not in own)


def _indices(numbers: SupportsIndex | Iterable[SupportsIndex]) -> tuple[int, ...]:
    if isinstance(numbers, Iterable):
        return tuple(map(operator.index, numbers))
    return (operator.index(numbers),)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a tree, and jaxlib's PyTreeDef: JAX's if the process has imported JAX."""
    leaves, structure = _jax.pytree.default_registry().flatten(tree)
    return leaves, structure


def static_key(of: Any, static: Mapping[int | str, Any]) -> Hashable:
    """Return the key of static arguments, by place: types and values.

    of: the function that takes them, for messages. Raises ValueError for a value without a hash.
    """
    if not static:
        return ()
    keys = []
    for place, value in static.items():
        kind = type(value)
        if kind not in same.WHOLE:
            try:
                hash(value)
            except TypeError as error:
                which = f"{place!r}" if isinstance(place, str) else f"number {place}"
                what = f"{of}: static argument {which} is a {kind.__qualname__} without a hash: {error}"
                raise ValueError(f"{what}; pass what has one, such as a tuple for a list") from error
        keys.append((place, kind, value if kind in same.WHOLE else same.key(value)))
    return tuple(keys)
