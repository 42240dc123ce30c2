"""Replace a bundle's file of weights by another one: the same arrays with other numbers.

The check is the one of a build: names, dtypes and shapes; and a digest or a signature, if the caller asks for one.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from stagec.bundle import external, safetensors
from stagec.bundle.archive import Archive
from stagec.bundle.binding import listed
from stagec.bundle.calls import call_of, description_of
from stagec.bundle.external import Files
from stagec.bundle.safetensors import Tensor
from stagec.bundle.sources import sha256_of
from stagec.core.data.reading import RegularFile
from stagec.core.messages.errors import nearest
from stagec.core.messages.refusal import LoadError
from stagec.core.sizes.avals import parse_aval
from stagec.core.trees.tree import Tree
from stagec.pjrt.weights import Weights, in_file

if TYPE_CHECKING:
    from stagec.trust.keys import Key


def replaced(
    before: Weights,
    archive: Archive,
    path: str,
    file: str | None,
    sha256: str | None = None,
    keys: Sequence[Key] | None = None,
    threshold: int = 1,
    signatures: Sequence[str] = (),
) -> tuple[Weights, Mapping[str, str]]:
    """Return the weights with the arrays of the safetensors file at `path`, and the digest (hex) of each of these.

    Arrays with the same bytes stay shared. The header that is parsed is of the bytes that are hashed.

    The arrays are read once, with keys twice: nothing is parsed before the signature of the whole was checked.

    before: the weights of the bundle, or of a view of it. archive: the bundle.
    file: which of its files of weights this one replaces; None: the only one.
    Other parameters and errors as for `Bundle.with_weights`.
    """
    by_file: dict[str, dict[str, str]] = {}
    for weight, entry in archive.index["weights"].items():
        name, _, tensor = weight.partition(":")
        by_file.setdefault(name, {})[tensor] = entry["aval"]
    taken = _chosen(archive, path, file, by_file)
    try:
        opened = RegularFile(path)
    except OSError as error:
        raise LoadError("weights", f"{path}: cannot be read: {error.strerror}") from error
    signed = None
    try:
        head = safetensors.head(opened)
        if keys is not None:  # before anything parses it
            from stagec.trust import attestation, model_signing

            whole = functools.cache(lambda: sha256_of(opened, len(head), head))
            given = signatures or [f"{path}{model_signing.SUFFIX}"]
            attestation.Vouching(path, keys, threshold, given)(b"", whole)
            signed = whole()
        tensors = safetensors.read(path, opened, head)
        faults = list(_faults(archive, taken, by_file[taken], tensors))
        # A file may be larger than anybody wants to read: only one that fits is.
        of_file, by_weight = ("", {}) if faults else _digests(opened, head, taken, tensors, by_file[taken])
    except ValueError as error:
        raise LoadError("weights", f"{path}: not a safetensors file: {error}") from error
    except OSError as error:
        raise LoadError("weights", f"{path}: cannot be read: {error.strerror}") from error
    if not faults and signed not in (None, of_file):
        faults.append("it changed while it was read")
    if not faults and sha256 is not None and of_file != sha256.lower():
        faults.append(f"its sha256 is {of_file}; expected {sha256}")
    if faults:
        lines = "".join(f"\n  {fault}" for fault in faults)
        raise LoadError("weights", f"{path}: cannot take the place of {taken} in {archive.path}:{lines}")
    weights = {
        f"{taken}:{name}": {"file": path, "start": safetensors.start_of(tensors[name]), "aval": aval}
        for name, aval in by_file[taken].items()
    }
    files = Files.of_one(path, opened, of_file, weights)
    changed = {
        name: in_file(files, entry, before.mapped, by_weight[name])
        for name, entry in weights.items()
        if not before.by_name[name].has(by_weight[name])
    }
    return Weights({**before.by_name, **changed}, before.mapped), by_weight


def _digests(
    opened: RegularFile, head: bytes, file: str, tensors: Mapping[str, Tensor], names: Iterable[str]
) -> tuple[str, dict[str, str]]:
    """Return the SHA-256 (hex) of a file and of some of its arrays, of the same bytes. Raises OSError."""
    ranges = {name: (safetensors.start_of(tensors[name]), len(tensors[name].data)) for name in names}
    states = {span: hashlib.sha256() for span in ranges.values()}
    of_file = external.read_once(opened, states, lambda span, _, part: states[span].update(part), head)
    return of_file, {f"{file}:{name}": states[span].hexdigest() for name, span in ranges.items()}


def _chosen(archive: Archive, path: str, file: str | None, by_file: Mapping[str, object]) -> str:
    if file is None and len(by_file) == 1:
        return next(iter(by_file))
    if file is not None and file in by_file:
        return file
    if by_file:
        what = "say which" if file is None else f"it has no {file}: {nearest(file, by_file)}"
        raise LoadError("weights", f"{path}: {archive.path} has the files {', '.join(sorted(by_file))}; {what}")
    baked = [f"{name} of {function}" for name, functions in _constants(archive).items() for function in functions]
    has = f"; {listed(baked)} {'are constants' if len(baked) > 1 else 'is a constant'}" if baked else ""
    what = f"{path}: no argument in {archive.path} is bound to weights{has}"
    raise LoadError("weights", f"{what}: make them arguments of the function, and name the file in `bind`")


def _faults(archive: Archive, file: str, wanted: Mapping[str, str], given: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the differences from the replaced file."""
    for name, aval in wanted.items():
        if name not in given:
            yield f"it lacks {name} ({aval}); save it under this name"
        elif given[name].aval != parse_aval(aval):
            yield f"{name} is {given[name].aval}; expected {aval}"
    extra = sorted(given.keys() - wanted.keys())
    if extra:
        prefixes = tuple(_prefixes(archive, file))
        constants = _constants(archive)
        for name in [name for name in extra if name in constants]:
            where = listed(constants[name])
            yield f"{name} is a constant in {where}, which cannot change; make it an argument, and bind it"
        unused = [name for name in extra if name.startswith(prefixes) and name not in constants]
        if unused:
            yield f"it has {listed(unused)}, and nothing is bound to that; leave it out of the file"


def _prefixes(archive: Archive, file: str) -> Iterator[str]:
    """Yield the prefixes that the manifest gives arguments: all arrays of a file with these names must be bound."""
    for function in archive.index["functions"]:
        entry = archive.index["functions"][function]
        bound = [(bind["leaf"], bind["weight"].partition(":")) for bind in entry["bind"]]
        mine = [(leaf, tensor) for leaf, (name, _, tensor) in bound if name == file]
        if not mine:
            continue
        names = list(Tree.from_json(entry["in_tree"]).names())
        usage = call_of(archive, function)
        for leaf, tensor in mine:
            top, argument, *rest = names[leaf]
            if rest:
                yield tensor.removesuffix(".".join(rest))
            elif tensor in (
                usage.path(f"args[{argument}]" if top == "0" else f"kwargs[{argument!r}]"),
                f"args[{argument}]",
            ):
                yield ""  # the argument is one array, with the parameter's name if there is no prefix


def _constants(archive: Archive) -> dict[str, list[str]]:
    """Return the large constants of all functions by name, each with its functions."""
    functions: dict[str, list[str]] = {}
    for function in archive.index["functions"]:
        for constant in description_of(archive, function)["constants"]:
            functions.setdefault(constant["name"], []).append(function)
    return functions
