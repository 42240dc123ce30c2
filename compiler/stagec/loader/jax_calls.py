"""Calls with JAX's arrays: they run on JAX's client, and their results are JAX's arrays too.

`jax.jit` is built on jaxlib's `pjit`. `pjit` remembers calls that succeeded (`pjrt/dispatch.py`): by the arguments, if
it checks everything that the loader would check, and otherwise by their leaves.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from jaxlib import _jax

from stagec.core.messages.refusal import CallError
from stagec.pjrt import dispatch, jax_arrays
from stagec.pjrt.arrays import AbstractArray, DeviceArray
from stagec.pjrt.executable import Executable
from stagec.pjrt.jax_arrays import JaxArray, Results
from stagec.pjrt.weights import Weight

if TYPE_CHECKING:
    from stagec.loader.padding import Fit
    from stagec.pjrt.calling_convention import Signature

_MOST_MISSES = 16
"""After this many calls whose arguments `pjit` could not remember, calls give it only the leaves."""


class _Owner(Protocol):
    """What these calls use of their `Variant`."""

    whole: Callable[..., Any] | None

    @property
    def interface(self) -> Signature: ...

    @property
    def jax_calls(self) -> JaxCalls: ...

    def call(self, args: tuple[object, ...], kwargs: dict[str, object], donate: bool) -> Any: ...

    def resolved(self, leaves: Sequence[Any], of_jax: bool) -> tuple[Signature, Fit | None]: ...

    def failed(self, error: Exception, signature: Signature) -> Exception: ...


class JaxCalls:
    """The calls of one variant that have JAX's arrays among their arguments.

    whole: `pjit`, which takes the arguments of a call and returns its result; None if it may not.
    """

    def __init__(self, variant: _Owner) -> None:
        # `pjit` is a C++ object. This frees a bundle without references at once, and not at a garbage collection.
        owner = weakref.ref(variant)
        self._variant = owner
        self._interface = interface = variant.interface
        self._leaves = dispatch.remembering(partial(_run_leaves, owner), partial(_miss_leaves, owner))
        self._weights: dict[Weight, _jax.ArrayImpl] = {}
        self._results: dict[Any, Results] = {}
        self._misses = 0
        self._has_keys = any(aval.dtype.startswith("key<") for aval in interface.description.out_avals)
        self.whole: Any = None
        if interface.out_structure is not None and not self._has_keys:
            both = partial(_run_whole, owner), partial(_miss_whole, owner)
            self.whole = dispatch.remembering(*both, interface.registry)

    def call(self, leaves: Sequence[Any], donate: bool) -> Sequence[Any]:
        """Return the flat results. leaves: some are JAX's arrays, and all are of the right dtypes."""
        if donate:
            known = self._weights
            taken = [known.get(leaf, leaf) if type(leaf) is Weight else leaf for leaf in leaves] if known else leaves
            try:
                results = self._leaves(*taken)
            except (RuntimeError, ValueError) as error:
                raise self.error(error, leaves) from None
        else:
            results = self.run(leaves, donate)
        if self._has_keys:
            return list(map(jax_arrays.as_key, results, self._interface.description.out_avals))
        return results  # type: ignore[no-any-return]

    def run(self, leaves: Sequence[Any], donate: bool = True) -> Sequence[Any]:
        """Run the executable for leaves that no cache remembers; return the flat results."""
        signature, fit = _alive(self._variant).resolved(leaves, of_jax=True)
        executable = signature.executable
        arrays = [jax_arrays.taken(leaf) if type(leaf) is JaxArray else leaf for leaf in leaves]
        self._check_clients(leaves, arrays, executable)
        if fit is not None:
            results = fit.cut(signature.call(fit.fill(arrays), donate))
            put, (device, *_) = sys.modules["jax"].device_put, executable.devices
            return [put(np.asarray(result), device) for result in results]
        buffers = signature.buffers(arrays, donate)
        for number, i in enumerate(signature.description.kept_var_idx):
            if isinstance(weight := leaves[i], Weight) and not signature.description.donated[i]:
                self._weights[weight] = buffers[number]
        return self._results_of(leaves, executable).execute(buffers)

    def path(self, leaves: Sequence[Any], structure: Any = None) -> dispatch.FastPath | None:
        """Return what `pjit` may remember of a call with leaves like these; None if the loader must check each call.

        structure: jaxlib's PyTreeDef of the result; None: of the list of its leaves.
        """
        signature, fit = _alive(self._variant).resolved(leaves, of_jax=True)
        executable, description = signature.executable, signature.description
        if fit is not None:
            return None
        hosted = []
        for number, (i, aval) in enumerate(zip(description.kept_var_idx, executable.parameters, strict=True)):
            leaf = leaves[i]
            if type(leaf) is np.ndarray and not description.donated[i]:
                hosted.append(number)
                continue
            is_usual = not (aval.sharding.memory_kind or aval.layout)
            if type(leaf) is not JaxArray or not is_usual or not jax_arrays.taken(leaf).aval.lies_as(aval):
                return None
        if not dispatch.takes(executable, hosted):
            return None
        kept = [i in description.kept_var_idx for i in range(len(leaves))]
        results = self._results_of(leaves, executable)
        return dispatch.fast_path(executable, kept, results.avals, results.shardings, results.committed, structure)

    def path_of_whole(self, args: tuple[object, ...], kwargs: dict[str, object]) -> dispatch.FastPath | None:
        """Return what `pjit` may remember of a call with arguments like these, as `path`; None unless all are JAX's.

        `pjit` ignores the byte order of a numpy array: it reads swapped bytes as native ones (jaxlib 0.10.2).
        """
        leaves = self._interface.plain_leaves(args, kwargs)
        path = None
        if leaves is not None and {*map(type, leaves)} == {JaxArray}:
            path = self.path(leaves, self._interface.out_structure)
        if path is None:
            self._misses += 1
            if self._misses > _MOST_MISSES:
                self.whole = None
        return path

    def error(self, error: Exception, leaves: Sequence[Any]) -> Exception:
        """Return the error that a call raises if `pjit` raised `error`."""
        variant = _alive(self._variant)
        for i, leaf in enumerate(leaves):
            if "deleted" in str(error) and type(leaf) is JaxArray and leaf.is_deleted():
                return self._interface.deleted(i)
        return variant.failed(error, variant.resolved(leaves, of_jax=True)[0])

    def _results_of(self, leaves: Sequence[Any], executable: Executable) -> Results:
        """Return how the executable's results become JAX's arrays, as those of `jax.jit` with the same arguments."""
        # The caller does not own the buffers of weights, so their devices do not decide the devices of results.
        own = [leaf for leaf in leaves if type(leaf) is JaxArray and not isinstance(leaf.aval, AbstractArray)]
        committed = len(executable.devices) > 1 or any(leaf.committed for leaf in own)
        meshes = (getattr(leaf.sharding, "mesh", None) for leaf in own)
        order = executable.devices
        mesh = next((mesh for mesh in meshes if mesh is not None and tuple(mesh.devices.flat) == order), None)
        key = executable, committed, mesh
        if key not in self._results:
            named = None if mesh is None else partial(_named, mesh)
            self._results[key] = Results(executable, committed, named)
        return self._results[key]

    def _check_clients(self, leaves: Sequence[Any], arrays: Sequence[Any], executable: Executable) -> None:
        """Raise CallError ("client") if an array belongs to another client than the executable."""
        client = executable.devices[0].client
        for i, (leaf, array) in enumerate(zip(leaves, arrays, strict=True)):
            if isinstance(array, DeviceArray) and array.sharding.devices[0].client is not client:
                where = f"{self._interface.name}: {self._interface.path(i)}"
                if type(leaf) is JaxArray:
                    what = "is a JAX array, and the bundle was loaded for other devices than JAX's"
                    raise CallError(
                        "client", f"{where} {what}: load it with devices=jax.devices(), or pass numpy's arrays"
                    )
                what = "is on another device than JAX's, and other arguments are JAX arrays"
                raise CallError("client", f"{where} {what}: pass jax.numpy.from_dlpack(array)")


def _named(mesh: Any, aval: AbstractArray) -> Any:
    """Return how an array lies on the devices of a JAX mesh, by its axes; XLA's form if the axes cannot express it."""
    own, of_jax = aval.sharding, sys.modules["jax"].sharding
    try:
        from stagec.stages.shardings import named_sharding  # few functions run on several devices

        spec = named_sharding(own.spec, len(aval.shape), mesh).spec
    except (ImportError, ValueError):  # Bazel's library of the loader, //compiler:runtime, has no stages
        return own.xla
    axes = [names[0] if len(names) == 1 else names or None for names in spec.partitions]
    names = of_jax.PartitionSpec(*axes, unreduced={*spec.unreduced})
    return of_jax.NamedSharding(mesh, names, memory_kind=own.memory_kind)


def _alive(owner: Callable[[], _Owner | None]) -> _Owner:
    variant = owner()
    assert variant is not None  # it is what is called
    return variant


def _run_leaves(owner: Callable[[], _Owner | None], *leaves: Any) -> Sequence[Any]:
    return _alive(owner).jax_calls.run(leaves)


def _miss_leaves(owner: Callable[[], _Owner | None], *leaves: Any) -> tuple[Sequence[Any], dispatch.FastPath | None]:
    calls = _alive(owner).jax_calls
    path = calls.path(leaves)  # before the call, which may delete them
    return calls.run(leaves), path


def _run_whole(owner: Callable[[], _Owner | None], *args: Any, **kwargs: Any) -> Any:
    return _alive(owner).call(args, kwargs, donate=True)


def _miss_whole(owner: Callable[[], _Owner | None], *args: Any, **kwargs: Any) -> tuple[Any, dispatch.FastPath | None]:
    variant = _alive(owner)
    path = variant.jax_calls.path_of_whole(args, kwargs)
    result = variant.call(args, kwargs, donate=True)
    if path is None:
        variant.whole = None
    return result, path
