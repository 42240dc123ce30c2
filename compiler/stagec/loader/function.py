"""Functions of a bundle: what is called."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlib import _jax

from stagec.bundle import index
from stagec.bundle.description import LARGEST, Description
from stagec.core.builds import naming
from stagec.core.sizes.avals import Aval, num_bytes, parse_aval
from stagec.core.telling.refusal import CallError, LoadError
from stagec.core.trees.same import same
from stagec.core.trees.tree import Tree
from stagec.loader import selection
from stagec.loader.flat import Flat
from stagec.loader.loaded import Loaded
from stagec.loader.selection import BoundArray, Offer, Selection, Shapes
from stagec.pjrt import clients, host
from stagec.pjrt.calling_convention import OMITTED, Interface, Signature
from stagec.pjrt.prepared import MOST_KINDS, Kinds, kinds_of
from stagec.pjrt.shardings import Sharding
from stagec.pjrt.weights import Bound, Weight

if TYPE_CHECKING:
    from stagec.core.telling.calls import Call
    from stagec.loader.padding import Fit, Padding

_MOST_CALLS = 10
"""How many of a function's variants a message shows."""


class Function:
    """A function of a bundle.

    Call it with numpy arrays (or pytrees of them) in the shapes of one of its executables; with padding in the
    manifest, smaller shapes will do. Results are numpy arrays. If an argument is a device array (`device_put`), results
    stay on the device as device arrays, and the call consumes the device arrays of donated arguments.

    For an argument of one of the model's types, pass an object of that type or a plain container: a dict of its fields
    or keys, a list, or a tuple of its children (docs/loading.md has a table). A PRNG key is its uint32 words, or JAX's
    key array. A 64-bit array may stand for a 32-bit one, unless JAX's `jax_enable_x64` is set. You can call it from
    several threads.

    Leave out the arguments that the manifest binds to weights; if you pass one, the call uses yours. Pass static
    arguments by keyword, as in JAX, with the type of the manifest: 2.0 and True are not 2 and 1. If there is only one
    combination of them, you may leave them out.
    `variants[NAME]` is the function of one combination.

    name: as in the manifest; for a variant, `FUNCTION-VARIANT`.
    static: the static arguments that it was built with; empty if it has variants.
    variants: the combinations, by name; empty if there is only one.
    """

    def __init__(self, name: str, loaded: Loaded, artifact: str | None = None) -> None:
        """Raises LoadError ("format"). artifact: its name in the index; None for what only has variants."""
        self.name = name
        self.static: Mapping[str, Any] = {}
        self.variants: dict[str, Function] = {}
        self._loaded = loaded
        self._donate = True
        self._offers: tuple[Offer, ...] = ()
        self._descriptions: dict[tuple[str, tuple[tuple[str, int], ...]], Description] = {}
        self._prepared: dict[Kinds, tuple[Signature, Callable[[Sequence[Any]], Sequence[Any] | None]]] = {}
        self._calls: dict[Shapes, tuple[Signature, Fit | None]] = {}
        self._signatures: dict[Shapes, Signature] = {}
        self._static_names: frozenset[str] = frozenset()
        self._padding: Padding | None = None
        self._bound: Bound | None = None
        self._fills_in = False
        self._bound_arrays: tuple[BoundArray, ...] = ()
        if artifact is None:
            return
        assert loaded.archive is not None
        entry = loaded.archive.index["functions"][artifact]
        self._usage = functools.cache(functools.partial(_usage_of, loaded, name, artifact))
        self.static = _tupled(entry["static"])
        self._static_names = frozenset(self.static)
        self._artifact = artifact
        avals = (tuple(map(parse_aval, entry[key])) for key in ("in_avals", "out_avals"))
        in_avals, out_avals = avals
        self._offers = selection.offers(loaded.archive.index, artifact, in_avals)
        trees = (Tree.from_json(entry[key]) for key in ("in_tree", "out_tree"))
        in_tree, out_tree = trees
        self._interface = Signature(name, Interface(in_tree, in_avals, out_tree, out_avals), loaded.types, self._usage)
        if entry["bind"]:
            self._bound = Bound(name, in_tree, entry["bind"], loaded.weights, self._usage)
            self._bound_arrays = tuple(
                BoundArray(self._interface.paths[one["leaf"]], one["weight"], aval, num_bytes(parse_aval(aval)))
                for one in entry["bind"]
                for aval in [loaded.archive.index["weights"][one["weight"]]["aval"]]
            )
        buckets = [e["bucket"] for e in entry["executables"]]
        declared = entry["padding"]
        if declared and buckets:
            from stagec.loader.padding import Padding  # few functions declare it

            self._padding = Padding(declared, in_avals, out_avals, self._interface.paths, buckets)
        self._fills_in = bool(self._bound or (self._padding and self._padding.masks))

    def add_variant(self, name: str, variant: Function) -> None:
        """Add the function of one combination of static arguments."""
        self.variants[name] = variant
        self._static_names |= variant._static_names

    @property
    def descriptions(self) -> tuple[Description, ...]:
        """The descriptions of the executables that calls of this function choose from, those of its variants included.

        They are read now. Raises LoadError ("format", "digest"), CallError ("closed").
        """
        chosen = (c.offer for c in self.select().candidates if c.code == selection.CHOSEN)
        own = tuple(self._describe(offer) for offer in chosen if offer.kind == "executable")
        return (*own, *(d for variant in self.variants.values() for d in variant.descriptions))

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The weights that the bundle has for arguments, by path: `args[0]['w']`. Callers leave these arguments out."""
        return {self._interface.paths[i]: weight for i, weight in self._bound.weights.items()} if self._bound else {}

    def with_options(self, *, donate: bool = True) -> Function:
        """Return the same function with other options.

        donate: False keeps the device arrays of donated arguments: the executable gets copies of them.
        """
        other = copy.copy(self)
        other._donate = donate
        other.variants = {name: variant.with_options(donate=donate) for name, variant in self.variants.items()}
        return other

    def select(self, shapes: Shapes | None = None, devices: Sequence[_jax.Device] | None = None) -> Selection:
        """Return every candidate for a call of this function, and why the loader takes it or not; see `Bundle.select`.

        shapes: those of the leaves, flat. A function with variants has no candidates: ask one of the variants.
        """
        loaded = self._loaded
        asked, here = loaded.asked._replace(shapes=shapes), loaded.host
        if devices is not None:
            asked, here = asked._replace(num_devices=len(devices)), host.describe(devices)
        return selection.select(self.name, self._offers, here, asked)._replace(bound=self._bound_arrays)

    def shapes_of(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Shapes:
        """Return the shapes that a call of this one signature has: those of the bucket, if the loader pads it.

        Raises CallError ("structure", "dtype").
        """
        leaves = self._flatten(args, kwargs)
        fit = self._padding.fit(leaves) if self._padding else None
        return fit.shapes if fit else _shapes(leaves)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the function.

        Raises CallError when static arguments, structure, dtype or shape of the arguments fit no executable, or one was
        donated to an earlier call; LoadError when nothing in the bundle runs here, or jaxlib does not load the
        executable, at its first call.
        """
        if self._static_names or self.variants:
            function, kwargs = self._signature_of(kwargs)
            return function._run(args, kwargs)
        return self._run(args, kwargs)

    def flat(self, *args: object, **kwargs: object) -> Flat:
        """Return this function for arrays like these, bound to its executable. Its calls need no preparation.

        The executable is loaded. Donation and the chosen static arguments are those of this function and this call.

        Raises what a call raises, and CallError ("shape") for sizes that the loader would pad.
        """
        function, kwargs = self._signature_of(kwargs)
        leaves = function._flatten(args, kwargs)
        signature, fit = function._calls.get(_shapes(leaves)) or function._resolve(leaves)
        if fit and (fit.shapes != _shapes(leaves) or any(leaf is OMITTED for leaf in leaves)):
            raise CallError("shape", f"{self.name}: a flat call is not filled up: give all arrays, of a bucket's sizes")

        return Flat(signature, _shapes(leaves), function._donate, function._loaded, function._locate)

    def input_shardings(self, *args: object, **kwargs: object) -> Any:
        """Return how a call with these arguments puts them on devices: a `Sharding` for each, as `(args, kwargs)`.

        None stands for an argument that the function drops. The executable is loaded. Raises what a call raises.
        """
        function, kwargs = self._signature_of(kwargs)
        leaves = function._flatten(args, kwargs)
        signature, _ = function._calls.get(_shapes(leaves)) or function._resolve(leaves)
        assert signature.executable is not None
        kept = signature.description.kept_var_idx
        found = dict(zip(kept, signature.executable.parameter_shardings, strict=True))
        shardings: list[Sharding | None] = [found.get(i) for i in range(len(leaves))]
        return signature.description.in_tree.unflatten(shardings)

    def _signature_of(self, kwargs: dict[str, object]) -> tuple[Function, dict[str, object]]:
        """Return the one signature that was built with the static arguments among `kwargs`, and the others."""
        if not self._static_names and not self.variants:
            return self, kwargs
        given = {name: kwargs.pop(name) for name in self._static_names & kwargs.keys()}
        return self._choose(_tupled(given)), kwargs

    def _choose(self, given: Mapping[str, Any]) -> Function:
        signatures = list(self.variants.values()) or [self]
        fitting = [s for s in signatures if all(same(s.static[name], value) for name, value in given.items())]
        if len(fitting) == 1:
            return fitting[0]
        listed = "; ".join(_arguments(s.static) for s in signatures)
        calls = "".join(f"\n  {s._usage().signature}" for s in signatures[:_MOST_CALLS])
        if fitting:
            raise CallError("static", f"{self.name}: say which static arguments: {listed}{calls}")
        raise CallError("static", f"{self.name} was not built with {_arguments(given)}, but with {listed}{calls}")

    def _run(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        given = self._leaves(args, kwargs) if self._fills_in else self._interface.leaves(args, kwargs)
        kinds = kinds_of(given)
        known = self._prepared.get(kinds) if self._donate else None
        if known is not None:
            signature, run = known
            try:
                outputs = run(given)
            except RuntimeError as error:
                self._locate(error, signature)
                raise
            if outputs is not None:
                return signature.unflatten(outputs)
        leaves = self._interface.check_dtypes(given)
        found = self._calls.get(_shapes(leaves))
        signature, fit = self._resolve(leaves) if found is None else found
        if fit is not None:
            leaves = fit.fill(leaves)
        try:
            results = signature.call(leaves, self._donate)
        except RuntimeError as error:  # XLA's own
            self._locate(error, signature)
            raise
        if fit is None:
            self._prepare(signature, kinds)
        return signature.unflatten(results if fit is None else fit.cut(results))

    def _prepare(self, signature: Signature, kinds: Kinds) -> None:
        """Remember a call that was right, for the next one like it."""
        with self._loaded.lock:
            if self._loaded.archive is None or len(self._prepared) >= MOST_KINDS:
                return
            prepared = signature.prepare(kinds)
            if prepared is not None:
                self._prepared[kinds] = signature, prepared.run if prepared.on_device else prepared.read

    def _flatten(self, args: tuple[object, ...], kwargs: dict[str, object]) -> list[Any]:
        return self._interface.check_dtypes(self._leaves(args, kwargs))

    def _leaves(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Sequence[Any]:
        """Return the leaves of a call, with what the caller left out."""
        if self._padding and self._padding.masks:
            kwargs = {**dict.fromkeys(self._padding.masks, OMITTED), **kwargs}
        if self._bound:
            args, kwargs = self._bound.fill(args, kwargs)
        return self._interface.leaves(args, kwargs)

    def _resolve(self, leaves: Sequence[Any]) -> tuple[Signature, Fit | None]:
        """Return what runs for arguments of these shapes, loaded; remembered for the next call.

        Raises CallError ("shape") where no bucket has them, LoadError.
        """
        with self._loaded.lock:
            given = _shapes(leaves)
            fit = self._padding.fit(leaves) if self._padding else None
            if fit is None and any(leaf is OMITTED for leaf in leaves):
                raise CallError("shape", self._no_bucket(leaves))
            shapes = fit.shapes if fit else given
            signature = self._signatures.get(shapes)
            if signature is None:
                signature = self._signatures[shapes] = self._load(self._select(shapes, leaves), shapes)
            self._calls[given] = signature, fit
            return self._calls[given]

    def _select(self, shapes: Shapes, leaves: Sequence[Any]) -> Offer:
        found = self.select(shapes)
        if found.chosen is not None:
            return found.chosen.offer
        known = {offer.shapes for offer in self._offers if offer.kind == "executable"}
        if known and shapes not in known:
            raise CallError("shape", self._no_bucket(leaves))
        raise found.refusal(self._loaded.path)

    def _load(self, offer: Offer, shapes: Shapes) -> Signature:
        """Return a signature with its executable: handed to XLA, or compiled. Raises LoadError, CallError ("shape")."""
        loaded = self._loaded
        if loaded.archive is None:
            raise CallError("closed", f"{self.name}: the bundle was closed")
        platform = selection.usable_platform(offer, loaded.host, loaded.asked)
        assert platform is not None
        if offer.kind == "exported":
            assert loaded.compile is not None
            if platform == "cpu" and not loaded.host.cpu_flags:
                self._warn_of_unknown_cpu(shapes)
            devices = loaded.devices_for(platform, offer.nr_devices or 1)
            doubt = selection.unknown_release(offer, loaded.host)
            if doubt:
                import warnings

                warnings.warn(f"{loaded.path}: {offer.member} is compiled; {doubt}", RuntimeWarning, stacklevel=2)
            convention, executable = loaded.compile(loaded.archive[offer.member], platform, shapes, devices)
            signature = Signature(self.name, convention, loaded.types, self._usage)
            signature.executable = executable
            return signature
        description = self._describe(offer)
        signature = Signature(self.name, description, loaded.types, self._usage)
        try:
            devices = loaded.devices_for(platform, description.nr_devices)
            assigned = description.device_assignment
            if platform == "tpu" and assigned and not loaded.devices:
                # The code is for the places that partitions have in the topology.
                here = {device.id: device for device in clients.devices(platform)}
                devices = [here[i] for i in assigned.device_ids] if here.keys() >= {*assigned.device_ids} else devices
            code, calls = loaded.archive[offer.member], tuple(description.custom_calls)
            signature.load(code, calls, devices, description.memory_kinds)
        except LoadError as error:
            self._locate(error, signature)
            raise
        return signature

    def _warn_of_unknown_cpu(self, shapes: Shapes) -> None:
        """Say that an executable may run here, and that nothing tells: compiling takes longer than anybody expects."""
        refused = next((c for c in self.select(shapes).candidates if c.code == "cpu-feature"), None)
        if refused is not None:
            what = f"{self.name} is compiled here, and its executable for {refused.offer.target} left out"
            warnings.warn(f"{self._loaded.path}: {what}: {refused.reason}", RuntimeWarning, stacklevel=2)

    def _describe(self, offer: Offer) -> Description:
        """Return the description of an executable, read when it is first asked for.

        Executables of several targets or buckets may be one member; each has a description of its own.
        """
        archive = self._loaded.archive
        if archive is None:
            raise CallError("closed", f"{self.name}: the bundle was closed")
        which = offer.target, tuple(sorted(offer.bucket.items()))
        if which not in self._descriptions:
            entries = archive.index["functions"][self._artifact]["executables"]
            entry = next(e for e in entries if (e["target"], tuple(sorted(e["bucket"].items()))) == which)
            text = archive.read(entry["description"], LARGEST)
            try:
                found = index.describe(archive.index, self._artifact, entry, text)
                # Calls are checked against the index: XLA, which checks nothing, must get what the executable takes.
                if found.in_avals != offer.static_avals:
                    raise ValueError("its arguments are not those that the index has")
            except ValueError as error:
                raise LoadError("format", f"{archive.path}: {entry['description']}: {error}") from error
            self._descriptions[which] = found
        return self._descriptions[which]

    def release(self) -> None:
        """Drop the executables. XLA frees their memory when no call uses them any more."""
        self._prepared.clear()
        self._calls.clear()
        self._signatures.clear()
        for variant in self.variants.values():
            variant.release()

    def _locate(self, error: Exception, signature: Signature) -> None:
        """Add a note with lines of the model to XLA's error, where `<manifest>.<function>.debug.mlir` is beside it."""
        debug = Path(self._loaded.path).with_name(f"{self._loaded.name}.{self.name}.debug.mlir")
        if self._loaded.locations and debug.exists():
            from stagec.pjrt import locations  # MLIR: not needed to run

            loaded = signature.executable and signature.executable.loaded
            locations.add_note(error, debug, loaded.hlo_modules()[0].to_string() if loaded else "")

    def _documentation(self) -> str:
        """How it is called: what `help` shows of it, and the stub of the bundle."""
        signatures = list(self.variants.values()) or [self]
        calls = "\n".join(signature._usage().as_text() for signature in signatures)
        buckets = dict.fromkeys(naming.bucket(offer.bucket) for one in signatures for offer in one._offers)
        buckets.pop("", None)
        padded = dict.fromkeys(dim for one in signatures if one._padding for dim in one._padding.declared)
        sizes = f"\nBuckets: {'; '.join(buckets)}\n" if buckets else ""
        return calls + sizes + (f"Smaller sizes of {', '.join(padded)} are filled up.\n" if padded else "")

    def _no_bucket(self, leaves: Sequence[Any]) -> str:
        """Say which shapes do not fit, against every executable: sizes that never vary, or the buckets."""
        executables = [offer for offer in self._offers if offer.kind == "executable"]
        faults = []
        for i, leaf in enumerate(leaves):
            wanted = sorted({str(offer.static_avals[i]) for offer in executables})
            given = Aval(executables[0].static_avals[i].dtype, leaf.shape)
            if leaf is not OMITTED and str(given) not in wanted:
                faults.append(f"{self._interface.path(i)} is {given}, {' or '.join(wanted)} is wanted")
        buckets = "; ".join(dict.fromkeys(filter(None, (_bucket_name(o.bucket, " = ", ", ") for o in executables))))
        what = "; ".join(faults) or "the sizes of the arguments belong to different buckets"
        padded = ", ".join(self._padding.declared) if self._padding else ""
        told = f"buckets: {buckets}{f'; smaller sizes of {padded} are filled up' if padded else ''}"
        return f"{self.name}: {what}" + (f" ({told})" if buckets else "")

    def __repr__(self) -> str:
        buckets = (_bucket_name(o.bucket) for o in self._offers if o.bucket)
        parts = list(self.variants) or list(dict.fromkeys(buckets))
        return f"Function({self.name}{': ' if parts else ''}{', '.join(parts)})"


class _Documentation:
    """What `help` shows: of the class its docstring, of a function of a bundle how it is called."""

    def __init__(self, of_class: str) -> None:
        self._of_class = of_class

    def __get__(self, function: Function | None, owner: type[Function]) -> str:
        if function is None or function._loaded.archive is None:
            return self._of_class
        return function._documentation()


class _Signature:
    """What `inspect.signature` and editors show of a function of a bundle. With variants it has none of its own."""

    def __get__(self, function: Function | None, owner: type[Function]) -> Any:
        if function is None or function.variants or function._loaded.archive is None:
            raise AttributeError("__signature__")
        import inspect  # calls do without

        kinds, parameters = inspect.Parameter, []
        for number, one in enumerate(function._usage().arguments):
            name = one.name if one.name.isidentifier() else f"args_{number}"
            kind = kinds.KEYWORD_ONLY if one.by_keyword else kinds.POSITIONAL_ONLY
            default = ... if function._usage().may_be_left_out(one) else kinds.empty
            parameters.append(kinds(name, kind, default=default))
        static = [kinds(name, kinds.KEYWORD_ONLY, default=value) for name, value in function.static.items()]
        return inspect.Signature(
            [*sorted(parameters, key=lambda one: one.kind), *static], __validate_parameters__=False
        )


Function.__signature__ = _Signature()  # type: ignore[attr-defined]
Function.__doc__ = _Documentation(Function.__doc__ or "")  # type: ignore[assignment]


def _usage_of(loaded: Loaded, name: str, artifact: str) -> Call:
    """Return how a call of one signature is written; what the index does not say of it is read now."""
    from stagec.bundle.calls import call_of  # calls that fit do without

    archive = loaded.archive
    if archive is None:
        raise CallError("closed", f"{name}: the bundle was closed")
    try:
        return call_of(archive, artifact)
    except (LoadError, ValueError):  # damaged: the names of parameters are missing, and nothing else
        return call_of(archive, artifact, names=False)


def _shapes(leaves: Sequence[Any]) -> Shapes:
    return tuple([leaf.shape for leaf in leaves])


def _tupled(static: Mapping[str, Any]) -> dict[str, Any]:
    """Return static arguments with tuples for lists, which JSON has instead."""

    def tupled(value: Any) -> Any:
        return tuple(map(tupled, value)) if isinstance(value, list | tuple) else value

    return {name: tupled(value) for name, value in static.items()}


def _arguments(static: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in static.items()) or "none"


def _bucket_name(bucket: Mapping[str, int], equals: str = "", separator: str = "_") -> str:
    return separator.join(f"{name}{equals}{size}" for name, size in sorted(bucket.items()))
