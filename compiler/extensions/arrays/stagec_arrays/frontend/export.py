"""The arrays frontend: trace the Python function of a manifest with `stagec_arrays`, and export it, without JAX."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from stagec.core.builds.specs import FunctionSpec
from stagec.core.messages import phases
from stagec.core.sizes.avals import Aval, AvalError
from stagec.core.sizes.size import parse_constraint
from stagec.frontends.common import closures, entries, repeatable, source_locations, user_code
from stagec.frontends.common.frontend import Export, versions as versions
from stagec.pjrt import dialects
from stagec_arrays import dims, dtypes, meshes, pytrees
from stagec_arrays.bounds import contradiction
from stagec_arrays.frontend import shardings, staging
from stagec_arrays.frontend.staging import ArrayTracer
from stagec_arrays.primitives import contractions
from stagec_arrays.values import ShapeDtypeStruct

named_arrays, parameters = closures.named_arrays, entries.parameters
T = TypeVar("T")


@repeatable.clock_and_chance()
def export(spec: FunctionSpec, import_roots: Sequence[str]) -> Export:
    """Trace, lower and export the function of `spec`: one module for all devices."""
    traced = _traced(spec, import_roots, ArrayTracer.trace)
    with phases.phase("lower"):
        serialized = user_code.run(  # storing derivatives traces them
            lambda: traced.export(spec.platforms).serialize(spec.vjp_order),
            f"exporting {spec.entry} raised",
            spec.manifest,
            spec.key,
        )
    return Export(serialized)


@repeatable.clock_and_chance()
def export_with_locations(spec: FunctionSpec, import_roots: Sequence[str]) -> str:
    """Return the module of `export` as StableHLO text with each operation's place in the user's sources."""
    function, _, _ = _traced(spec, import_roots, ArrayTracer.flat)
    with dialects.make_context():
        module = function.module(spec.platforms, located=True)
        source_locations.rewrite(module, import_roots)
        return str(module.operation.get_asm(enable_debug_info=True))


@repeatable.clock_and_chance()
def jaxpr(spec: FunctionSpec, import_roots: Sequence[str]) -> str:
    """Return the program of the function of `spec`, as a string: what a jaxpr is to JAX."""
    return _traced(spec, import_roots, ArrayTracer.trace).as_text()


@repeatable.clock_and_chance()
def results(
    spec: FunctionSpec, import_roots: Sequence[str], serialized: bytes, values: Sequence[np.ndarray[Any, Any]]
) -> list[np.ndarray[Any, Any]]:
    """Return the result of the function itself, traced again for the shapes of the values, without the export."""
    tracer, args, kwargs = _prepared(spec, import_roots)
    with _settings(spec):
        leaves, structure = pytrees.flatten((args, kwargs))
        pairs = zip(leaves, values, strict=True)
        given, named = structure.unflatten(
            [ShapeDtypeStruct(value.shape, leaf.dtype, leaf.weak_type) for leaf, value in pairs]
        )
        repeatable.again(spec.key)
        traced = tracer.trace(given, named)
        return list(map(np.asarray, traced.lower().compile().call_flat(values)))


def _traced(
    spec: FunctionSpec, import_roots: Sequence[str], trace: Callable[[ArrayTracer, tuple[Any, ...], dict[str, Any]], T]
) -> T:
    """Return the function of `spec` traced, as `trace` does it. Raises StagecError with all faults."""
    tracer, args, kwargs = _prepared(spec, import_roots)
    failed = f"tracing {spec.entry} raised"
    with _settings(spec), phases.phase("trace"):
        return entries.traced(spec, lambda: trace(tracer, args, kwargs), failed, args, kwargs)


def _prepared(spec: FunctionSpec, import_roots: Sequence[str]) -> tuple[ArrayTracer, tuple[Any, ...], dict[str, Any]]:
    """Return the tracer of the function of `spec`, and its abstract arguments."""
    os.environ.update(spec.environment)
    function = entries.function_of(spec, import_roots)
    with _settings(spec):
        args, kwargs = _arguments(spec, import_roots)
        entries.check_names(spec, function, args, kwargs)
        static = {name: entries.hashable(value) for name, value in spec.static.items()}
        tracer = ArrayTracer(
            entries.bind(function, static) if static else function,
            {
                "donate_argnums": tuple(spec.donate_argnums) or None,
                "donate_argnames": tuple(spec.donate_argnames) or None,
                "keep_unused": spec.keep_unused,
                "in_shardings": shardings.of_manifest(spec, "in_shardings", pytrees.flatten(args)[1]),
                "out_shardings": lambda structure: shardings.of_manifest(spec, "out_shardings", structure),
            },
            entries.refusal(spec),
        )
    return tracer, args, kwargs


@contextlib.contextmanager
def _settings(spec: FunctionSpec) -> Iterator[None]:
    """Apply the manifest's settings for tracing."""
    precision = spec.matmul_precision or "default"
    if precision not in contractions.PRECISIONS:
        what = f'"{precision}" is an algorithm of products, and stagec\'s own tracer has precisions alone'
        raise spec.problem("matmul_precision", what, f"write one of {', '.join(contractions.PRECISIONS)}")
    mesh = tuple((name, size) for name, size in spec.mesh)
    with dtypes.enable_x64(spec.enable_x64), meshes.use(mesh), contractions.default_matmul_precision(precision):
        yield


def _arguments(spec: FunctionSpec, roots: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the abstract arguments. Raises StagecError with all their faults."""
    if spec.avals is not None:
        result, advice = entries.arguments_of_callable(spec, "ShapeDtypeStruct")
        return entries.abstracted(spec, result, _abstract, advice)
    constraints = tuple(map(parse_constraint, spec.constraints))
    if wrong := contradiction(constraints):
        raise spec.problem(f"constraints[{wrong[0]}]", wrong[1], "change it, or leave it out")

    def struct(aval: Aval, key: str) -> ShapeDtypeStruct:
        try:
            shape = tuple(dims.parse(size, constraints) for size in aval.shape)
            return ShapeDtypeStruct(shape, dtypes.of_short(aval.dtype), aval.weak_type)
        except (TypeError, AvalError) as error:
            raise spec.problem(key, f"{aval}: {error}", "write another dtype") from None

    return entries.arguments(spec, struct, roots)


def _abstract(leaf: Any) -> ShapeDtypeStruct:
    aval = staging.abstract(leaf)
    return ShapeDtypeStruct(aval.shape, aval.dtype, aval.weak_type)
