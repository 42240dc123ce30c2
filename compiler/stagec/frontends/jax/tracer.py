"""The tracer of the JAX frontend, in front of stagec's own stages (https://docs.jax.dev/en/latest/jax.stages.html).

Tracing is JAX's. What comes after it (`Lowered`, `Compiled`, `Exported`) needs no JAX: calls are compiled and run by
jaxlib, with numpy arrays in and numpy arrays out.
"""

# ruff: noqa: D102 - `jit.Tracing` documents the methods
from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import numpy as np
from jax._src import core
from jax.extend import source_info_util

from stagec.core.builds.specs import CompilerOption
from stagec.core.messages.errors import StagecError
from stagec.frontends.common import updates
from stagec.frontends.common.jit import Run, Traced
from stagec.frontends.common.options import Options, unknown
from stagec.frontends.common.parameters import flatten, static_key
from stagec.frontends.jax import advice, callbacks, contexts, evaluation, exporting, forwarding, kernels, wholes
from stagec.frontends.jax.pytrees import check, ours, to_tree
from stagec.pjrt.static_data import StaticData
from stagec.stages.exported import Exported
from stagec.stages.shardings import NamedSharding

_REFUSED = {
    "device": "stagec compiles ahead of time, before there is a device: "
    "write in_shardings and out_shardings over a mesh, or name a target when compiling",
    "backend": "stagec compiles for a platform, not for this process's backend: "
    'write lower(platforms=("tpu",)) or export(platforms=("tpu",))',
    "abstracted_axes": "write symbolic dimensions instead: "
    'trace with jax.ShapeDtypeStruct(jax.export.symbolic_shape("batch, 64"), dtype) and export',
}


def tracers(options: Options) -> Callable[[Callable[..., Any]], JaxTracer]:
    """Return the function that makes the tracer of a function. Shardings may be ours."""
    for name in unknown(options):
        if name in _REFUSED:
            raise TypeError(f"jit() does not take {name}: {_REFUSED[name]}")
        raise TypeError(f"jit() got an unexpected keyword argument {name!r}")
    of_jax: dict[str, Any] = {**options}
    compiler_options = of_jax.pop("compiler_options", None) or {}
    host_callbacks = of_jax.pop("host_callbacks", "refuse")
    if host_callbacks not in ("refuse", "drop"):
        raise ValueError(f'host_callbacks is {host_callbacks!r}; write "refuse" or "drop"')
    for name in ("in_shardings", "out_shardings"):
        shardings = of_jax.pop(name, None)
        if shardings is not None:
            of_jax[name] = jax.tree.map(_to_jax, shardings)
    return functools.partial(
        JaxTracer, options=of_jax, compiler_options=compiler_options, host_callbacks=host_callbacks
    )


class JaxTracer:
    """Traces a function with JAX; `like` is the function under `jax.jit`.

    JAX keeps its traces by static values that it compares with `==` below the first level, and ignores some settings.
    So each of our keys has a new function that JAX has not seen.
    """

    within = staticmethod(contexts.within)
    settings = staticmethod(contexts.settings)
    abstract = staticmethod(contexts.abstract)

    def __init__(
        self,
        fun: Callable[..., Any],
        options: Mapping[str, Any],
        compiler_options: Mapping[str, CompilerOption],
        host_callbacks: str,
    ) -> None:
        self.static = contexts.arguments(fun, options.get("static_argnums"), options.get("static_argnames"))
        self.like: Any = jax.jit(fun, **options)
        self._fun = fun
        self._options = options
        self._compiler_options = compiler_options
        self._host_callbacks = host_callbacks
        self._parameters = self.static.other_parameters(fun)
        self._apart: dict[Hashable, list[tuple[StaticData, Any]]] = {}

    def call_within(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with callbacks.handling(self._host_callbacks):
            if not core.trace_state_clean():
                return self._jitted_for(args, kwargs)(*args, **kwargs)
            function = self._fun if contexts.DISABLED.value else self._jitted_for(args, kwargs)
            return jax.tree.map(_from_jax, function(*args, **kwargs))

    def trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Traced:
        dynamic, _ = self.static.split(args, kwargs)
        if (closed := wholes.closed(dynamic)) is not dynamic:
            args, kwargs = tuple(self.static.merged(args, closed[0])), {**kwargs, **closed[1]}
        with callbacks.handling(self._host_callbacks):
            traced = self._jitted_for(args, kwargs).trace(*args, **kwargs)
        infos = jax.tree.leaves(traced.args_info, is_leaf=lambda info: hasattr(info, "donated"))
        return Traced(
            fun_name=traced.fun_name,
            program=traced.jaxpr,
            in_tree=to_tree(wholes.original(traced.in_tree)),
            out_tree=to_tree(traced.out_tree),
            in_structure=traced.in_tree,
            out_structure=traced.out_tree,
            flat_in_avals=jax.tree.leaves(traced.in_avals),
            flat_out_avals=traced.jaxpr.out_avals,
            donated=[info.donated for info in infos],
            _compiler_options=self._compiler_options,
            _short=lambda aval: str(aval.str_short(short_dtypes=True)),
            _out_info=lambda: traced.out_info,
            _evaluate=lambda *args, **kwargs: traced(*wholes.closed(args), **wholes.closed(kwargs)),
            _export=functools.partial(self._export, traced, args, kwargs),
            _check_trees=functools.partial(_check_trees, traced),
            _takes_references=exporting.has_references(traced),
            _by_jax=traced,
        )

    def _export(
        self,
        traced: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        platforms: Sequence[str],
        checks: Sequence[jax.export.DisabledSafetyCheck],
        newest: bool,
    ) -> Exported:
        """Export the trace. newest: also calls without a guarantee for later versions of their provider."""
        try:
            with callbacks.handling(self._host_callbacks), kernels.newest() if newest else contextlib.nullcontext():
                allow = (lambda _: None) if newest else None
                exported = exporting.export(_AsTraced(traced), args, kwargs, platforms, checks, allow)
            if faults := advice.refused(exported):
                raise TypeError("\n".join(f"{traced.fun_name}: {what}; {write}" for what, write in faults.items()))
            if not newest:
                _check_trees(traced)
            return _ours(exported, self._host_callbacks, self._parameters)
        except StagecError:
            raise
        except Exception as error:
            if refusals := callbacks.sentences(traced.jaxpr.jaxpr, platforms, traced.fun_name):
                raise NotImplementedError("\n".join(refusals)) from error
            raise

    def runner(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], known: Sequence[Any]) -> tuple[Run, Any]:
        traced = self.trace(args, kwargs)
        if traced._takes_references:
            return self._run_by_jax(args, kwargs), traced.out_structure
        compiled = traced.lower().compile()

        def run(leaves: Sequence[Any], _: Sequence[Any]) -> Sequence[Any]:
            return compiled.call_flat(list(map(_words, leaves)))

        return run, traced.out_structure

    def _run_by_jax(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
        """Return a function for calls like this one, by `jax.jit`: it can read and write a `jax.Ref`."""
        jitted = self._jitted_for(args, kwargs)
        dynamic, static = self.static.split(args, kwargs)
        structure: Any = jax.tree.structure(dynamic)
        named = {name: value for name, value in static.items() if isinstance(name, str)}

        def run(leaves: Sequence[Any], _: Sequence[Any]) -> Sequence[Any]:
            others, by_name = structure.unflatten(leaves)
            merged = self.static.merged(args, others)
            with callbacks.handling(self._host_callbacks):
                return list(map(_from_jax, jax.tree.leaves(jitted(*merged, **by_name, **named))))

        return run

    def eval_shape(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with callbacks.handling(self._host_callbacks):
            return self._jitted_for(args, kwargs).eval_shape(*args, **kwargs)

    def clear(self) -> None:
        self.like.clear_cache()
        self._apart.clear()

    def _jitted_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the function under `jax.jit`, for these static values and settings alone."""
        dynamic, static = self.static.split(args, kwargs)
        _, structure = flatten(dynamic)
        kept = self._apart.setdefault((static_key(self.like.__name__, static), structure, contexts.beyond()), [])
        for data, jitted in kept:
            if data.same(structure):
                return jitted
        function = wholes.opening(_another(self._fun, self.like.__name__), dynamic)
        jitted = jax.jit(function, **self._options)
        kept.append((StaticData.of(structure), jitted))
        return jitted


def _check_trees(traced: Any) -> None:
    check(
        "", traced.fun_name, {"the arguments have": wholes.original(traced.in_tree), "the result has": traced.out_tree}
    )


def _another(fun: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a new function that does the same, but refuses to lose an update. JAX has not seen it."""
    _exclude_our_files()
    another = forwarding.watched(fun, updates.refusal_of(name))
    another.__name__ = name  # a partial has none of its own
    return another


@functools.cache
def _exclude_our_files() -> None:
    """Make JAX skip these files when it looks for the user's line that made an operation."""
    for file in (__file__, updates.__file__, wholes.__file__):
        source_info_util.register_exclusion(file)


class _AsTraced:
    """A traced `jax.stages.Wrapped`: `jax.export` lowers its trace, and traces nothing again.

    It would otherwise see other JAX settings, of those that are set for a while (`jax.enable_x64`, a mesh).
    """

    def __init__(self, traced: Any) -> None:
        self._traced = traced
        self.__name__ = traced.fun_name

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        return self._traced

    __call__ = lower = eval_shape = trace


def _ours(exported: jax.export.Exported, host_callbacks: str, parameters: tuple[str, ...] = ()) -> Exported:
    """Return JAX's `Exported` as ours; the first request makes its vector-Jacobian product."""

    @functools.cache
    def vjp() -> Exported:
        with callbacks.handling(host_callbacks):
            return _ours(exported.vjp(), host_callbacks)

    return dataclasses.replace(ours(exported), _vjp=vjp if exported.has_vjp() else None, _parameters=parameters)


def _to_jax(sharding: Any) -> Any:
    if not isinstance(sharding, NamedSharding):
        return sharding
    types = tuple(jax.sharding.AxisType[name] for name in sharding.mesh.axis_types)
    mesh = jax.sharding.AbstractMesh(sharding.mesh.axis_sizes, sharding.mesh.axis_names, types)
    entries = [axes or None for axes in sharding.spec.partitions]
    spec = jax.sharding.PartitionSpec(
        *entries, unreduced=frozenset(sharding.spec.unreduced), reduced=frozenset(sharding.spec.reduced)
    )
    return jax.sharding.NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)


def _words(leaf: Any) -> Any:
    """Return an argument as the compiled function takes it: of a PRNG key its words."""
    return evaluation.words(leaf) if isinstance(leaf, jax.Array) else leaf


def _from_jax(leaf: Any) -> Any:
    """Return a function's result in the form of a call: JAX's arrays as numpy's."""
    return np.asarray(_words(leaf)) if isinstance(leaf, jax.Array) else leaf
