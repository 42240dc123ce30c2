"""Whether an executable of another jaxlib gives the right results here: `runs_on` of manifests, `add-jaxlib --reuse`.

XLA promises nothing about an executable's form to another release: a newer one may end the process, or give other bits.
So each executable is called once by the release that shall run it, in a process of its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagec.bundle.archive import Archive
from stagec.bundle.description import Description
from stagec.bundle.external import Files
from stagec.checking import golden, trials
from stagec.core.sizes.tolerances import tolerance, tolerances
from stagec.loader import crossings
from stagec.loader.bundle import Bundle
from stagec.loader.loaded import Settings
from stagec.pjrt import compatibility, host
from stagec.pjrt.making import random_arrays
from stagec.stages.exported import Exported


def difference(archive: Archive, name: str, target: str, bucket: Mapping[str, int], weights: str | None) -> str:
    """Run an executable that says it is this jaxlib's, and return how its results differ; "" if they do not.

    They are compared with the function's golden outputs, by its tolerances. Where the bundle has none for the bucket,
    with what this jaxlib compiles from the exported artifact, on random arguments, by the tolerances of the dtypes: of
    a result's largest number, and of a float of 8 bits or fewer a unit of its format. A result without a finite number
    says nothing: it counts as different.
    name: of the signature, as in the index. weights: the folder with the files of weights beside the bundle; None: its
    own. Raises LoadError if this machine cannot run the target.
    """
    entry = archive.index["functions"][name]
    files = Files(archive.path, archive.index, weights, "use")
    function = trials.find(Bundle(archive, Settings(target, policy="executable_only", files=files)), name)
    description = trials.of_bucket(function, bucket)
    expected = entry.get("golden")
    if expected and expected["bucket"] == bucket:
        inputs = {path: golden.array_of(archive, row) for path, row in expected["inputs"].items()}
        wanted = {path: (golden.array_of(archive, row), *tolerances(row)) for path, row in expected["outputs"].items()}
    else:
        inputs = trials.random_arguments(description, 0, function.weights)
        args, kwargs = trials.structured(function, description, inputs)
        compiled = trials.results(description, Exported.deserialize(archive[entry["exported"]]).call(*args, **kwargs))
        allowed = map(tolerance, description.out_avals)
        wanted = {
            path: (array, *_tolerances(array, each))
            for (path, array), each in zip(compiled.items(), allowed, strict=True)
        }
    given, _ = trials.call(function, inputs)
    if not wanted:
        return "it has no result that could be compared"
    for path, (array, rtol, atol) in wanted.items():
        if not np.isfinite(array.astype(np.complex128)).any():
            return f"on these arguments {path} has no number that could be compared"
        absolute, relative, ok = golden.errors(given.get(path), array, rtol, atol)
        if not ok:
            return f"{path} has a largest error of {absolute:.3g}, relative {relative:.3g}"
    return ""


def called(code: bytes, description: Description) -> dict[str, NDArray[Any]]:
    """Return what an executable for CPUs gives for random arrays, always the same, by path.

    Raises ValueError if it is not the one that is described, does not load, or fails, and if this CPU cannot run it.
    """
    if hashlib.sha256(code).hexdigest() != description.executable_sha256:
        raise ValueError("it is not the executable of its description")
    if refusal := host.cpu_refusal(description.target.requires, host.cpu_flags()):
        raise ValueError(refusal)
    return crossings.results(code, description, random_arrays(description.in_avals, 0))


def as_of_here(description: Description) -> Description:
    """Return the description of an executable as that of one of this process's jaxlib."""
    return description._replace(versions={**description.versions, "jaxlib": compatibility.version()})


def differs(results: Mapping[str, NDArray[Any]], description: Description, data: bytes) -> str:
    """Return how results differ from those of the jaxlib that made the executable; "" where all are near enough.

    data: all of those, one after the other, as `in_bytes` writes them. Tolerances are those of the dtypes.
    """
    if len(data) != sum(array.nbytes for array in results.values()):
        return "it has results of other sizes"
    start = 0
    for (path, given), usual in zip(results.items(), map(tolerance, description.out_avals), strict=True):
        end = start + given.nbytes
        array = np.frombuffer(data[start:end], given.dtype).reshape(given.shape)
        start = end
        if given.tobytes() == array.tobytes():
            continue
        absolute, relative, ok = golden.errors(given, array, *_tolerances(array, usual))
        if not ok:
            return f"{path} has a largest error of {absolute:.3g}, relative {relative:.3g}"
    return ""


def in_bytes(results: Mapping[str, NDArray[Any]]) -> bytes:
    """Return the elements of all results, one after the other."""
    return b"".join(array.tobytes() for array in results.values())


def _tolerances(array: NDArray[Any], usual: float) -> tuple[float, float]:
    """Return the relative and the absolute tolerance for a result; the usual one is of numbers around 1."""
    # It is half of a number of so few bits.
    bits = re.match(r"float[468]_e\dm(\d)", array.dtype.name)
    relative = min(usual, 2.0 ** -int(bits[1])) if bits else usual
    sizes = np.abs(array.astype(np.complex128))
    largest = float(sizes[np.isfinite(sizes)].max(initial=0))
    return relative, relative * min(largest, 1.0)
