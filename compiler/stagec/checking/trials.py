"""`stagec run`: call one function of a bundle with random or given arguments, without JAX."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stagec.bundle.description import Description
from stagec.core.messages.refusal import CallError
from stagec.core.trees.node_types import NodeTypes
from stagec.core.trees.tree import argument_path
from stagec.loader.bundle import Bundle
from stagec.loader.function import Function
from stagec.pjrt.arrays import dtype_of
from stagec.pjrt.making import random_arrays

Arrays = Mapping[str, NDArray[Any]]
"""Arrays by path: `args[0]['w']` of an argument, `result['y']` of a result."""


def find(bundle: Bundle, name: str) -> Function:
    """Return the function of this name, or the variant FUNCTION-VARIANT. Raises CallError ("static")."""
    signatures = {
        signature.name: signature
        for function in bundle.values()
        for signature in function.variants.values() or [function]
    }
    if name not in signatures:
        raise CallError("static", f"there is no function {name!r}; write one of {', '.join(sorted(signatures))}")
    if not signatures[name].descriptions:
        raise CallError("shape", f"{name} has no executable for target {bundle.target!r}")
    return signatures[name]


def of_bucket(function: Function, bucket: Mapping[str, int]) -> Description:
    """Return the description of a function's executable for a bucket; for an empty bucket, the first one.

    Raises CallError ("shape").
    """
    for description in function.descriptions:
        if not bucket or description.bucket == bucket:
            return description
    texts = (
        " ".join(f"{dim}={size}" for dim, size in description.bucket.items()) for description in function.descriptions
    )
    have = ", ".join(filter(None, texts)) or "none"
    raise CallError("shape", f"{function.name} has no such bucket; its buckets are: {have}")


def random_arguments(description: Description, seed: int, bound: Collection[str] = ()) -> dict[str, NDArray[Any]]:
    """Return arguments for an executable: the same for the same seed. Floats are normal, integers 0 or 1.

    bound: paths of the arguments to leave out.
    """
    pairs = zip(_paths(description), random_arrays(description.in_avals, seed), strict=True)
    return {path: values for path, values in pairs if path not in bound}


def call(function: Function, arguments: Arrays) -> tuple[dict[str, NDArray[Any]], list[float]]:
    """Call a function twice; return its result and the seconds that both calls took, the first with loading.

    arguments: all arguments of the function; bound ones may be left out.
    Raises CallError for one that is missing, unknown or does not fit; LoadError when the executable is not loaded.
    """
    description = function.descriptions[0]
    args, kwargs = structured(function, description, arguments)
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        result = function(*args, **kwargs)
        seconds.append(time.perf_counter() - started)
    return results(description, result), seconds


def results(description: Description, result: Any) -> dict[str, NDArray[Any]]:
    """Return the arrays of a result by their paths. description: of an executable that gives the same structure."""
    names = [f"result{path}" for path in description.out_tree.paths()]
    # If this process knows the model's own types, the result has objects of these types.
    types = NodeTypes().of_arguments(list(description.out_tree.custom_nodes()))
    flat = description.out_tree.flatten(result, types=types)
    return {name: np.asarray(leaf) for name, leaf in zip(names, flat, strict=True)}


def structured(
    function: Function, description: Description, arguments: Arrays
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments to pass to a function, `(args, kwargs)`, for the executable of `description`.

    arguments: as for `call`. Raises CallError for one that is missing or unknown.
    """
    paths = _paths(description)
    given: Mapping[str, Any] = {**function.weights, **arguments}
    faults = [f"{path} is missing" for path in paths if path not in given]
    faults += [f"{path} is not an argument" for path in arguments if path not in paths]
    if faults:
        raise CallError("structure", f"{function.name}: {'; '.join(faults)}")
    leaves = [as_dtype(given[path], dtype_of(aval)) for path, aval in zip(paths, description.in_avals, strict=True)]
    # A custom node becomes a dict of its fields or a tuple, which every function takes.
    return cast("tuple[tuple[Any, ...], dict[str, Any]]", description.in_tree.unflatten(leaves))


def summary(values: NDArray[Any]) -> dict[str, Any]:
    """Return dtype and shape of an array, how many values are NaN or infinite, and statistics of the others.

    "minimum", "mean" and "maximum" are None if there are no values, or no order of them.
    """
    statistics: dict[str, Any] = {"dtype": str(values.dtype), "shape": list(values.shape), "not_finite": 0}
    statistics |= dict.fromkeys(("minimum", "mean", "maximum"))
    if values.dtype.kind == "c":
        return {**statistics, "not_finite": int(np.sum(~np.isfinite(values)))}
    numbers = values.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    statistics["not_finite"] = numbers.size - finite.size
    if finite.size:
        statistics |= {"minimum": float(finite.min()), "mean": float(finite.mean()), "maximum": float(finite.max())}
    return statistics


def _paths(description: Description) -> list[str]:
    return [argument_path(path) for path in description.in_tree.paths()]


def as_dtype(values: Any, dtype: np.dtype[Any]) -> Any:
    """Return an array of an .npz file with its dtype: it holds bfloat16 and the like as bytes without a name.

    An array that has another dtype already is returned as it is.
    """
    unnamed = values.dtype.kind == "V" and values.dtype != dtype and values.dtype.itemsize == dtype.itemsize
    return values.view(dtype) if unnamed else values
