"""A function of a bundle as a server runs it: loaded for every bucket before the first request, for several at once."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from stagec.checking import trials
from stagec.core.builds import naming
from stagec.core.sizes.avals import Aval, evaluate_shape
from stagec.core.sizes.size import names_in
from stagec.core.trees.tree import argument_path
from stagec.loader.bundle import Bundle
from stagec.loader.flat import Flat
from stagec.loader.function import Function
from stagec.loader.padding import Fit, Padding
from stagec.loader.selection import CHOSEN, NO_COMPILE, Offer, Policy, Shapes
from stagec.pjrt.arrays import to_numpy, zeros
from stagec.pjrt.calling_convention import OMITTED
from stagec.pjrt.making import random_arrays
from stagec.pjrt.weights import Weight
from stagec.stages import locations
from stagec_serve.refusal import RequestError
from stagec_serve.rows import why_dependent
from stagec_serve.tensors import interface_of

Result = TypeVar("Result")
Arrays = Sequence[NDArray[Any]]
"""One for each input, or for each output, in the order of the interface."""
PLATFORM = "stagec_aot"
"""The platform of each model in answers to clients."""
_TRIALS = 6
"""The number of random inputs of the smallest bucket to compare, two at a time, if some are integers.

These are drawn as 0 or 1, so two rows may be equal. Two floats are not, so two inputs are enough.
"""
_MOST_LINES = 4
"""Lines of the model that a reason names."""


class Model:
    """A function, or a variant of one, that a server offers.

    name: of the function; of a variant FUNCTION-VARIANT; with an adapter, that follows a dot. version: of the bundle.
    digest: of the bundle with the weights that this model has; "": it is not known.
    usage: how the function is called. interface: its tensors. buckets: the sizes that there are executables for.
    rows: the dimension along which requests are gathered; "" if they are not, and then `alone` has the reason.
    trust: why they may be: "proven" on the StableHLO (`rows.py`), or "declared" in the manifest; else "".
    states: the arrays that it keeps between the calls of a sequence, by name.
    target, kind: the running code: an "executable" for a target, or code "compiled" here.
    largest: the number of rows of the largest bucket; 1 if requests are not gathered.
    """

    def __init__(self, function: Function, version: str, rows: str = "", policy: Policy = "executable_only") -> None:
        """Load every bucket, and find out whether requests may be gathered.

        They may where it is proven that each row of a result depends on its own row alone, or the manifest declares it.
        Then results of rows beside others are also compared with results of the same rows alone.
        rows: the dimension along which requests may be gathered; "": none is.
        Raises RequestError ("unsupported") for a function that cannot be served, LoadError, CallError.
        """
        self.name, self.version, self.digest = function.name, version, ""
        self._function, self.usage = function, function.usage
        self.interface = interface_of(self.usage)
        candidates = [each for each in function.select().candidates if each.offer.kind == "executable"]
        usable = [each.offer for each in candidates if each.code == CHOSEN or policy not in NO_COMPILE]
        offers = {naming.bucket(offer.bucket): offer for offer in usable}
        self.buckets: list[Mapping[str, int]] = sorted(
            (offer.bucket for offer in offers.values()),
            key=lambda bucket: (math.prod(bucket.values()), naming.bucket(bucket)),
        )
        if not self.buckets:
            what = f"{self.name}: the bundle has no executable of it that this server can use"
            raise RequestError("unsupported", what)
        paths = [argument_path(path) for path in self.usage.in_tree.paths()]
        self._padding = Padding(function.padding, self.usage.in_avals, self.usage.out_avals, paths, self.buckets)
        self.states = self.usage.states
        self._leaves: list[Any] = [function.weights.get(path, OMITTED) for path in paths]
        for leaf in {leaf for state in self.states.values() for leaf in state.taken}:
            if self._leaves[leaf] is OMITTED:
                self._leaves[leaf] = zeros(self.usage.in_avals[leaf])
        # For each bucket: a call that looks nothing up: 70 to 90 us, where a call of the function took 110 to 300.
        self._flat: dict[str, Flat] = {}
        self._seconds: dict[str, float] = {}
        # A method would hold this model, and so its weights, until the next garbage collection.
        sizes = [leaf if leaf is OMITTED else np.broadcast_to(np.zeros(()), leaf.shape) for leaf in self._leaves]
        padding, inputs = self._padding, self.interface.inputs

        @functools.lru_cache(512)
        def fits(shapes: Sequence[tuple[int, ...]]) -> Fit | None:
            given = [*sizes]
            for tensor, shape in zip(inputs, shapes, strict=True):
                given[tensor.leaf] = np.broadcast_to(np.zeros((), tensor.dtype), shape)  # takes no memory
            return padding.fit(given)

        self._fits = fits
        if self.states:
            self.alone = f"it keeps state: {', '.join(self.states)}"
        else:
            self.alone = self._why_not_declared(rows) if rows else "no dimension is named to gather along"
        self._with_each_bucket(lambda bucket: self._loaded(self._random(bucket, 0), self._begun()))
        # Only now is it known what runs: what an older jaxlib made may fail in a child process, and another follows.
        running = {offer.shapes: _chosen(function, offer.shapes) for offer in offers.values()}
        self.kind = "executable" if all(offer.kind == "executable" for offer in running.values()) else "compiled"
        self.target = ", ".join(sorted({offer.target for offer in running.values()} - {""}))
        self.trust = "declared" if self.usage.serve.get("rows") else "proven"
        if not self.alone and self.trust == "proven":
            self.alone = self._why_not_proven(rows, running, [each.offer for each in candidates])
        self.alone = self._warm("" if self.alone else rows) or self.alone
        self.rows = "" if self.alone else rows
        self.trust = self.trust if self.rows else ""
        self.largest = max(1, *(bucket[self.rows] for bucket in self.buckets)) if self.rows else 1

    def of(self, bundle: Bundle, name: str = "", warm: bool = True) -> Model:
        """Return the same function of a bundle with other weights, after a call with each bucket.

        Whether rows are independent is known: the executables are the same. name: its own; "": the same one.
        warm: False: the first request maps the weights. Raises LoadError, CallError.
        """
        model = copy.copy(self)
        model.name, model.digest = name or self.name, bundle.digest
        model._function = trials.find(bundle, self._function.name)
        weights = iter(model._function.weights.values())
        model._leaves = [next(weights) if isinstance(leaf, Weight) else leaf for leaf in self._leaves]
        model._flat, model._seconds = {}, {}  # the next call maps weights, and takes longer than the last one
        for bucket in self.buckets if warm else ():
            model._call(self._random(bucket, 0), model._begun())
        return model

    def avals(self, state: str) -> list[Aval]:
        """Return the avals of the arrays of a state."""
        kept = self.states[state]
        return [self.usage.in_avals[i] for i in kept.taken] or [self.usage.out_avals[i] for i in kept.given]

    def initial(self, state: str) -> Sequence[Any]:
        """Return the initial value of a state: weights that the manifest binds, or zeros."""
        return [self._leaves[leaf] for leaf in self.states[state].taken]

    def _begun(self) -> dict[str, Sequence[Any]]:
        return {name: self.initial(name) for name in self.states}

    def metadata(self) -> dict[str, Any]:
        """Return the protocol's metadata of a model."""
        return {
            "name": self.name,
            "versions": [self.version],
            "platform": PLATFORM,
            "inputs": [tensor.metadata() for tensor in self.interface.inputs],
            "outputs": [tensor.metadata() for tensor in self.interface.outputs],
        }

    def config(self, delay: float, idle: float) -> dict[str, Any]:
        """Return Triton's ModelConfig: sizes are without the rows that are gathered.

        delay: seconds that requests wait. idle: seconds before a sequence ends.
        """
        told: dict[str, Any] = {"name": self.name, "platform": PLATFORM}
        told["max_batch_size"] = self.largest if self.rows else 0
        for side, tensors in zip(("input", "output"), self.interface, strict=True):
            shapes = [tensor.metadata()["shape"][bool(self.rows) :] for tensor in tensors]
            told[side] = [
                {"name": tensor.name, "data_type": f"TYPE_{tensor.datatype}", "dims": dims}
                for tensor, dims in zip(tensors, shapes, strict=True)
            ]
        if self.rows:
            sizes = sorted({bucket[self.rows] for bucket in self.buckets})
            waits = {"max_queue_delay_microseconds": round(delay * 10**6)}
            told["dynamic_batching"] = {"preferred_batch_size": sizes, **waits}
        if self.states:
            told["sequence_batching"] = {"max_sequence_idle_microseconds": round(idle * 10**6)}
        return told

    def fit(self, arrays: Arrays) -> Fit:
        """Return how arrays go into the smallest bucket. Raises RequestError ("request") if none holds them."""
        fit = self._fits(tuple(array.shape for array in arrays))
        if fit is not None:
            return fit
        given = ", ".join(
            f"{tensor.name} is {Aval(tensor.aval.dtype, array.shape)}"
            for tensor, array in zip(self.interface.inputs, arrays, strict=True)
        )
        buckets = "; ".join(filter(None, map(naming.bucket, self.buckets)))
        padded = ", ".join(self._padding.declared)
        more = f"; smaller sizes of {padded} are padded" if padded else ""
        raise RequestError("request", f"{self.name}: no bucket has these sizes: {given} (buckets: {buckets}{more})")

    def parts(self, arrays: Arrays) -> list[Arrays]:
        """Return arrays in parts of at most `largest` rows; one part if they are not gathered."""
        count = self.count(arrays)
        if not self.rows or count <= self.largest:
            return [arrays]
        return [[array[i : i + self.largest] for array in arrays] for i in range(0, count, self.largest)]

    def count(self, arrays: Arrays) -> int:
        """Return the number of rows of arrays; 1 if requests are not gathered."""
        return arrays[0].shape[0] if self.rows else 1

    def run(self, requests: Sequence[Arrays], kept: dict[str, Sequence[Any]] | None = None) -> tuple[str, list[Arrays]]:
        """Run requests, several as one call; return the name of the bucket, and the results of each.

        requests: checked by `fit`, each and together. Of several, all sizes but the number of rows are equal.
        kept: for a function with state, its arrays by name; the call's results replace them.
        """
        together = requests[0]
        if len(requests) > 1:
            together = [np.concatenate(arrays) for arrays in zip(*requests, strict=True)]
        bucket, results = self._call(together, kept)
        if len(requests) == 1:
            return bucket, [results]
        ends = [0, *itertools.accumulate(map(self.count, requests))]
        return bucket, [[result[start:end] for result in results] for start, end in itertools.pairwise(ends)]

    def seconds(self, arrays: Arrays, rows: int) -> float:
        """Return about how long a call takes; inf: there was none. arrays: one of its requests. rows: of all."""
        fit = self._fits(tuple((rows, *array.shape[1:]) if self.rows else array.shape for array in arrays))
        return math.inf if fit is None else self._seconds.get(fit.name, math.inf)

    def _loaded(self, arrays: Arrays, kept: dict[str, Sequence[Any]] | None) -> tuple[Fit, Sequence[Any], Flat]:
        """Return how arrays go into a bucket, the leaves of the call, and the executable."""
        fit = self.fit(arrays)
        leaves = self._leaves.copy()
        for tensor, array in zip(self.interface.inputs, arrays, strict=True):
            leaves[tensor.leaf] = array
        for name, state in self.states.items():
            assert kept is not None
            for leaf, array in zip(state.taken, kept[name], strict=True) if state.taken else ():
                leaves[leaf] = array
        leaves = fit.fill(leaves)
        flat = self._flat.get(fit.name)
        if flat is None:
            args, kwargs = cast("tuple[Any, Any]", self.usage.in_tree.unflatten(leaves))
            flat = self._flat[fit.name] = self._function.flat(*args, **kwargs)
        return fit, leaves, flat

    def _call(self, arrays: Arrays, kept: dict[str, Sequence[Any]] | None = None) -> tuple[str, Arrays]:
        began = time.perf_counter()
        fit, leaves, flat = self._loaded(arrays, kept)
        outputs = flat(*leaves)
        if kept is not None:
            kept.update({state: [outputs[leaf] for leaf in s.given] for state, s in self.states.items() if s.given})
        numbers = [tensor.leaf for tensor in self.interface.outputs]
        read = dict(zip(numbers, to_numpy([outputs[i] for i in numbers]), strict=True))
        cut = fit.cut([read.get(i, output) for i, output in enumerate(outputs)])
        results = [cut[i] for i in numbers]
        took = time.perf_counter() - began
        # One call that waits for a core says little: a few of them do.
        self._seconds[fit.name] = min(took, 1.5 * self._seconds.get(fit.name, math.inf))
        return fit.name, results

    def _random(self, bucket: Mapping[str, int], seed: int) -> Arrays:
        """Return inputs of the sizes of a bucket, the same for the same seed."""
        avals = [Aval(tensor.aval.dtype, evaluate_shape(tensor.aval.shape, bucket)) for tensor in self.interface.inputs]
        return random_arrays(avals, seed)

    def _why_not_declared(self, rows: str) -> str:
        """Return why the manifest does not let requests be gathered along a dimension; "" if it does."""
        if rows not in self._padding.declared:
            return f"the manifest declares no padding of {rows}"
        for tensor in (*self.interface.inputs, *self.interface.outputs):
            uses = [dim for dim in tensor.aval.shape if isinstance(dim, str) and rows in names_in(dim)]
            if uses != [rows] or tensor.aval.shape[0] != rows:
                return f"{tensor.name} is {tensor.aval}, and its rows are not those of {rows}"
        if not self.interface.inputs or not self.interface.outputs:
            return "it has no inputs, or no outputs"
        mask = self._padding.declared[rows]["mask"]
        if any(dim == rows and not self.usage.in_avals[leaf].shape for leaf, dim in self._padding.mask_leaves.items()):
            return f"{mask} is the number of rows, which other requests change"
        return ""

    def _why_not_proven(self, rows: str, running: Mapping[Shapes, Offer], executables: Sequence[Offer]) -> str:
        """Return why it is not proven that rows are independent; "" if it is.

        running: what runs for the shapes of each bucket. executables: all of the bundle.
        """
        modules: list[Offer] = []
        variant, _ = self._function.chosen({})
        for shapes, offer in running.items():
            if offer.kind == "executable":
                modules.append(offer)
                continue
            # The bundle has no module of what is compiled here: those of all executables for the platform stand for it.
            platform = variant.platform_of(offer)
            others = [each for each in executables if each.shapes == shapes and platform in each.platforms]
            if not others:
                what = f"it is compiled here, and the bundle has no StableHLO of it for {platform}"
                return f"no proof that its rows are independent: {what}"
            modules += others
        of_inputs = [aval.shape.index(rows) if rows in aval.shape else None for aval in self.usage.in_avals]
        for offer in modules:
            if offer.bucket[rows] == 1:  # a row is alone, and not padded
                continue
            module, parameters = variant.module(offer)
            inputs = {number: dim for number, leaf in enumerate(parameters) if (dim := of_inputs[leaf]) is not None}
            outputs = {tensor.leaf: 0 for tensor in self.interface.outputs}
            try:
                ending = why_dependent(module, offer.bucket[rows], inputs, outputs)
            except ValueError as error:
                return f"no proof that its rows are independent: {error}"
            if ending:
                what = f"no proof that its rows are independent: {ending}{_place(variant.debug, ending.operation)}"
                return f'{what}; if they are, the manifest may say serve.rows = "independent"'
        return ""

    def _with_each_bucket(self, work: Callable[[Mapping[str, int]], Result]) -> list[Result]:
        """Return the results of work with each bucket: several at a time, the largest first, as they take longest."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "stagec-warm") as pool:
            return [*pool.map(work, reversed(self.buckets))][::-1]

    def _warm(self, rows: str) -> str:
        """Call every bucket; return why requests are not gathered along a dimension, "" if they can be.

        rows: the dimension; "": nobody asks. XLA prepares much of an executable in its first call, on one core.
        """
        return next(filter(None, self._with_each_bucket(functools.partial(self._why_dependent, rows))), "")

    def _why_dependent(self, rows: str, bucket: Mapping[str, int]) -> str:
        """Call a bucket; return why requests are not gathered in it along a dimension, "" if they can be.

        This is a second look, beside the proof or the declaration: how an executable rounds may depend on the place of
        a row, and a declaration may be wrong. Other rows around a row, padding, or another place of it must not change
        one bit of its result. A row is the last one of a full call, and the first one, and the last before padding, of
        a call with as few rows as get this bucket. The smallest bucket is asked more often, as it takes the least time,
        and what a function does to rows is the same in all: also with other rows that are equal to the row, huge, NaN,
        and zero, because rare dependence (a capacity, a scale, a check for NaN) does not show between random rows.
        """
        size = bucket[rows] if rows else 1
        if size == 1:
            self._call(self._random(bucket, 0), self._begun())
            return ""
        sizes = [b[rows] for b in self.buckets if {**b, rows: 0} == {**bucket, rows: 0}]
        count = 1 + max((other for other in sizes if other < size), default=0)
        places = {0, count - 1} if count < size else {0}
        has_integers = any(tensor.dtype.kind in "biu" for tensor in self.interface.inputs)
        is_smallest = size == min(b[rows] for b in self.buckets if b[rows] > 1)
        for seed in range(0, _TRIALS if has_integers and is_smallest else 2, 2):
            full, few = self._random(bucket, seed), self._random({**bucket, rows: count}, seed + 1)
            for place in places:
                for array, values in zip(few, full, strict=True):
                    array[place] = values[-1]
            _, of_full = self._call(full)
            wanted = [result[-1].tobytes() for result in of_full]
            compared = [(few, places), *((other, {size - 1}) for other in _unusual(full) if is_smallest)]
            for arrays, where in compared:
                _, results = self._call(arrays)
                for tensor, result, bits in zip(self.interface.outputs, results, wanted, strict=True):
                    if any(result[place].tobytes() != bits for place in where):
                        what = "a row's result depends on its place, on other rows, or on padding"
                        return f"{tensor.name}: {what} (bucket {naming.bucket(bucket)})"
        return ""


def _place(debug: Path | None, operation: str) -> str:
    """Return where the model has an operation, such as `stablehlo.sort`: " (in model.py:7)"; "" if it is not known."""
    try:
        operations = locations.find(debug, operation) if debug else []
    except (OSError, ValueError):
        operations = []
    opcode = operation.rpartition(".")[2]
    of = (each.frames[0] for each in operations if each.opcode == opcode and each.frames)
    lines = list(dict.fromkeys(f"{frame.file}:{frame.line}" for frame in of))
    shown = ", ".join(lines[:_MOST_LINES]) + (" and others" if len(lines) > _MOST_LINES else "")
    return f" (in {shown})" if shown else ""


def _chosen(function: Function, shapes: Shapes) -> Offer:
    """Return what runs for shapes, of all leaves."""
    chosen = function.select(shapes).chosen
    assert chosen is not None
    return chosen.offer


def _unusual(arrays: Arrays) -> Iterator[Arrays]:
    """Yield arrays with the same last rows, and other rows that are equal to these, zero, huge, and NaN."""
    for value in (lambda array: array[-1], lambda _: 0, _huge, lambda array: np.nan if _is_float(array) else 1):
        changed = [array.copy() for array in arrays]
        for array in changed:
            array[:-1] = value(array)
        yield changed


def _huge(array: NDArray[Any]) -> Any:
    if not _is_float(array):
        return 1 if array.dtype.kind == "b" else min(np.iinfo(array.dtype).max, 2**15)
    return 6e4 if array.dtype == np.float16 else 3e38


def _is_float(array: NDArray[Any]) -> bool:
    return array.dtype.kind not in "biu"  # bfloat16 is of the kind V
