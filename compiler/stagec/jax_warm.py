"""Calls of a JAX function that run a bundle's executable before anything is traced (`stagec.jax.jit`).

A call asks two questions. Is the program the one that was built? The build recorded what the trace took for granted
(`frontends/jax/premises.py`), and this compares it. And is the call one that was built: structure, types, bucket,
static values, donation? If the answer is no, or not known, the call is JAX's. Then it traces and lowers the function
once, as the build did, and compares the modules: what the premises missed, this finds.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, TypeAlias

import jax

from stagec.core.messages.errors import either
from stagec.core.messages.refusal import CallError, LoadError
from stagec.core.sizes.avals import Aval, physical
from stagec.core.trees.tree import Tree
from stagec.frontends.common.parameters import flatten, static_key
from stagec.frontends.jax import contexts, premises
from stagec.loader.bundle import Bundle
from stagec.loader.variant import Variant

Verify: TypeAlias = Literal["background", "first", "never"]
_VERIFY: tuple[Verify, ...] = ("background", "first", "never")
_LOGGER = logging.getLogger("jax.stagec")
_LATER = 2.0
"""Seconds from a first call to its comparison in the background."""
_OPTIONS = frozenset(
    ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "keep_unused", "inline")
)
"""Options of `jax.jit` with which a call can be compared."""


class _Traced(Exception):
    """Why a call is traced as JAX does."""


def functions(bundle: Bundle) -> dict[str, str]:
    """Return the functions of a bundle by their own names, such as "models.scale:scale": the names in the bundle."""
    described = {name: bundle[name].description for name in bundle}
    return {each["premises"]["function"]: name for name, each in described.items() if "premises" in each}


class Warm:
    """A function under `jax.jit`, with a bundle's executables for the calls that were built.

    What it has besides `__call__` is of the result of `jax.jit`: `lower`, `trace`, `eval_shape`, `clear_cache`.
    """

    def __init__(
        self, fun: Callable[..., Any], bundle: Bundle, name: str, verify: Verify, options: Mapping[str, Any]
    ) -> None:
        """options: of `jax.jit`. Raises KeyError if the bundle has no such function, ValueError for another verify."""
        if verify not in _VERIFY:
            raise ValueError(f"verify is {verify!r}; write {either([repr(each) for each in _VERIFY])}")
        functools.update_wrapper(self, fun, updated=())
        self._fun, self._options, self._verify, self._name = fun, options, verify, name
        self._function = bundle[name]
        self._jitted = jax.jit(fun, **options)
        self._static = contexts.arguments(fun, options.get("static_argnums"), options.get("static_argnames"))
        self._donated = contexts.arguments(fun, options.get("donate_argnums"), options.get("donate_argnames"))
        self._ways: dict[Hashable, Callable[..., Any]] = {}
        self._right: set[Hashable] = set()
        self._told: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the built executable, or what `jax.jit` compiles."""
        if contexts.within():
            return self._jitted(*args, **kwargs)
        dynamic, static = self._static.split(args, kwargs)
        leaves, structure = flatten(dynamic)
        try:
            known = tuple(map(contexts.abstract, leaves))
            key = static_key(self._name, static), structure, known, contexts.settings()
            way = self._ways.get(key)
        except (TypeError, ValueError):  # JAX has better words
            return self._jitted(*args, **kwargs)
        return way(*args, **kwargs) if way else self._first(key, args, kwargs)

    def _first(self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Decide how calls of this kind run, and run this one."""
        settings = contexts.settings()
        try:
            variant, way = self._built(args, kwargs)
            # One artifact is for all sizes, so one comparison is.
            is_open = self._verify != "never" and (variant.name, settings) not in self._right
            if is_open and self._verify == "first":
                self._compare(variant, settings, args, kwargs)
        except (_Traced, CallError, LoadError) as why:
            self._trace(str(why))
            self._ways[key] = self._jitted
            return self._jitted(*args, **kwargs)
        self._ways[key] = way
        # The call may delete its arguments, and the comparison needs only what they are.
        like, named = jax.tree.map(_like, (args, kwargs))
        result = way(*args, **kwargs)
        if is_open and self._verify == "background":
            threading.Thread(target=self._behind, args=(variant, settings, like, named), name=self._name).start()
        return result

    def _trace(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            _LOGGER.warning("%s is traced: %s", self._name, why)

    def _behind(self, variant: Variant, settings: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare in a thread of its own, when the program has started or ended: tracing takes Python's lock."""
        threading.main_thread().join(_LATER)
        try:
            if contexts.settings() != settings:
                raise _Traced(
                    "it was called with settings of JAX that hold in one thread; verify='first' compares there"
                )
            self._compare(variant, settings, args, kwargs)
        except _Traced as why:
            self._differs = str(why)
            self._ways.clear()

    def _compare(self, variant: Variant, settings: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace and lower the function as the build did. Raises _Traced if that is another program."""
        try:
            difference = self._difference(variant, args, kwargs)
        except Exception as error:  # noqa: BLE001 - the function raises anything
            difference = f"it is not lowered as for the build: {type(error).__name__}: {error}"
        if difference:
            _LOGGER.error("%s is not the program that was built, and is traced from now on: %s", self._name, difference)
            self._differs = difference
            raise _Traced(difference)
        self._right.add((variant.name, settings))

    @functools.cached_property
    def _differs(self) -> str:
        """How this process differs from the build; "" if it does not."""
        if others := sorted(name for name, value in self._options.items() if value and name not in _OPTIONS):
            return f"jax.jit has {', '.join(others)}, which stagec does not compare"
        described = self._function.description
        recorded = described.get("premises")
        if recorded is None:
            return "the build did not record what its trace took for granted"
        here = premises.name_of(self._fun)
        if recorded["function"] != here:
            return f"it was built from {recorded['function']}, and this is {here}"
        return _another_version(described["components"]) or premises.differing(recorded, self._fun)

    def _built(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Variant, Callable[..., Any]]:
        """Return what was built for this call, and what runs calls like it. Raises _Traced, CallError, LoadError."""
        if self._differs:
            raise _Traced(self._differs)
        if different := premises.differing_settings(self._function.description["premises"]):
            raise _Traced(different)  # they hold for a call, not for the process
        split = self._static.split
        dynamic, static = split(args, kwargs)
        leaves, structure = flatten(dynamic)
        names = [*inspect.signature(self._fun).parameters] if static else []
        fixed = {name if isinstance(name, str) else names[name]: value for name, value in static.items()}
        variant, _ = self._function.chosen(dict(fixed))
        interface = variant.interface
        if fixed.keys() != variant.static.keys():
            raise _Traced(f"it was built with the static arguments {', '.join(variant.static) or 'none'}")
        if not leaves or variant.weights or structure != _plain(interface.description.in_tree):
            raise _Traced("the arguments have another structure than those that it was built for")
        if interface.out_structure is None:
            raise _Traced("its result has types of yours, of which only JAX makes the right ones")
        avals = [jax.typeof(leaf) for leaf in leaves]
        own = interface.description.in_avals
        wanted = [Aval(built.dtype, aval.shape, built.weak_type) for built, aval in zip(own, avals, strict=True)]
        inside = tuple(map(physical, wanted))  # keys are their words
        chosen = variant.select(tuple([tuple(map(int, aval.shape)) for aval in inside])).chosen
        shown = ", ".join(f"{'~' * aval.weak_type}{aval.str_short(short_dtypes=True)}" for aval in avals)
        if chosen is None or inside != chosen.offer.static_avals or shown != ", ".join(map(str, wanted)):
            raise _Traced(f"no executable is for {shown} on this machine")
        device = jax.local_devices()[0]
        here = jax.sharding.SingleDeviceSharding(device)
        if any(isinstance(leaf, jax.Array) and leaf.sharding != here for leaf in leaves):
            raise _Traced(f"an argument lies elsewhere than on {device}")
        if self._consumed(args, kwargs) != [*variant.descriptions[0].donated]:
            raise _Traced("it was built with other donated arguments")

        is_hosted = not any(isinstance(leaf, jax.Array) for leaf in leaves)

        def way(*args: Any, **kwargs: Any) -> Any:
            plain, named = split(args, kwargs)[0]
            if is_hosted:  # for numpy's arrays alone, a bundle gives numpy's
                (first, *rest), same = flatten((plain, named))
                plain, named = same.unflatten([jax.device_put(first), *rest])
            return self._function(*plain, **named, **fixed)

        return variant, way

    def _consumed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[bool]:
        """Return for each leaf whether `jax.jit` deletes it."""
        static, places = self._static, self._donated.places(len(args))
        given = [(i in places, arg) for i, arg in enumerate(args) if i not in static.places(len(args))]
        given += [(name in self._donated.names, kwargs[name]) for name in sorted(kwargs) if name not in static.names]
        return [is_donated for is_donated, arg in given for _ in jax.tree.leaves(arg)]

    def _difference(self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Say how the program that JAX lowers differs from the built one; "" if it does not."""
        from stagec.frontends.jax import exporting, pytrees  # a start does without
        from stagec.stages.exported import Exported

        built = Exported.deserialize(variant.exported())
        theirs = exporting.flat(built).in_avals
        leaves = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in theirs]
        dynamic, static = self._static.split(args, kwargs)
        plain, named = jax.tree.unflatten(jax.tree.structure(dynamic), leaves)
        named |= {name: value for name, value in static.items() if isinstance(name, str)}
        merged = self._static.merged(args, plain)

        def another(fun: Callable[..., Any]) -> Any:  # of the function itself, JAX may know a trace
            return jax.jit(functools.wraps(self._fun)(functools.partial(fun)), **self._options)

        # A function that is under jax.jit already is one more function in the module.
        is_inside = self._function.description["premises"]["jitted"]
        jitted = another(another(self._fun) if is_inside else self._fun)
        exported = exporting.export(jitted, merged, named, built.platforms, [], lambda _: None)
        if pytrees.to_tree(exported.out_tree) != built.out_tree or any(aval.weak_type for aval in exported.out_avals):
            return "its result has another structure, or weak types"
        same = _bare(exported.mlir_module_serialized) == _bare(built.mlir_module_serialized)
        return "" if same else "its operations or constants are others"


def _like(leaf: Any) -> Any:
    """Return what a trace needs of an argument."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf


def _plain(tree: Tree) -> Any:
    """Return a structure of plain containers as JAX's; types of the user's stand for others there."""
    return jax.tree.structure(tree.unflatten(range(tree.num_leaves)))


def _bare(artifact: bytes) -> bytes:
    """Return a module without places in sources."""
    from jaxlib.mlir import passmanager

    from stagec.stages import mlir

    with mlir.context() as context:
        module = mlir.read_artifact(context, artifact)
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        return mlir.to_bytecode(module)


def _another_version(components: Mapping[str, Mapping[str, str]]) -> str:
    """Say which package is another version than in the build; "" if none is. What nobody imported here counts not."""
    for name, component in components.items():
        package = name.removeprefix("environment ")
        here = getattr(sys.modules.get(package), "__version__", None)
        if (name != package or name in ("jax", "jaxlib")) and here and here != component["value"]:
            return f"{package} is {here}, and it was built with {component['value']}"
    return ""
