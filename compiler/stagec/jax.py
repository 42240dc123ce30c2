"""Functions of bundles inside JAX: what `jax.jit`, `grad` and `vmap` take.

    import stagec.jax

    predict = stagec.jax.function(bundle, "predict", vmap="batch")
    loss = jax.jit(jax.grad(lambda params, x: predict(params, x).sum()))

A plain call, `bundle["predict"](params, x)`, runs the executable of the bundle. Inside JAX there is no call to run: JAX
compiles a larger program, and takes the exported artifact as a part of it.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.dtypes import float0
from jax.interpreters import ad, batching, mlir

from stagec.core.messages.refusal import CallError
from stagec.core.sizes.avals import Aval
from stagec.core.sizes.size import names_in
from stagec.frontends.jax import premises
from stagec.jax_warm import Verify, Warm, functions
from stagec.loader import load
from stagec.loader.bundle import Bundle
from stagec.loader.variant import Variant
from stagec.pjrt.arrays import abstract_array, single_device
from stagec.pjrt.calling_convention import OMITTED
from stagec.pjrt.jax_arrays import KEYS
from stagec.pjrt.weights import Weight

__all__ = ["function", "jit", "warm"]

Derivatives: TypeAlias = Literal["reverse", "forward"]
LOOP = "loop"

_HESSIAN = "instead of jax.hessian write jax.jacrev of jax.jacrev, with derivatives='reverse'"
_NO_JVP: Mapping[Derivatives, str] = {
    "reverse": "jax.jvp and jax.jacfwd need stagec.jax.function(bundle, NAME, derivatives='forward'), and "
    f"vjp_order = 2 in the manifest; jax.jacfwd also vmap=...; {_HESSIAN}",
    "forward": "an artifact has no derivative of jax.jvp; write jax.grad of jax.grad, with derivatives='reverse'",
}
_NO_VJP = "jax.grad, jax.vjp and jax.jacrev need stagec.jax.function(bundle, NAME, derivatives='reverse')"


def function(
    bundle: Bundle, name: str, *, vmap: str | None = None, derivatives: Derivatives = "reverse"
) -> Callable[..., Any]:
    """Return a function of a bundle as one that JAX transforms.

    It takes the arguments that `bundle[name]` takes, static ones by keyword, and gives JAX's arrays. It donates none.

    name: of the function.
    vmap: what `jax.vmap` makes of it, which `jax.jacfwd` and `jax.jacrev` use. None: a CallError. "loop": one call
        after the other, which is right for every function. The name of a dimension, such as "batch": one call, with
        the rows of all. Name one only if the function computes each row of that dimension from the same row of its
        arguments: nobody checks it.

    derivatives: "reverse": those of `jax.grad` and `jax.vjp`. The manifest has `vjp_order = 1` then, and 2 for a second
        derivative. "forward": those of `jax.jvp` and `jax.jacfwd`, which take `vjp_order = 2`: each is a derivative of
        the derivative.

    `jax.jit` compiles the exported artifact for this machine, for sizes in no bucket too.

    Raises KeyError if there is no such function, ValueError if no argument has the dimension that `vmap` names. A call
    raises CallError ("static", "structure", "dtype", "shape"), and CallError ("transformation") for what the artifact
    does not have.

    >>> import jax, stagec.jax
    >>> bundle = stagec.load("model.aot")
    >>> mlp = stagec.jax.function(bundle, "mlp", vmap="batch")
    >>> params = {"w": jax.numpy.ones((16, 4)), "b": jax.numpy.zeros(4)}
    >>> jax.grad(lambda params, x: mlp(params, x)[0, 0])(params, jax.numpy.ones((1, 16)))["w"].shape
    (16, 4)
    >>> jax.vmap(mlp, in_axes=(None, 0))(params, jax.numpy.ones((3, 1, 16))).shape
    (3, 1, 4)
    """
    called = bundle[name]
    composed: dict[Variant, _Composed] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        variant, dynamic = called.chosen(kwargs)
        if variant not in composed:
            composed[variant] = _Composed(variant, vmap, derivatives)
        return composed[variant](args, dynamic)

    call.__name__ = call.__qualname__ = name
    return call


def jit(
    fun: Callable[..., Any], bundle: Bundle, name: str | None = None, *, verify: Verify = "background", **options: Any
) -> Warm:
    """Return `fun` as `jax.jit` does, but calls that were built run the bundle's executable, and trace nothing.

    A call is JAX's own, and the log says once why, if anything differs from the build or cannot be compared: a source
    of yours that the trace imported, a setting of JAX, the version of a package, a value that the function reaches by
    a name or closed over, a static value, a type or a size, a donated argument.

    fun: the function of the manifest's `entry`, without `jax.jit`.
    bundle: of the manifest. name: of the function there. None: the one that was built from `fun`.
    verify: how to find what else differs, such as a clock, a file or an environment variable that the model read.
        "background": after the first call, trace and lower in a thread, and compare with what was built. A difference
        is an error in the log, and JAX runs all later calls. "first": do that before the first call, so a result is
        never wrong; XLA still compiles nothing. "never": do not.

    options: those of `jax.jit`. With others than static_argnums, static_argnames, donate_argnums, donate_argnames,
    keep_unused and inline, all calls are JAX's.

    Raises KeyError if the bundle has no such function, ValueError for another `verify`.
    """
    built = name or functions(bundle).get(premises.name_of(fun))
    if built is None:
        raise KeyError(f"no function of {bundle.name} was built from {premises.name_of(fun)}")
    return Warm(fun, bundle, built, verify, options)


@contextlib.contextmanager
def warm(bundle: Bundle | str | PathLike[str], *, verify: Verify = "background") -> Iterator[Bundle]:
    """Put `stagec.jax.jit` in place of `jax.jit` inside a `with` statement, for the functions that a bundle has.

    So a program starts without tracing that nobody changed: import its modules there. Other functions are JAX's.

    bundle: a bundle, or the path of one, which is loaded with policy "executable_only". verify: as for `jit`.

    >>> import stagec.jax
    >>> with stagec.jax.warm("model.aot"):
    ...     pass  # from model import serve
    """
    loaded = bundle if isinstance(bundle, Bundle) else load.load(bundle, policy="executable_only")
    known, of_jax = functions(loaded), jax.jit

    def in_place(fun: Any = None, /, **options: Any) -> Any:
        if fun is None:
            return functools.partial(in_place, **options)
        name = known.get(premises.name_of(fun))
        ours = str(sys._getframe(1).f_globals.get("__name__")).startswith("stagec.")  # what makes a Warm, too
        return of_jax(fun, **options) if name is None or ours else Warm(fun, loaded, name, verify, options)

    jax.jit = in_place
    try:
        yield loaded
    finally:
        jax.jit = of_jax


class _Composed:
    """One variant of a function, by its exported artifact."""

    def __init__(self, variant: Variant, vmap: str | None, derivatives: Derivatives) -> None:
        """Raises ValueError if no argument has the dimension that `vmap` names."""
        from stagec.frontends.jax import exporting  # a start without a trace has none
        from stagec.stages.exported import Exported

        self._variant = variant
        self._exported = Exported.deserialize(variant.exported())
        sizes = {size for aval in self._exported.in_avals for size in aval.shape if not isinstance(size, int)}
        if vmap not in (None, LOOP, *sizes):
            known = ", ".join(map(repr, [LOOP, *sorted(size for size in sizes if size.isidentifier())]))
            raise ValueError(f"{variant.name}: vmap is {vmap!r}; write one of {known}")
        self._derivatives = derivatives
        flat = _Flat(variant, exporting.flat(self._exported), vmap)
        self._call = flat.forward() if derivatives == "forward" else flat.call

    def __call__(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        interface = self._variant.interface
        values = self._values(self._variant.leaves(args, kwargs))
        shapes = [value.shape for value in values]
        if all(isinstance(size, int) for shape in shapes for size in shape):
            self._exported.sizes(shapes)  # for its error; JAX's has no names of parameters
        try:
            return interface.unflatten(list(self._call(*values)))
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            raise CallError("transformation", f"{interface.name}: {_NO_JVP[self._derivatives]}") from error
        except ValueError as error:
            unmet = re.search(r"polymorphic shapes specification\. (.*?)\. Using ", str(error))
            if unmet is None:
                raise
            raise CallError("shape", f"{interface.name}: {unmet[1]}") from error

    def _values(self, leaves: Sequence[Any]) -> list[Any]:
        """Return what JAX takes: arrays and traced values of the right dtypes. Raises CallError."""
        interface = self._variant.interface
        avals = interface.description.in_avals
        checked = interface.check_dtypes([self._stand_in(i, leaf, avals[i]) for i, leaf in enumerate(leaves)])
        values: list[Any] = []
        value: Any
        for i, (leaf, array, aval) in enumerate(zip(leaves, checked, avals, strict=True)):
            if isinstance(leaf, Weight):
                value = leaf.on(abstract_array(leaf.shape, leaf.dtype, single_device())).numpy()
            elif aval.dtype in KEYS:
                words = leaf if isinstance(leaf, jax.Array) else array
                value = leaf if _is_key(leaf) else jax.random.wrap_key_data(jnp.asarray(words), impl=KEYS[aval.dtype])
            else:
                value = leaf.astype(array.dtype) if isinstance(leaf, jax.Array) else jnp.asarray(array)
                if value.dtype != array.dtype:
                    what = f"{interface.path(i)} is {aval}, and JAX makes {value.dtype} of it: set jax_enable_x64"
                    raise CallError("dtype", f"{interface.name}: {what}")
            values.append(value)
        return values

    def _stand_in(self, i: int, leaf: Any, aval: Aval) -> Any:
        """Return a numpy array, which takes no memory, for a JAX array: values are not known in a trace."""
        interface = self._variant.interface
        if leaf is OMITTED:
            what = f"{interface.path(i)} is left out, and inside JAX nothing is padded: pass it"
            raise CallError("structure", f"{interface.name}: {what}")
        if not isinstance(leaf, jax.Array):
            return leaf
        if not _is_key(leaf):
            return np.broadcast_to(np.zeros((), leaf.dtype), tuple(0 for _ in leaf.shape))
        if str(leaf.dtype) != aval.dtype:
            what = f"{interface.path(i)} has dtype {leaf.dtype}; expected {aval.dtype} ({aval})"
            raise CallError("dtype", f"{interface.name}: {what}")
        return np.zeros(0, np.uint32)


class _Flat:
    """An exported function of arrays, or a derivative of one, as JAX transforms it.

    call: takes and gives arrays. Arrays of dtype float0 have no values: it takes and gives booleans instead.
    """

    def __init__(self, variant: Variant, exported: Any, vmap: str | None, order: int = 0) -> None:
        """order: of the derivative."""
        self._variant, self._exported, self._vmap, self._order = variant, exported, vmap, order
        mapped = custom_vmap(jax.jit(self._run))
        mapped.def_vmap(self._map)

        @jax.custom_vjp
        def call(*values: Any) -> tuple[Any, ...]:
            return mapped(*values)  # type: ignore[no-any-return]

        call.defvjp(lambda *values: (call(*values), values), self._transpose)
        self.call = call

    def _run(self, *values: Any) -> tuple[Any, ...]:
        avals = self._exported.in_avals
        given = [
            np.zeros(v.shape, float0) if aval.dtype == float0 else v for v, aval in zip(values, avals, strict=True)
        ]
        results = self._exported.call(*given)
        return tuple(jnp.zeros(result.shape, bool) if result.dtype == float0 else result for result in results)

    def _transpose(self, values: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        given = [jnp.zeros(c.shape, bool) if c.dtype == float0 else c for c in cotangents]
        gradients = self._vjp.call(*values, *given)
        pairs = zip(values, gradients, strict=True)
        return tuple(gradient if _is_real(value) else None for value, gradient in pairs)

    def forward(self) -> Callable[..., tuple[Any, ...]]:
        """Return what takes and gives arrays as `call` does, with derivatives for `jax.jvp`.

        The derivative is linear in the cotangents, so its own derivative for them is what makes tangents of tangents.
        """
        call = jax.custom_jvp(self.call)

        @call.defjvp
        def jvp(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            results = call(*values)
            anywhere = [jnp.zeros(r.shape, r.dtype if _is_real(r) else bool) for r in results]
            given = [jnp.zeros(t.shape, bool) if t.dtype == float0 else t for t in tangents]
            moved = self._vjp._vjp.call(*values, *anywhere, *given)[len(values) :]
            pairs = zip(results, moved, strict=True)
            forward = functools.partial(_forward_alone().bind, name=self._variant.name)
            return results, tuple(forward(move) if _is_real(r) else np.zeros(r.shape, float0) for r, move in pairs)

        return call

    @functools.cached_property
    def _vjp(self) -> _Flat:
        if not self._exported.has_vjp():
            order = self._order + 1
            what = f"the artifact has no derivative of order {order}: write vjp_order = {order} in the manifest"
            raise CallError("transformation", f"{self._variant.name}: {what}")
        return _Flat(self._variant, self._exported.vjp(), self._vmap, self._order + 1)

    def _map(self, count: int, is_mapped: Sequence[bool], *values: Any) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        """Return the results of calls along a new first axis, which some of the values have."""
        name = self._variant.name
        if self._vmap is None:
            what = f"stagec.jax.function(bundle, {name!r}, vmap=...) says what jax.vmap makes of it"
            instead = '"loop", or a dimension with independent rows'
            raise CallError("transformation", f"{name}: {what}: {instead}; jax.jacfwd and jax.jacrev use jax.vmap")
        results: list[Any]
        if self._vmap == LOOP or not count:  # a dimension has one row or more
            results = list(self._looped(is_mapped, values))
        else:
            both = self._exported.in_avals, self._exported.out_avals
            takes, gives = ([_axis(aval.shape, self._vmap) for aval in avals] for avals in both)
            lacking = [
                i for i, (axis, mapped) in enumerate(zip(takes, is_mapped, strict=True)) if mapped and axis is None
            ]
            if not self._order and lacking:
                what = (
                    f"jax.vmap has {self._variant.interface.path(lacking[0])} vary, which has no dimension {self._vmap}"
                )
                raise CallError("transformation", f'{name}: {what}: leave it out of in_axes, or write vmap="loop"')
            if not self._order and None in gives:
                what = f"the result {self._exported.out_avals[gives.index(None)]} has no dimension {self._vmap}"
                raise CallError("transformation", f'{name}: {what}, so its rows are not independent: write vmap="loop"')
            # Of a derivative, a gradient without the dimension is a sum over rows, and each call has its own. What
            # nobody uses of both, XLA leaves out.
            results = list(self._looped(is_mapped, values)) if lacking or None in gives else [None] * len(gives)
            if not lacking:
                rows = self._folded(count, is_mapped, values, takes)
                for i, axis in enumerate(gives):
                    results[i] = results[i] if axis is None else _unfolded(rows[i], axis, count)
        return tuple(results), (True,) * len(results)

    def _looped(self, is_mapped: Sequence[bool], values: Sequence[Any]) -> Sequence[Any]:
        def one_call(varying: Sequence[Any]) -> Any:
            rest = iter(varying)
            return self.call(*[next(rest) if of else value for of, value in zip(is_mapped, values, strict=True)])

        varying = [value for of, value in zip(is_mapped, values, strict=True) if of]
        return jax.lax.map(one_call, varying)  # type: ignore[no-any-return]

    def _folded(
        self, count: int, is_mapped: Sequence[bool], values: Sequence[Any], axes: Sequence[int | None]
    ) -> Sequence[Any]:
        folded = []
        for of, value, axis in zip(is_mapped, values, axes, strict=True):
            if axis is None:
                folded.append(value)
                continue
            every = value if of else jnp.broadcast_to(value, (count, *value.shape))
            moved = jnp.moveaxis(every, 0, axis)
            folded.append(
                moved.reshape(*moved.shape[:axis], moved.shape[axis] * moved.shape[axis + 1], *moved.shape[axis + 2 :])
            )
        return self.call(*folded)


@functools.cache
def _forward_alone() -> Any:
    """Return the primitive of a tangent: the same array, which raises where JAX wants its transpose."""
    from jax.extend.core import Primitive  # it imports Pallas, and few need it

    def refuse(*_: Any, name: str) -> Any:
        raise CallError("transformation", f"{name}: {_NO_VJP}; {_HESSIAN}")

    tangent = Primitive("stagec_tangent")
    tangent.def_impl(lambda array, **_: array)
    tangent.def_abstract_eval(lambda aval, **_: aval)
    mlir.register_lowering(tangent, lambda _, array, **__: [array])
    batching.defvectorized(tangent)
    ad.deflinear2(tangent, refuse)
    return tangent


def _unfolded(result: Any, axis: int, count: int) -> Any:
    """Return a result of `count` calls at once with the axis of the calls first."""
    rows = result.shape[axis] // count
    return jnp.moveaxis(result.reshape(*result.shape[:axis], count, rows, *result.shape[axis + 1 :]), axis, 0)


def _axis(shape: Sequence[Any], name: str) -> int | None:
    """Return the axis of the dimension `name`; None if the shape does not have it once, or has 2*name, say."""
    sizes = [str(size) for size in shape]
    elsewhere = any(name in names_in(size) for size in sizes if size != name)
    return sizes.index(name) if sizes.count(name) == 1 and not elsewhere else None


def _is_real(value: Any) -> bool:
    """Whether it has a derivative."""
    return jnp.issubdtype(value.dtype, jnp.inexact)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", np.dtype(bool)), jax.dtypes.prng_key)
