"""Variants: they run the calls of one exported artifact of a bundle."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlib import _jax

from stagec.bundle import index
from stagec.bundle.description import LARGEST, Description
from stagec.core.messages.refusal import CallError, LoadError, RunError
from stagec.core.sizes.avals import Aval, num_bytes, parse_aval, physical
from stagec.core.trees.tree import LEAF, Tree
from stagec.loader import selection
from stagec.loader.loaded import Loaded
from stagec.loader.once import Once
from stagec.loader.selection import BoundArray, Offer, Selection, Shapes
from stagec.pjrt import clients, failures, host
from stagec.pjrt.arrays import DeviceArray
from stagec.pjrt.calling_convention import OMITTED, Convention, Interface, Signature
from stagec.pjrt.prepared import MOST_KINDS, Kinds, Prepared, kinds_of
from stagec.pjrt.shardings import Sharding
from stagec.pjrt.weights import Bound, Weight

if TYPE_CHECKING:
    from stagec.bundle.archive import Archive
    from stagec.core.messages.calls import Call
    from stagec.loader.flat import Flat
    from stagec.loader.jax_calls import JaxCalls
    from stagec.loader.padding import Fit, Padding
    from stagec.pjrt.executable import Executable


class Variant:
    """A function of a bundle with one combination of static arguments; most functions have one variant alone.

    name: of its artifact in the index.
    static: the static arguments that it was built with.
    offers: the candidates of the bundle to run it.
    usage: returns how to write a call.
    padding: the manifest's padding; None: none.
    interface: how to call it, before a size is known.
    whole: runs calls like the last one; None if that call had no JAX arrays.
    """

    def __init__(self, loaded: Loaded, name: str, executables: Once) -> None:
        """executables: by shapes and devices; those of the bundle with other weights, too.

        Raises LoadError ("format"), CallError ("closed").
        """
        if loaded.archive is None:
            raise CallError("closed", f"{name}: the bundle was closed")
        entry = loaded.archive.index["functions"][name]
        self.name = name
        self.static: Mapping[str, Any] = tupled(entry["static"])
        self.usage = functools.cache(functools.partial(_usage_of, loaded, name))
        self._loaded = loaded
        self._descriptions: dict[tuple[Any, ...], Description] = {}  # by target, bucket and jaxlib
        self._prepared: dict[Kinds, tuple[Signature, Prepared]] = {}
        self._calls: dict[tuple[Shapes, bool], tuple[Signature, Fit | None]] = {}
        self._signatures = Once()  # by shapes and devices
        self._executables = executables
        self._logged: set[tuple[str, str]] = set()
        self._jax_calls: JaxCalls | None = None
        self.whole: Callable[..., Any] | None = None
        in_avals, out_avals = (tuple(map(parse_aval, entry[key])) for key in ("in_avals", "out_avals"))
        self.offers = selection.offers(loaded.archive.index, name, in_avals)
        in_tree, out_tree = (Tree.from_json(entry[key]) for key in ("in_tree", "out_tree"))
        self.interface = Signature(name, Interface(in_tree, in_avals, out_tree, out_avals), loaded.types, self.usage)
        self._bound: Bound | None = None
        if entry["bind"]:
            self._bound = Bound(name, in_tree, entry["bind"], loaded.weights.by_name, self.usage)
        avals = ((bound, loaded.archive.index["weights"][bound["weight"]]["aval"]) for bound in entry["bind"])
        self._bound_arrays = tuple(
            BoundArray(self.interface.paths[bound["leaf"]], bound["weight"], aval, num_bytes(parse_aval(aval)))
            for bound, aval in avals
        )
        self.padding: Padding | None = None
        buckets = [executable["bucket"] for executable in entry["executables"]]
        if entry["padding"] and buckets:
            from stagec.loader.padding import Padding  # few functions declare it

            self.padding = Padding(entry["padding"], in_avals, out_avals, self.interface.paths, buckets)
        self._fills_in = bool(self._bound or (self.padding and self.padding.masks))
        self._takes_leaves = not self._fills_in and in_tree == _of_leaves(len(in_avals))

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
        return {self.interface.paths[i]: weight for i, weight in self._bound.weights.items()} if self._bound else {}

    def select(self, shapes: Shapes | None = None, devices: Sequence[_jax.Device] | None = None) -> Selection:
        """Return the bundle's candidates to run this, and which one runs here. shapes: of the leaves, flat."""
        loaded = self._loaded
        asked, here = loaded.asked._replace(shapes=shapes), loaded.host
        if loaded.crossings:
            asked = asked._replace(crosses=functools.partial(loaded.crossings.refusal, loaded.archive, self.name))
        if devices is not None:
            asked, here = asked._replace(num_devices=len(devices)), host.describe(devices)
        return selection.select(self.name, self.offers, here, asked)._replace(bound=self._bound_arrays)

    def shapes_of(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Shapes:
        """Return the shapes of a call: those of the bucket, if the call is padded.

        Raises CallError ("structure", "dtype").
        """
        leaves = self._flatten(args, kwargs)
        fit = self.padding.fit(leaves) if self.padding else None
        return fit.shapes if fit else _shapes(leaves)

    def call_whole(self, whole: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """Run it as `call` does, if the last call had JAX's arrays. whole: of this variant."""
        try:
            return whole(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            leaves = self.interface.check_dtypes(self.leaves(args, kwargs), of_jax=True)
            raise self.jax_calls.error(error, leaves) from None

    def call(self, args: tuple[object, ...], kwargs: dict[str, object], donate: bool) -> Any:
        """Run it. kwargs: those that are not static. donate: as of `Function.with_options`. See `Function.__call__`."""
        given: Sequence[Any]
        are_leaves = self._takes_leaves and not kwargs
        if are_leaves:
            # An object with a kind is an array and no container, so arguments like those of an earlier call are the
            # leaves.
            given = args
        else:
            given = self.leaves(args, kwargs) if self._fills_in else self.interface.leaves(args, kwargs)
        kinds = kinds_of(given)
        known = self._prepared.get(kinds) if donate else None
        if known is None:
            given = self.interface.check_dtypes(
                self.interface.leaves(args, kwargs) if are_leaves else given, of_jax=True
            )
            if None in kinds:
                types = {*map(type, given)}
                if _jax.ArrayImpl in types:
                    results = self.jax_calls.call(given, donate)
                    if len(types) == 1:
                        self.whole = self.jax_calls.whole
                    return self.interface.unflatten(results)
                kinds = kinds_of(given)  # numbers are arrays now
                known = self._prepared.get(kinds) if donate else None
        if known is not None:
            signature, (run, results_of, read) = known
            try:
                buffers = run(given)
                outputs: Sequence[Any] | None = buffers if buffers is None or read is None else read(buffers)
            except RuntimeError as error:
                raise self.failed(error, signature) from error
            if outputs is not None:
                return signature.unflatten(list(map(DeviceArray, outputs, results_of)) if read is None else outputs)
        signature, fit = self.resolved(given)
        try:
            results = signature.call(given if fit is None else fit.fill(given), donate)
        except RuntimeError as error:  # XLA's own
            raise self.failed(error, signature) from error
        if fit is None:
            self._prepare(signature, kinds)
        return signature.unflatten(results if fit is None else fit.cut(results))

    def flat(self, args: tuple[object, ...], kwargs: dict[str, object], donate: bool) -> Flat:
        """Return it for arrays like these, loaded; see `Function.flat`."""
        leaves = self._flatten(args, kwargs)
        shapes = _shapes(leaves)
        signature, fit = self.resolved(leaves)
        if fit and (fit.shapes != shapes or any(leaf is OMITTED for leaf in leaves)):
            raise CallError("shape", f"{self.name}: a flat call is not padded: give all arrays, of a bucket's sizes")
        from stagec.loader.flat import Flat  # many processes make none

        return Flat(signature, shapes, donate, self._loaded, self.failed)

    def input_shardings(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """Return how a call lays these arguments on devices; see `Function.input_shardings`."""
        leaves = self._flatten(args, kwargs)
        signature, _ = self.resolved(leaves)
        taken = zip(signature.description.kept_var_idx, signature.executable.parameter_shardings, strict=True)
        by_leaf: Mapping[int, Sharding] = dict(taken)
        return signature.description.in_tree.unflatten([by_leaf.get(i) for i in range(len(leaves))])

    @property
    def jax_calls(self) -> JaxCalls:
        """The calls with JAX's arrays among their arguments."""
        if self._jax_calls is None:
            from stagec.loader.jax_calls import JaxCalls  # most processes have no JAX

            self._jax_calls = JaxCalls(self)
        return self._jax_calls

    def _prepare(self, signature: Signature, kinds: Kinds) -> None:
        """Remember a call that succeeded, for the next one like it."""
        if len(self._prepared) >= MOST_KINDS or (prepared := signature.prepare(kinds)) is None:
            return
        with self._loaded.lock:
            if self._loaded.archive is not None:
                self._prepared[kinds] = signature, prepared

    def _flatten(self, args: tuple[object, ...], kwargs: dict[str, object]) -> list[Any]:
        return self.interface.check_dtypes(self.leaves(args, kwargs))

    def leaves(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Sequence[Any]:
        """Return the leaves of a call, with the arguments that the caller left out."""
        if self.padding and self.padding.masks:
            kwargs = {**dict.fromkeys(self.padding.masks, OMITTED), **kwargs}
        if self._bound:
            args, kwargs = self._bound.fill(args, kwargs)
        return self.interface.leaves(args, kwargs)

    def resolved(self, leaves: Sequence[Any], of_jax: bool = False) -> tuple[Signature, Fit | None]:
        """Return the loaded executable for arguments of these shapes, and remember it for the next call.

        of_jax: for JAX's arrays. Raises CallError ("shape") if no bucket has them, CallError ("client"), LoadError.
        """
        given = _shapes(leaves), of_jax
        known = self._calls.get(given)
        if known is not None:
            return known
        fit = self.padding.fit(leaves) if self.padding else None
        if fit is None and any(leaf is OMITTED for leaf in leaves):
            raise CallError("shape", self._no_bucket(leaves))
        shapes = fit.shapes if fit else given[0]
        signature = self._loaded_for(self._select(shapes, leaves), shapes, of_jax)
        with self._loaded.lock:
            if self._loaded.archive is None:  # this call ends normally, and leaves nothing behind
                self.release()
            else:
                self._calls[given] = signature, fit
        return signature, fit

    def loads(self) -> list[Callable[[], None]]:
        """Return a loader for each executable that calls choose from here. Raises LoadError if nothing runs."""
        selected = self.select()
        if selected.chosen is None:
            raise selected.refusal(self._loaded.path)
        sizes = {offer.shapes for offer in self.offers if offer.kind == "executable"}
        avals = self.interface.description.in_avals
        if not sizes and all(isinstance(size, int) for aval in avals for size in aval.shape):
            sizes = {selection.shapes_of(tuple(map(physical, avals)))}
        chosen = [candidate.offer for candidate in selected.candidates if candidate.code == selection.CHOSEN]
        return [
            functools.partial(self._load, offer, shapes)
            for offer in chosen
            for shapes in ([offer.shapes] if offer.kind == "executable" else sorted(sizes))
        ]

    def _load(self, offer: Offer, shapes: Shapes) -> None:
        signature = self._loaded_for(self._tried(offer, shapes), shapes)
        executable, description = signature.executable, signature.description
        for aval, i in zip(executable.parameters, description.kept_var_idx, strict=True):
            if self._bound and i in self._bound.weights:
                self._bound.weights[i].on(aval)

    def _select(self, shapes: Shapes, leaves: Sequence[Any]) -> Offer:
        selected = self.select(shapes)
        if selected.chosen is not None:
            return self._tried(selected.chosen.offer, shapes)
        known = {offer.shapes for offer in self.offers if offer.kind == "executable"}
        if known and shapes not in known:
            raise CallError("shape", self._no_bucket(leaves))
        raise selected.refusal(self._loaded.path)

    def _tried(self, offer: Offer, shapes: Shapes) -> Offer:
        """Return the offer; if an older jaxlib made it and a child process fails with it, the next one. LoadError."""
        crossings, archive = self._loaded.crossings, self._archive()
        while crossings and selection.crosses(offer, self._loaded.host):
            signature = archive.index["functions"][self.name]
            if crossings.passes(offer, self._describe(offer), archive, signature):
                break
            selected = self.select(shapes)
            if selected.chosen is None:
                raise selected.refusal(self._loaded.path)
            offer = selected.chosen.offer
        return offer

    def _loaded_for(self, offer: Offer, shapes: Shapes, of_jax: bool = False) -> Signature:
        """Return a signature with its executable, after XLA loaded or compiled it. Raises LoadError, CallError."""
        loaded = self._loaded
        self._archive()
        platform = self.platform_of(offer)
        assert platform is not None
        description = self._describe(offer) if offer.kind == "executable" else None
        count = description.nr_devices if description else offer.nr_devices or 1
        devices = tuple(loaded.devices_for(platform, count, of_jax))
        if len(devices) < count:
            what = f"{self.name}: it runs on {count} devices of {platform}, and JAX has {len(devices)} in this process"
            raise CallError("client", f"{what}: pass numpy's arrays, or give JAX more (jax_num_cpu_devices for a CPU)")
        assigned = description.device_assignment if description else None
        if platform == "tpu" and assigned and not loaded.settings.devices:
            # The code is for the coordinates that partitions have in the topology.
            here = {device.id: device for device in clients.devices(platform)}
            devices = tuple(here[i] for i in assigned.device_ids) if here.keys() >= {*assigned.device_ids} else devices
        make = self._compiled if description is None else self._handed_over
        which = shapes, devices

        def signed() -> Signature:
            convention, executable = self._executables.get(which, lambda: make(offer, shapes, platform, devices))
            signature = Signature(self.name, convention, loaded.types, self.usage)
            signature.executable = executable
            return signature

        return self._signatures.get(which, signed)

    def _handed_over(
        self, offer: Offer, shapes: Shapes, platform: str, devices: Sequence[_jax.Device]
    ) -> tuple[Convention, Executable]:
        """Return an executable that XLA has loaded. Raises LoadError, CallError."""
        self._log(offer, shapes)
        description = self._describe(offer)
        signature = Signature(self.name, description, self._loaded.types, self.usage)
        code, calls = self._archive()[offer.member], tuple(description.custom_calls)
        try:
            signature.load(code, calls, devices, description.memory_kinds)
        except LoadError as error:
            self.locate(error, signature)
            raise
        return description, signature.executable

    def _compiled(
        self, offer: Offer, shapes: Shapes, platform: str, devices: Sequence[_jax.Device]
    ) -> tuple[Convention, Executable]:
        """Return the exported artifact, compiled. Raises LoadError, CallError ("shape")."""
        loaded = self._loaded
        compiler = loaded.settings.compiler
        assert compiler is not None
        self._log(offer, shapes)
        doubt = selection.unknown_release(offer, loaded.host)
        if doubt:
            warnings.warn(f"{loaded.path}: {offer.member} is compiled; {doubt}", RuntimeWarning, stacklevel=2)
        return compiler(self._archive()[offer.member], platform, shapes, devices)

    def _log(self, offer: Offer, shapes: Shapes) -> None:
        """Log once that this compiles, or runs an executable that is not the first choice, and why."""
        before = itertools.takewhile(lambda candidate: candidate.offer != offer, self.select(shapes).candidates)
        passed = [c for c in before if c.code not in (selection.FITS, selection.CHOSEN, "shape", "target")]
        reasons = "; ".join(dict.fromkeys(f"not {c.offer.target}: {c.reason}" for c in passed))
        compiled, asked = offer.kind == "exported", self._loaded.asked.target
        crosses = selection.crosses(offer, self._loaded.host)
        if not (compiled or reasons or crosses) or (offer.kind, reasons) in self._logged:
            return
        self._logged.add((offer.kind, reasons))
        import logging  # most processes have what they run

        made = f" with jaxlib {offer.versions['jaxlib']}, which is measured" if crosses else ""
        what = "is compiled here" if compiled else f"runs what was compiled for {offer.target}{made}"
        level = logging.WARNING if compiled and reasons else logging.INFO
        nothing = "the bundle has no executable of it" + (f" for {asked}" if asked else "")
        why = reasons or (f"here is {self._loaded.host.jaxlib}" if crosses else nothing)
        logging.getLogger("stagec").log(level, "%s: %s %s (%s)", self._loaded.path, self.name, what, why)

    def exported(self) -> bytes:
        """Return the exported artifact, serialized. Raises LoadError ("digest"), CallError ("closed")."""
        return bytes(self._archive()[self.offers[-1].member])

    @property
    def description(self) -> Mapping[str, Any]:
        """What lies beside the exported artifact, read now. Raises LoadError, ValueError, CallError ("closed")."""
        from stagec.bundle.calls import description_of  # calls that fit do without

        return description_of(self._archive(), self.name)

    def _archive(self) -> Archive:
        if self._loaded.archive is None:
            raise CallError("closed", f"{self.name}: the bundle was closed")
        return self._loaded.archive

    def _describe(self, offer: Offer) -> Description:
        """Return the description of an executable; the first request reads it.

        Executables of several targets, buckets or jaxlibs may be one member; each has a description of its own.
        """
        archive = self._archive()
        which = index.key_of({"target": offer.target, "bucket": offer.bucket, "versions": offer.versions})
        if which not in self._descriptions:
            entry = self._entry(offer)
            stored = archive.read(entry["description"], LARGEST)
            try:
                description = index.describe(archive.index, self.name, entry, stored)
                # Calls are checked against the index, because XLA checks nothing: the executable must get the right
                # arrays.
                if description.in_avals != offer.static_avals:
                    raise ValueError("its arguments are not those that the index has")
            except ValueError as error:
                raise LoadError("format", f"{archive.path}: {entry['description']}: {error}") from error
            self._descriptions[which] = description
        return self._descriptions[which]

    def _entry(self, offer: Offer) -> Mapping[str, Any]:
        """Return what the index has of an executable."""
        which = index.key_of({"target": offer.target, "bucket": offer.bucket, "versions": offer.versions})
        entries = self._archive().index["functions"][self.name]["executables"]
        return next(entry for entry in entries if index.key_of(entry) == which)

    def module(self, offer: Offer) -> tuple[bytes, Sequence[int]]:
        """Return the StableHLO that an executable was compiled from, and the leaf that each of its parameters is.

        Raises LoadError ("format", "digest"), CallError ("closed").
        """
        return bytes(self._archive()[self._entry(offer)["stablehlo"]]), self._describe(offer).kept_var_idx

    def platform_of(self, offer: Offer) -> str | None:
        """Return the platform of this process that runs an offer; None if none does."""
        return selection.usable_platform(offer, self._loaded.host, self._loaded.asked)

    def release(self) -> None:
        """Let go of the executables; XLA frees their memory when no call uses them any more."""
        self.whole = self._jax_calls = None
        self._prepared.clear()
        self._calls.clear()
        self._signatures.clear()
        self._executables = Once()  # others may use those that it had

    def failed(self, error: Exception, signature: Signature) -> RunError:
        """Translate XLA's error in a call to one for the caller, with lines of the model (`locate`)."""
        failure = failures.of_call(error, self.name)
        if not hasattr(failure, "__notes__"):
            self.locate(failure, signature)
        return failure

    @property
    def debug(self) -> Path | None:
        """`<manifest>.<function>.debug.mlir`, which has the model's lines, if it is there and this may read it."""
        debug = Path(self._loaded.path).with_name(f"{self._loaded.name}.{self.name}.debug.mlir")
        return debug if self._loaded.settings.locations and debug.exists() else None

    def locate(self, error: Exception, signature: Signature) -> None:
        """Add a note with lines of the model to XLA's error, if they are known."""
        if debug := self.debug:
            from stagec.stages import locations  # MLIR: not needed to run

            executable = getattr(signature, "executable", None)
            locations.add_note(error, debug, executable.loaded.hlo_modules()[0].to_string() if executable else "")

    def _no_bucket(self, leaves: Sequence[Any]) -> str:
        """Say which shapes do not fit, against every executable: sizes that never vary, or the buckets."""
        executables = [offer for offer in self.offers if offer.kind == "executable"]
        faults = []
        for i, leaf in enumerate(leaves):
            wanted = sorted({str(offer.static_avals[i]) for offer in executables})
            given = Aval(executables[0].static_avals[i].dtype, leaf.shape)
            if leaf is not OMITTED and str(given) not in wanted:
                faults.append(f"{self.interface.path(i)} is {given}; expected {' or '.join(wanted)}")
        names = (bucket_name(offer.bucket, " = ", ", ") for offer in executables)
        buckets = "; ".join(dict.fromkeys(filter(None, names)))
        what = "; ".join(faults) or "the sizes of the arguments belong to different buckets"
        padded = ", ".join(self.padding.declared) if self.padding else ""
        sizes = f"buckets: {buckets}{f'; smaller sizes of {padded} are padded' if padded else ''}"
        return f"{self.name}: {what}" + (f" ({sizes})" if buckets else "")


def _usage_of(loaded: Loaded, name: str) -> Call:
    """Return how to write a call of a variant; this reads the facts that the index lacks."""
    from stagec.bundle.calls import call_of  # calls that fit do without

    archive = loaded.archive
    if archive is None:
        raise CallError("closed", f"{name}: the bundle was closed")
    try:
        return call_of(archive, name)
    except (LoadError, ValueError):  # damaged: the names of parameters are missing, and nothing else
        return call_of(archive, name, names=False)


def _of_leaves(count: int) -> Tree:
    """Return the structure of `(args, kwargs)` of a function that takes `count` arrays, without containers."""
    return Tree("tuple", (Tree("tuple", (LEAF,) * count), Tree("dict")))


def _shapes(leaves: Sequence[Any]) -> Shapes:
    return tuple([leaf.shape for leaf in leaves])


def tupled(static: Mapping[str, Any]) -> dict[str, Any]:
    """Return static arguments with tuples for lists, which JSON has instead."""
    return {name: _tupled(value) for name, value in static.items()}


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list | tuple) else value


def bucket_name(bucket: Mapping[str, int], equals: str = "", separator: str = "_") -> str:
    """Return the name of a bucket: `batch8_length16`."""
    return separator.join(f"{name}{equals}{size}" for name, size in sorted(bucket.items()))
