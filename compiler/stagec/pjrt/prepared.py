"""Fast paths after a successful call: leaves of the same kinds go to XLA without a check of each.

`jax.jit` does the same in C++, with a signature of its arguments as the key of its executables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from jaxlib import _jax

from stagec.pjrt import dispatch
from stagec.pjrt.arrays import AbstractArray, DeviceArray, placing, reading
from stagec.pjrt.executable import Executable
from stagec.pjrt.shardings import Sharding
from stagec.pjrt.weights import Weight

if TYPE_CHECKING:
    from numpy.typing import NDArray

Kind: TypeAlias = AbstractArray | tuple[tuple[int, ...], np.dtype[Any]] | Weight | None
"""The facts about a leaf that XLA needs: a device array's shape, dtype, sharding and layout; a numpy array's shape and
dtype; a weight itself.

None for any other object, because its type does not determine them; its calls are never remembered.
"""

Kinds: TypeAlias = tuple[Kind, ...]
MOST_KINDS = 64
"""How many kinds of calls a function remembers. Calls of more kinds work too, without this path."""

_Host: TypeAlias = tuple[int, Sharding, Callable[[Sequence[np.ndarray[Any, Any]]], _jax.ArrayImpl]]
"""Number of a parameter, and the way to move its array to the devices."""


def kinds_of(leaves: Sequence[Any]) -> Kinds:
    """Return the kind of each leaf. Kinds that are equal mean leaves that an executable takes alike."""
    # Equal device arrays have the same abstract array (`arrays.abstract_array`), so comparing hundreds of kinds
    # compares identities.
    kinds: list[Kind] = []
    for leaf in leaves:  # Python 3.11 makes a function for a comprehension, and this slows calls with few arrays
        of = type(leaf)
        if of is DeviceArray:
            kinds.append(leaf.aval)
        elif of is np.ndarray:
            kinds.append((leaf.shape, leaf.dtype))
        elif of is Weight:
            kinds.append(leaf)
        else:
            kinds.append(None)
    return tuple(kinds)


class Prepared(NamedTuple):
    """Calls of one executable with leaves of the same kinds.

    buffers: runs the executable, and returns the buffers of its results; None if a leaf was donated to an earlier
        call: nothing ran.
    results: of the executable, for its device arrays.
    read: takes the buffers and returns numpy arrays; None if a leaf is a device array, so that results stay there.
    """

    buffers: Callable[[Sequence[Any]], Sequence[_jax.ArrayImpl] | None]
    results: Sequence[AbstractArray]
    read: Callable[[Sequence[_jax.ArrayImpl]], list[NDArray[Any]]] | None

    @staticmethod
    def for_kinds(
        executable: Executable, kinds: Kinds, kept: Sequence[int], donated: Sequence[bool], donate: bool
    ) -> Prepared | None:
        """Return calls of `executable`; None if a leaf needs a check, a copy or a move each time.

        kept: the indices of the leaves that are its parameters. donated: for each leaf. donate: whether the caller
        gives them up.
        """
        # A call that keeps its donated arguments gives the executable new copies each time.
        if None in kinds or (not donate and True in donated):
            return None
        host: list[_Host] = []
        weights = []
        for number, (i, aval) in enumerate(zip(kept, executable.parameters, strict=True)):
            match kinds[i]:
                case AbstractArray() as kind:
                    fits = kind.lies_as(aval)
                    shape, dtype = kind.shape, kind.dtype
                case Weight() as weight:  # a donated one is copied each time
                    fits, shape, dtype = not donated[i], weight.shape, weight.dtype
                    weights.append((number, weight.on(aval)._buffer))
                case (shape, dtype):
                    fits = True
                    host.append((number, aval.sharding, placing(aval, donated[i])))
            # They were checked against the function's avals; XLA checks nothing, and gets these buffers unseen.
            if not fits or shape != aval.shape or dtype != aval.dtype:
                return None
        call: dispatch.Call | None = None
        if host or weights:
            call = partial(_put_and_execute, executable, host)
        numbers = [number for number, _, _ in host]
        if call and numbers and not any(donated[kept[number]] for number in numbers):
            call = dispatch.dispatching(executable, numbers, call) or call
        on_device = any(isinstance(kind, AbstractArray) for kind in kinds)
        all_kept = len(kept) == len(kinds)
        is_hosted = len(host) == len(kept)
        buffers = _buffers(executable, None if all_kept else kept, call, weights, any(donated), is_hosted)
        return Prepared(buffers, executable.results, None if on_device else reading(executable.results))


def _buffers(
    executable: Executable,
    kept: Sequence[int] | None,
    call: dispatch.Call | None,
    weights: Sequence[tuple[int, _jax.ArrayImpl]],
    donates: bool,
    is_hosted: bool,
) -> Callable[[Sequence[Any]], Sequence[_jax.ArrayImpl] | None]:
    """Return `Prepared.buffers`.

    kept: None: all. call: runs them; None: only buffers are needed. weights: by number. is_hosted: whether all
    parameters are numpy arrays.
    """
    execute = executable.execute

    def run(leaves: Sequence[Any]) -> Sequence[_jax.ArrayImpl] | None:
        taken = leaves if kept is None else [leaves[i] for i in kept]
        # After a call that donates, no one could know what was deleted before it.
        if donates and _any_deleted(taken):
            return None
        try:
            if call is None:
                return execute([leaf._buffer for leaf in taken])
            if is_hosted:
                return call(*taken)
            buffers = [leaf._buffer if type(leaf) is DeviceArray else leaf for leaf in taken]
            for number, buffer in weights:
                buffers[number] = buffer
            return call(*buffers)
        except (RuntimeError, ValueError) as error:
            if not donates and _any_deleted(taken):
                return None
            if isinstance(error, ValueError):  # `pjit` raises XLA's errors so
                raise _jax.JaxRuntimeError(str(error)) from None
            raise

    return run


def _put_and_execute(executable: Executable, host: Sequence[_Host], *given: Any) -> list[_jax.ArrayImpl]:
    buffers = list(given)
    for number, sharding, put in host:
        buffers[number] = put(sharding.pieces(buffers[number]))
    return executable.execute(buffers)


def _any_deleted(leaves: Sequence[Any]) -> bool:
    return any(type(leaf) is DeviceArray and leaf.is_deleted() for leaf in leaves)
