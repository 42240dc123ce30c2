"""Variants: what runs the calls of one exported artifact of a bundle."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlib import _jax

from stagec.bundle import index
from stagec.bundle.description import LARGEST, Description
from stagec.core.sizes.avals import Aval, num_bytes, parse_aval
from stagec.core.telling.refusal import CallError, LoadError
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


class Variant:
    """A function of a bundle with one combination of static arguments; most functions have one variant alone.

    name: of its artifact in the index.
    static: the static arguments that it was built with.
    offers: what the bundle has to run it.
    usage: returns how a call is written.
    padding: what the manifest says of smaller sizes; None: nothing.
    """

    def __init__(self, loaded: Loaded, name: str) -> None:
        """Raises LoadError ("format")."""
        assert loaded.archive is not None
        entry = loaded.archive.index["functions"][name]
        self.name = name
        self.static: Mapping[str, Any] = tupled(entry["static"])
        self.usage = functools.cache(functools.partial(_usage_of, loaded, name))
        self._loaded = loaded
        self._descriptions: dict[tuple[str, tuple[tuple[str, int], ...]], Description] = {}
        self._prepared: dict[Kinds, tuple[Signature, Callable[[Sequence[Any]], Sequence[Any] | None]]] = {}
        self._calls: dict[Shapes, tuple[Signature, Fit | None]] = {}
        self._signatures: dict[Shapes, Signature] = {}
        in_avals, out_avals = (tuple(map(parse_aval, entry[key])) for key in ("in_avals", "out_avals"))
        self.offers = selection.offers(loaded.archive.index, name, in_avals)
        in_tree, out_tree = (Tree.from_json(entry[key]) for key in ("in_tree", "out_tree"))
        self._interface = Signature(name, Interface(in_tree, in_avals, out_tree, out_avals), loaded.types, self.usage)
        self._bound: Bound | None = None
        if entry["bind"]:
            self._bound = Bound(name, in_tree, entry["bind"], loaded.weights, self.usage)
        avals = ((bound, loaded.archive.index["weights"][bound["weight"]]["aval"]) for bound in entry["bind"])
        self._bound_arrays = tuple(
            BoundArray(self._interface.paths[bound["leaf"]], bound["weight"], aval, num_bytes(parse_aval(aval)))
            for bound, aval in avals
        )
        self.padding: Padding | None = None
        buckets = [executable["bucket"] for executable in entry["executables"]]
        if entry["padding"] and buckets:
            from stagec.loader.padding import Padding  # few functions declare it

            self.padding = Padding(entry["padding"], in_avals, out_avals, self._interface.paths, buckets)
        self._fills_in = bool(self._bound or (self.padding and self.padding.masks))

    @property
    def is_closed(self) -> bool:
        """Whether the bundle was closed."""
        return self._loaded.archive is None

    @property
    def descriptions(self) -> tuple[Description, ...]:
        """The executables that calls choose from here, read now. Raises LoadError ("format", "digest"), CallError."""
        chosen = (c.offer for c in self.select().candidates if c.code == selection.CHOSEN)
        return tuple(self._describe(offer) for offer in chosen if offer.kind == "executable")

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The weights bound to arguments, which callers leave out, by path: `args[0]['w']`."""
        return {self._interface.paths[i]: weight for i, weight in self._bound.weights.items()} if self._bound else {}

    def select(self, shapes: Shapes | None = None, devices: Sequence[_jax.Device] | None = None) -> Selection:
        """Return what the bundle has to run this, and what of it runs here. shapes: of the leaves, flat."""
        loaded = self._loaded
        asked, here = loaded.asked._replace(shapes=shapes), loaded.host
        if devices is not None:
            asked, here = asked._replace(num_devices=len(devices)), host.describe(devices)
        return selection.select(self.name, self.offers, here, asked)._replace(bound=self._bound_arrays)

    def shapes_of(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Shapes:
        """Return the shapes that a call has: those of the bucket, where it is padded.

        Raises CallError ("structure", "dtype").
        """
        leaves = self._flatten(args, kwargs)
        fit = self.padding.fit(leaves) if self.padding else None
        return fit.shapes if fit else _shapes(leaves)

    def call(self, args: tuple[object, ...], kwargs: dict[str, object], donate: bool) -> Any:
        """Run it. kwargs: those that are not static. donate: as of `Function.with_options`. See `Function.__call__`."""
        given = self._leaves(args, kwargs) if self._fills_in else self._interface.leaves(args, kwargs)
        kinds = kinds_of(given)
        known = self._prepared.get(kinds) if donate else None
        if known is None and None in kinds and not self._fills_in:  # numbers become arrays
            given = self._interface.check_dtypes(given)
            kinds = kinds_of(given)
            known = self._prepared.get(kinds) if donate else None
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
        signature, fit = self._calls.get(_shapes(leaves)) or self._resolve(leaves)
        if fit is not None:
            leaves = fit.fill(leaves)
        try:
            results = signature.call(leaves, donate)
        except RuntimeError as error:  # XLA's own
            self._locate(error, signature)
            raise
        if fit is None:
            self._prepare(signature, kinds)
        return signature.unflatten(results if fit is None else fit.cut(results))

    def flat(self, args: tuple[object, ...], kwargs: dict[str, object], donate: bool) -> Flat:
        """Return it for arrays like these, loaded; see `Function.flat`."""
        leaves = self._flatten(args, kwargs)
        shapes = _shapes(leaves)
        signature, fit = self._calls.get(shapes) or self._resolve(leaves)
        if fit and (fit.shapes != shapes or any(leaf is OMITTED for leaf in leaves)):
            raise CallError("shape", f"{self.name}: a flat call is not padded: give all arrays, of a bucket's sizes")
        return Flat(signature, shapes, donate, self._loaded, self._locate)

    def input_shardings(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """Return how a call lays these arguments on devices; see `Function.input_shardings`."""
        leaves = self._flatten(args, kwargs)
        signature, _ = self._calls.get(_shapes(leaves)) or self._resolve(leaves)
        assert signature.executable is not None
        taken = zip(signature.description.kept_var_idx, signature.executable.parameter_shardings, strict=True)
        by_leaf: Mapping[int, Sharding] = dict(taken)
        return signature.description.in_tree.unflatten([by_leaf.get(i) for i in range(len(leaves))])

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
        if self.padding and self.padding.masks:
            kwargs = {**dict.fromkeys(self.padding.masks, OMITTED), **kwargs}
        if self._bound:
            args, kwargs = self._bound.fill(args, kwargs)
        return self._interface.leaves(args, kwargs)

    def _resolve(self, leaves: Sequence[Any]) -> tuple[Signature, Fit | None]:
        """Return what runs for arguments of these shapes, loaded; remembered for the next call.

        Raises CallError ("shape") where no bucket has them, LoadError.
        """
        with self._loaded.lock:
            given = _shapes(leaves)
            fit = self.padding.fit(leaves) if self.padding else None
            if fit is None and any(leaf is OMITTED for leaf in leaves):
                raise CallError("shape", self._no_bucket(leaves))
            shapes = fit.shapes if fit else given
            signature = self._signatures.get(shapes)
            if signature is None:
                signature = self._signatures[shapes] = self._load(self._select(shapes, leaves), shapes)
            self._calls[given] = signature, fit
            return self._calls[given]

    def _select(self, shapes: Shapes, leaves: Sequence[Any]) -> Offer:
        selected = self.select(shapes)
        if selected.chosen is not None:
            return selected.chosen.offer
        known = {offer.shapes for offer in self.offers if offer.kind == "executable"}
        if known and shapes not in known:
            raise CallError("shape", self._no_bucket(leaves))
        raise selected.refusal(self._loaded.path)

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
                warnings.warn(f"{loaded.path}: {offer.member} is compiled; {doubt}", RuntimeWarning, stacklevel=2)
            convention, executable = loaded.compile(loaded.archive[offer.member], platform, shapes, devices)
            signature = Signature(self.name, convention, loaded.types, self.usage)
            signature.executable = executable
            return signature
        description = self._describe(offer)
        signature = Signature(self.name, description, loaded.types, self.usage)
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
            entries = archive.index["functions"][self.name]["executables"]
            entry = next(e for e in entries if (e["target"], tuple(sorted(e["bucket"].items()))) == which)
            stored = archive.read(entry["description"], LARGEST)
            try:
                description = index.describe(archive.index, self.name, entry, stored)
                # Calls are checked against the index: XLA, which checks nothing, must get what the executable takes.
                if description.in_avals != offer.static_avals:
                    raise ValueError("its arguments are not those that the index has")
            except ValueError as error:
                raise LoadError("format", f"{archive.path}: {entry['description']}: {error}") from error
            self._descriptions[which] = description
        return self._descriptions[which]

    def release(self) -> None:
        """Let go of the executables; XLA frees their memory when no call uses them any more."""
        self._prepared.clear()
        self._calls.clear()
        self._signatures.clear()

    def _locate(self, error: Exception, signature: Signature) -> None:
        """Add a note with lines of the model to XLA's error, where `<manifest>.<function>.debug.mlir` is beside it."""
        debug = Path(self._loaded.path).with_name(f"{self._loaded.name}.{self.name}.debug.mlir")
        if self._loaded.locations and debug.exists():
            from stagec.stages import locations  # MLIR: not needed to run

            loaded = signature.executable and signature.executable.loaded
            locations.add_note(error, debug, loaded.hlo_modules()[0].to_string() if loaded else "")

    def _no_bucket(self, leaves: Sequence[Any]) -> str:
        """Say which shapes do not fit, against every executable: sizes that never vary, or the buckets."""
        executables = [offer for offer in self.offers if offer.kind == "executable"]
        faults = []
        for i, leaf in enumerate(leaves):
            wanted = sorted({str(offer.static_avals[i]) for offer in executables})
            given = Aval(executables[0].static_avals[i].dtype, leaf.shape)
            if leaf is not OMITTED and str(given) not in wanted:
                faults.append(f"{self._interface.path(i)} is {given}; expected {' or '.join(wanted)}")
        names = (bucket_name(offer.bucket, " = ", ", ") for offer in executables)
        buckets = "; ".join(dict.fromkeys(filter(None, names)))
        what = "; ".join(faults) or "the sizes of the arguments belong to different buckets"
        padded = ", ".join(self.padding.declared) if self.padding else ""
        sizes = f"buckets: {buckets}{f'; smaller sizes of {padded} are padded' if padded else ''}"
        return f"{self.name}: {what}" + (f" ({sizes})" if buckets else "")


def _usage_of(loaded: Loaded, name: str) -> Call:
    """Return how a call of a variant is written; what the index does not say of it is read now."""
    from stagec.bundle.calls import call_of  # calls that fit do without

    archive = loaded.archive
    if archive is None:
        raise CallError("closed", f"{name}: the bundle was closed")
    try:
        return call_of(archive, name)
    except (LoadError, ValueError):  # damaged: the names of parameters are missing, and nothing else
        return call_of(archive, name, names=False)


def _shapes(leaves: Sequence[Any]) -> Shapes:
    return tuple([leaf.shape for leaf in leaves])


def tupled(static: Mapping[str, Any]) -> dict[str, Any]:
    """Return static arguments with tuples for lists, which JSON has instead."""

    def tupled(value: Any) -> Any:
        return tuple(map(tupled, value)) if isinstance(value, list | tuple) else value

    return {name: tupled(value) for name, value in static.items()}


def bucket_name(bucket: Mapping[str, int], equals: str = "", separator: str = "_") -> str:
    """Return the name of a bucket: `batch8_length16`."""
    return separator.join(f"{name}{equals}{size}" for name, size in sorted(bucket.items()))
