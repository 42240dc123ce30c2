"""Functions of a bundle: the objects that users call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxlib import _jax

from stagec.core.builds import naming
from stagec.core.messages.refusal import CallError
from stagec.core.trees.same import same
from stagec.loader.variant import Variant, bucket_name, tupled

if TYPE_CHECKING:
    from stagec.bundle.description import Description
    from stagec.core.messages.calls import Call
    from stagec.loader.flat import Flat
    from stagec.loader.selection import Selection, Shapes
    from stagec.pjrt.weights import Weight

_MOST_CALLS = 10
"""How many of a function's variants a message shows."""


class Function:
    """A function of a bundle.

    Call it with numpy arrays (or pytrees of them) in the shapes of one of its executables; with padding in the
    manifest, smaller shapes will do. Results are numpy arrays. If an argument is a device array (`device_put`), results
    stay on the device as device arrays, and the call consumes the device arrays of donated arguments. If an argument
    is a `jax.Array`, so are the results, and the call deletes those that are donated (docs/with-jax.md).

    For an argument of one of the model's types, pass an object of that type or a plain container: a dict of its fields
    or keys, a list, or a tuple of its children (docs/loading.md has a table). A PRNG key is its uint32 words, or JAX's
    key array. A 64-bit array may stand for a 32-bit one, unless JAX's `jax_enable_x64` is set. You can call it from
    several threads.

    Leave out the arguments that the manifest binds to weights; if you pass one, the call uses yours. Pass static
    arguments by keyword, as in JAX, with the type of the manifest: 2.0 and True are not 2 and 1. If there is only one
    combination of them, you may leave them out. `variants[NAME]` is the function of one combination.

    name: as in the manifest; for a variant, `FUNCTION-VARIANT`.
    static: the static arguments of its build; empty if it has variants.
    variants: the combinations, by name; empty if there is only one.
    """

    def __init__(self, name: str, of: Mapping[str, Variant], donate: bool = True) -> None:
        """of: its variants by name; one without a name for a function that has no variants. donate: `with_options`."""
        self.name = name
        self._of = of
        self._donate = donate
        self._static_names = frozenset(name for variant in of.values() for name in variant.static)
        self._only = of.get("") if not self._static_names else None
        self.static: Mapping[str, Any] = of[""].static if "" in of else {}
        self.variants = {key: Function(variant.name, {"": variant}, donate) for key, variant in of.items() if key}

    @property
    def descriptions(self) -> tuple[Description, ...]:
        """The descriptions of the executables that calls of this function choose from, its variants' too.

        They are read now. Raises LoadError ("format", "digest"), CallError ("closed").
        """
        return tuple(description for variant in self._of.values() for description in variant.descriptions)

    @property
    def description(self) -> Mapping[str, Any]:
        """What lies beside the exported artifact, of the first variant, read now.

        Raises LoadError ("format", "digest"), ValueError, CallError ("closed").
        """
        return next(iter(self._of.values())).description

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The bundle's weights for arguments, by path: `args[0]['w']`. Callers leave these arguments out."""
        return self._of[""].weights if "" in self._of else {}

    @property
    def usage(self) -> Call:
        """How to write a call: trees, avals and names. Raises CallError ("static") for a function with variants."""
        return self._choose({}).usage()

    @property
    def padding(self) -> Mapping[str, Mapping[str, Any]]:
        """The manifest's padding by dimension: `{"fill": NUMBER, "mask": ARGUMENT}`. Raises the errors of `usage`."""
        padding = self._choose({}).padding
        return padding.declared if padding else {}

    def with_options(self, *, donate: bool = True) -> Function:
        """Return the same function with other options.

        donate: False keeps the device arrays of donated arguments and gives the executable copies.
        """
        return Function(self.name, self._of, donate)

    def select(self, shapes: Shapes | None = None, devices: Sequence[_jax.Device] | None = None) -> Selection:
        """Return every candidate for a call of this function, and why the loader takes it or not; see `Bundle.select`.

        shapes: those of the leaves, flat.

        Raises CallError ("static") for a function with variants: ask one of them.
        """
        return self._choose({}).select(shapes, devices)

    def shapes_of(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Shapes:
        """Return the shapes of a call: those of the bucket, if the loader pads the call.

        Raises CallError ("static", "structure", "dtype").
        """
        return self._choose({}).shapes_of(args, kwargs)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the function.

        Raises CallError when static arguments, structure, dtype or shape of the arguments fit no executable, or one was
        donated to an earlier call; LoadError when nothing in the bundle runs here, or jaxlib does not load the
        executable, at its first call; RunError when XLA fails while it runs it.
        """
        try:
            variant = self._only
            if variant is None:
                variant, kwargs = self.chosen(kwargs)
            whole = variant.whole
            if whole is not None and self._donate:
                return variant.call_whole(whole, args, kwargs)
            return variant.call(args, kwargs, self._donate)
        except Exception as error:
            from stagec.core.builds.extensions import hide_frames

            hide_frames(error)
            raise

    def flat(self, *args: object, **kwargs: object) -> Flat:
        """Return this function for arrays like these, bound to its executable. Its calls need no preparation.

        It loads the executable. Donation and the chosen static arguments are those of this function and this call.

        Raises the errors of a call, and CallError ("shape") for sizes that a call would pad.

        >>> import numpy as np
        >>> mlp, x = stagec.load("model.aot")["mlp"], np.ones((1, 16), np.float32)
        >>> params = {"w": np.ones((16, 4), np.float32), "b": np.zeros(4, np.float32)}
        >>> flat = mlp.flat(params, x)
        >>> flat.paths
        ("args[0]['b']", "args[0]['w']", 'args[1]')
        >>> (y,) = flat(params["b"], params["w"], x)
        >>> y.shape
        (1, 4)
        """
        variant, kwargs = self.chosen(kwargs)
        return variant.flat(args, kwargs, self._donate)

    def input_shardings(self, *args: object, **kwargs: object) -> Any:
        """Return how a call with these arguments puts them on devices: a `Sharding` for each, as `(args, kwargs)`.

        None stands for an argument that the function drops. It loads the executable. Raises the errors of a call.
        """
        variant, kwargs = self.chosen(kwargs)
        return variant.input_shardings(args, kwargs)

    def chosen(self, kwargs: dict[str, object]) -> tuple[Variant, dict[str, object]]:
        """Return the variant that was built with the static arguments among `kwargs`, and the other arguments."""
        given = {name: kwargs.pop(name) for name in self._static_names & kwargs.keys()}
        return self._choose(tupled(given)), kwargs

    def _choose(self, given: Mapping[str, Any]) -> Variant:
        variants = list(self._of.values())
        fitting = [v for v in variants if all(same(v.static[name], value) for name, value in given.items())]
        if len(fitting) == 1:
            return fitting[0]
        listed = "; ".join(_arguments(variant.static) for variant in variants)
        calls = "".join(f"\n  {variant.usage().signature}" for variant in variants[:_MOST_CALLS])
        if fitting:
            raise CallError("static", f"{self.name}: say which static arguments: {listed}{calls}")
        raise CallError("static", f"{self.name} was not built with {_arguments(given)}, but with {listed}{calls}")

    def __reduce__(self) -> Any:
        """Refuse: what pickle would write is in the file. Raises TypeError."""
        what = f"{self.name} is a function of a bundle, and has executables of this process"
        raise TypeError(f"{what}: do not pickle it, but call stagec.load(PATH) in the other process")

    def __copy__(self) -> Function:
        return self

    def __deepcopy__(self, _: object) -> Function:
        return self  # nothing in it changes

    def _documentation(self) -> str:
        """How to call it: `help` shows this, and so does the stub of the bundle."""
        variants = self._of.values()
        calls = "\n".join(variant.usage().as_text() for variant in variants)
        buckets = dict.fromkeys(naming.bucket(offer.bucket) for variant in variants for offer in variant.offers)
        buckets.pop("", None)
        padded = dict.fromkeys(dim for variant in variants if variant.padding for dim in variant.padding.declared)
        sizes = f"\nBuckets: {'; '.join(buckets)}\n" if buckets else ""
        return calls + sizes + (f"Smaller sizes of {', '.join(padded)} are padded.\n" if padded else "")

    def __repr__(self) -> str:
        buckets = (bucket_name(offer.bucket) for v in self._of.values() for offer in v.offers if offer.bucket)
        parts = list(self.variants) or list(dict.fromkeys(buckets))
        return f"Function({self.name}{': ' if parts else ''}{', '.join(parts)})"


class _Documentation:
    """What `help` shows: the docstring for the class, and how to call it for a function of a bundle."""

    def __init__(self, of_class: str) -> None:
        self._of_class = of_class

    def __get__(self, function: Function | None, owner: type[Function]) -> str:
        if function is None or _is_closed(function):
            return self._of_class
        return function._documentation()


class _Signature:
    """The signature that `inspect.signature` and editors show for a function of a bundle; none if it has variants."""

    def __get__(self, function: Function | None, owner: type[Function]) -> Any:
        if function is None or function.variants or _is_closed(function):
            raise AttributeError("__signature__")
        import inspect  # calls do without

        kinds, parameters = inspect.Parameter, []
        usage = function._of[""].usage()
        for number, argument in enumerate(usage.arguments):
            name = argument.name if argument.name.isidentifier() else f"args_{number}"
            kind = kinds.KEYWORD_ONLY if argument.by_keyword else kinds.POSITIONAL_ONLY
            default = ... if usage.may_be_left_out(argument) else kinds.empty
            parameters.append(kinds(name, kind, default=default))
        static = [kinds(name, kinds.KEYWORD_ONLY, default=value) for name, value in function.static.items()]
        return inspect.Signature(
            [*sorted(parameters, key=lambda parameter: parameter.kind), *static], __validate_parameters__=False
        )


Function.__signature__ = _Signature()  # type: ignore[attr-defined]
Function.__doc__ = _Documentation(Function.__doc__ or "")  # type: ignore[assignment]


def _is_closed(function: Function) -> bool:
    return any(variant.is_closed for variant in function._of.values())


def _arguments(static: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in static.items()) or "none"
