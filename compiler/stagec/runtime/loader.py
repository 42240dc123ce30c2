"""Load a bundle and call its functions: numpy in, numpy out, without JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagec.avals import Aval
from stagec.runtime import device, host, index, jaxlib_lines
from stagec.runtime.archive import Archive
from stagec.runtime.description import Description
from stagec.runtime.node_types import NodeTypes, Types, children_by_jax
from stagec.runtime.refusal import CallError, LoadError
from stagec.trees import TreeMismatch, argument_path

Shapes = tuple[tuple[int, ...], ...]


def load(path: str | Path, target: str | None = None, types: Types | None = None) -> Bundle:
    """Load a bundle (`name.aot`).

    target: which of the bundle's targets to run; None takes the most capable one that this machine can run.
    types: the model's own types that results are made of: classes (namedtuples, dataclasses, flax's and equinox's), or
        a mapping from the name that a type is registered under for serialization to the class or a `PyTreeNode`. A type
        that is not there becomes a dict of its fields, or a tuple of its children where it is not known by fields.
        None: those that this process has, because it has imported their module or has registered them with JAX. The
        loader itself imports neither a module of the model nor JAX.
    Raises LoadError with a code when the file is missing, damaged, of another format, or has nothing for this machine.
    The digest of what is read is checked before anything parses it; executables are read and handed to XLA at their
    first call. What XLA raises then, or in a call, has a note with the lines of the model, where
    `<manifest>.<function>.debug.mlir` is beside the bundle.
    """
    archive = Archive(path)
    refusal = jaxlib_lines.refusal()
    if refusal:
        raise LoadError("jaxlib-version", refusal)
    return Bundle(archive, target, NodeTypes(types))


class Bundle(Mapping[str, "Function"]):
    """The functions of a bundle by name.

    name, version: as in the manifest.
    target: the target whose executables run.

    Made by `load`. `bundle["predict"](params, x)` calls a function.
    """

    def __init__(self, archive: Archive, target: str | None, types: NodeTypes) -> None:
        self.name: str = archive.index["name"]
        self.version: str = archive.index["version"]
        self.target = _choose_target(archive.path, archive.index["targets"], target)
        self._functions: dict[str, Function] = {}
        for name, entry in archive.index["functions"].items():
            executables = [e for e in entry["executables"] if e["target"] == self.target]
            function = Function(name, archive, executables, _tupled(entry["static"]), types)
            if entry["variant"]:
                family = self._functions.setdefault(
                    entry["function"], Function(entry["function"], archive, (), {}, types)
                )
                family.variants[entry["variant"]] = function
            else:
                self._functions[name] = function

    def __getitem__(self, name: str) -> Function:
        return self._functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    def __repr__(self) -> str:
        return f"Bundle({self.name} {self.version}, target {self.target}: {', '.join(self)})"


class Function:
    """A function of a bundle.

    Call it with numpy arrays (or pytrees of them) of the shapes that one of its executables has. Results are numpy
    arrays; when an argument is a device array (`device_put`), results stay on the device as device arrays, and the
    device arrays of donated arguments are consumed. An argument of a type of the model's own is an object of that type,
    a dict of its fields, or, of a type that is not known by fields, a tuple of its children.

    Static arguments are passed by keyword, as in JAX; they may be left out where the function was built with one
    combination of them. `variants[NAME]` is the function of one combination.

    name: as in the manifest; of one variant, `FUNCTION-VARIANT`.
    static: the static arguments that it was built with; empty where it has variants.
    variants: the combinations, by name; empty where there is one.
    """

    def __init__(
        self,
        name: str,
        archive: Archive,
        executables: Sequence[Mapping[str, Any]],
        static: Mapping[str, Any],
        types: NodeTypes,
    ) -> None:
        self.name = name
        self.static = static
        self.variants: dict[str, Function] = {}
        self._archive = archive
        self._members = {_bucket_name(entry["bucket"]): entry for entry in executables}
        self._descriptions = [_describe(archive, name, entry) for entry in executables]
        here = jaxlib_lines.version()
        made_with = sorted({description.versions["jaxlib"] for description in self._descriptions} - {here})
        if made_with:
            what = f"{archive.path}: {name} was compiled with jaxlib {made_with[0]}, here is {here}"
            raise LoadError("jaxlib-version", f"{what}; install that version, or build the bundle with this one")
        self._signatures = {_shapes(d.in_avals): Signature(name, d, types) for d in self._descriptions}

    @property
    def descriptions(self) -> tuple[Description, ...]:
        """The executables of this function for the bundle's target, those of its variants included."""
        return (*self._descriptions, *(d for variant in self.variants.values() for d in variant.descriptions))

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the function.

        Raises CallError when static arguments, structure, dtype or shape of the arguments fit no executable, or one was
        donated to an earlier call; LoadError when jaxlib does not load the executable, at its first call.
        """
        names = {name for variant in (self, *self.variants.values()) for name in variant.static}
        given = {name: kwargs.pop(name) for name in names & kwargs.keys()}
        return self._choose(_tupled(given))._run(args, kwargs)

    def _choose(self, given: Mapping[str, Any]) -> Function:
        """Return the one signature that was built with these static arguments."""
        signatures = list(self.variants.values()) or [self]
        fitting = [s for s in signatures if all(s.static[name] == value for name, value in given.items())]
        if len(fitting) == 1:
            return fitting[0]
        listed = "; ".join(_arguments(s.static) for s in signatures)
        if fitting:
            raise CallError("static", f"{self.name}: say which static arguments: {listed}")
        raise CallError("static", f"{self.name} was not built with {_arguments(given)}, but with {listed}")

    def _run(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        if not self._signatures:
            raise CallError("shape", f"{self.name} has no executable for this target")
        # All signatures of a function have one structure; only sizes differ.
        first = next(iter(self._signatures.values()))
        leaves = first.flatten(args, kwargs)
        signature = self._signatures.get(tuple(leaf.shape for leaf in leaves))
        if signature is None:
            raise CallError("shape", self._no_bucket(first, leaves))
        try:
            if signature.executable is None:
                entry = self._members[_bucket_name(signature.description.bucket)]
                signature.load(self._archive[entry["executable"]], signature.description.nr_devices)
            results = signature.call(leaves)
        except (LoadError, RuntimeError) as error:  # XLA's own is a RuntimeError
            self._locate(error, signature)
            raise
        return signature.unflatten(results)

    def _locate(self, error: Exception, signature: Signature) -> None:
        """Add a note with lines of the model to XLA's error, where `<manifest>.<function>.debug.mlir` is beside it."""
        debug = Path(self._archive.path).with_name(f"{self._archive.index['name']}.{self.name}.debug.mlir")
        if debug.exists():
            from stagec.runtime import locations  # MLIR: not needed to run

            loaded = signature.executable and signature.executable.loaded
            locations.add_note(error, debug, loaded.hlo_modules()[0].to_string() if loaded else "")

    def _no_bucket(self, first: Signature, leaves: Sequence[Any]) -> str:
        """Say which shapes do not fit, against every executable: sizes that never vary, or the buckets."""
        faults = []
        for i, (path, leaf) in enumerate(zip(first.paths, leaves, strict=True)):
            wanted = sorted({str(d.in_avals[i]) for d in self._descriptions})
            given = Aval(first.description.in_avals[i].dtype, leaf.shape)
            if str(given) not in wanted:
                faults.append(f"{path} is {given}, {' or '.join(wanted)} is wanted")
        buckets = "; ".join(filter(None, (_bucket_name(d.bucket, " = ", ", ") for d in self._descriptions)))
        what = "; ".join(faults) or "the sizes of the arguments belong to different buckets"
        return f"{self.name}: {what}" + (f" (buckets: {buckets})" if buckets else "")

    def __repr__(self) -> str:
        parts = list(self.variants) or [_bucket_name(d.bucket) for d in self._descriptions if d.bucket]
        return f"Function({self.name}{': ' if parts else ''}{', '.join(parts)})"


class Signature:
    """One executable with its calling convention.

    executable: None until `load`, or until it is set to one that is loaded already.
    """

    def __init__(self, name: str, description: Description, types: NodeTypes | None = None) -> None:
        self.name = name
        self.description = description
        self._types = types or NodeTypes()
        self._nodes_in = list(description.in_tree.custom_nodes())
        self._nodes_out = list(description.out_tree.custom_nodes())
        self.paths = [argument_path(path) for path in description.in_tree.paths()]
        self.executable: device.Executable | None = None
        self._dtypes = [device.dtype_of(aval) for aval in description.in_avals]

    def load(self, serialized: bytes, num_devices: int = 1) -> None:
        """Hand the executable to XLA. Raises LoadError ("custom-call", "executable")."""
        parameters, results = self.parameters_and_results()
        calls = tuple(self.description.custom_calls)
        self.executable = device.Executable.load(serialized, parameters, results, calls, num_devices)

    def parameters_and_results(self) -> tuple[device.ArraySpecs, device.ArraySpecs]:
        """Return shape and dtype of each array that the executable takes, and of each that it gives."""
        taken = [self.description.in_avals[i] for i in self.description.kept_var_idx]
        parameters, results = (
            [(tuple(map(int, aval.shape)), device.dtype_of(aval)) for aval in avals]
            for avals in (taken, self.description.out_avals)
        )
        return parameters, results

    def flatten(self, args: tuple[object, ...], kwargs: dict[str, object]) -> list[Any]:
        """Return the leaves as numpy or device arrays of the right dtype. Raises CallError ("structure", "dtype")."""
        try:
            types = self._types.of_arguments(self._nodes_in)
            leaves = self.description.in_tree.flatten((args, kwargs), types=types)
        except TreeMismatch as error:
            where = argument_path(error.path) if error.path else "the call"
            raise CallError("structure", f"{self.name}: {where}: {error.what}") from None
        return self.check_dtypes(leaves)

    def check_dtypes(self, leaves: Sequence[Any]) -> list[Any]:
        """Return flat arguments as numpy or device arrays. Raises CallError ("dtype")."""
        return [
            leaf if isinstance(leaf, device.Array) and leaf.dtype == dtype else self._to_numpy(leaf, dtype, i)
            for i, (leaf, dtype) in enumerate(zip(leaves, self._dtypes, strict=True))
        ]

    def _to_numpy(self, leaf: object, dtype: np.dtype[Any], i: int) -> NDArray[Any]:
        if type(leaf) in (bool, int, float, complex):
            # A Python number has no dtype of its own: it takes the parameter's where the value survives.
            value = np.array(leaf)
            if np.can_cast(value.dtype.type(0), dtype, "same_kind") or value.dtype.kind == dtype.kind:
                return value.astype(dtype)
        values = np.asarray(leaf)
        if values.dtype != dtype:
            given = getattr(leaf, "dtype", values.dtype)
            wanted = self.description.in_avals[i]
            what = f"{self.name}: {self.paths[i]} has dtype {given}, {dtype} is wanted ({wanted})"
            raise CallError("dtype", what)
        return values

    def call(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the flat results: numpy arrays, or device arrays when an argument is one."""
        assert self.executable is not None
        donated = self.description.donated
        for i in self.description.kept_var_idx:
            if isinstance(leaves[i], device.Array) and leaves[i].is_deleted():
                what = f"{self.name}: {self.paths[i]} was donated to an earlier call; pass that call's result"
                raise CallError("deleted", what)
        put = self.executable.put
        arguments = [put(k, leaves[i], donated[i]) for k, i in enumerate(self.description.kept_var_idx)]
        outputs = self.executable(arguments)
        if any(isinstance(leaf, device.Array) for leaf in leaves):
            return outputs
        return [output.numpy() for output in outputs]

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """Return the result in its structure. Raises CallError ("structure") when a type here has another one."""
        try:
            return self.description.out_tree.unflatten(outputs, self._types.of_results(self._nodes_out))
        except TreeMismatch as error:
            raise CallError("structure", f"{self.name}: the result: {error.what}") from None


def device_put(tree: Any) -> Any:
    """Return `tree` with every array copied to the device, in the containers it was in.

    As `jax.device_put` does (https://docs.jax.dev/en/latest/_autosummary/jax.device_put.html), to this process's CPU.

    Use it for state that a function donates, so that it stays on the device between calls.
    tree: numpy arrays in dicts, lists, tuples, namedtuples and None, and in types that are registered with JAX where
        the process has imported JAX; elsewhere give a dict of an object's fields, which every function takes too.
    Raises CallError ("dtype") for a leaf that is no array.
    """
    if tree is None or isinstance(tree, device.Array):
        return tree
    if isinstance(tree, dict | list | tuple) or not hasattr(tree, "__array__"):
        if type(tree) not in (dict, list, tuple) and (found := children_by_jax(tree)):
            children, structure = found
            return structure.unflatten(map(device_put, children))
        match tree:
            case dict():
                return {key: device_put(value) for key, value in tree.items()}
            case list():
                return [device_put(value) for value in tree]
            case tuple():
                values = map(device_put, tree)
                return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    array = np.asarray(tree)
    if array.dtype.hasobject:
        kind = type(tree).__qualname__
        raise CallError("dtype", f"a {kind} is no array: give a dict of its fields, or a tuple of its children")
    # A copy of its own: a function may donate it, and the caller's memory must not change.
    return device.put(array, donated=True)


def _tupled(static: Mapping[str, Any]) -> dict[str, Any]:
    """Return static arguments with tuples for lists, which JSON has instead."""

    def tupled(value: Any) -> Any:
        return tuple(map(tupled, value)) if isinstance(value, list | tuple) else value

    return {name: tupled(value) for name, value in static.items()}


def _arguments(static: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in static.items()) or "none"


def _choose_target(path: str, targets: dict[str, dict[str, Any]], wanted: str | None) -> str:
    if wanted is not None and wanted not in targets:
        raise LoadError("no-target", f"{path}: no target {wanted!r}; the bundle has {', '.join(targets) or 'none'}")
    # The index lists targets from the least demanding to the most.
    candidates = [wanted] if wanted is not None else list(reversed(targets))
    others, reasons = [], []
    for name in candidates:
        if targets[name]["platform"] != "cpu":
            others.append(f"{name} is for {targets[name]['device_kind']}")
            continue
        missing = host.missing_cpu_flags(tuple(targets[name]["requires"]))
        if not missing:
            return name
        reasons.append(f"{name} needs {', '.join(missing)}")
    if reasons:
        raise LoadError("cpu-feature", f"{path}: this machine's CPU cannot run it: {'; '.join(reasons)}")
    if others:
        raise LoadError("platform", f"{path}: this loader runs executables for CPUs only: {'; '.join(others)}")
    raise LoadError("no-target", f"{path}: the bundle has no executables")


def _describe(archive: Archive, artifact: str, entry: Mapping[str, Any]) -> Description:
    try:
        return index.describe(archive.index, artifact, entry, archive[entry["description"]])
    except ValueError as error:
        raise LoadError("format", f"{archive.path}: {entry['description']}: {error}") from error


def _shapes(avals: Sequence[Aval]) -> Shapes:
    return tuple(tuple(map(int, aval.shape)) for aval in avals)


def _bucket_name(bucket: Mapping[str, int], equals: str = "", separator: str = "_") -> str:
    return separator.join(f"{name}{equals}{size}" for name, size in sorted(bucket.items()))
