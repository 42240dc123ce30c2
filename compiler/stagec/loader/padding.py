"""Padding: how a call of another size runs in the next larger bucket, if the manifest declares it.

A result may depend on all elements of an axis, and only the author of a function knows. So nothing is padded without a
declaration, and each dimension has its own.

Arguments are padded along the declared dimensions, results are cut back to the given size, and the manifest can name a
mask argument: it shows the function which elements are real.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagec.core.builds import naming
from stagec.core.sizes.avals import Aval, evaluate_shape
from stagec.core.sizes.size import DimensionError, solve
from stagec.pjrt.calling_convention import OMITTED

_Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Fit:
    """How the arguments of one size go into a bucket.

    sizes: those given; bucket: the padded sizes. shapes: those of the padded arguments, flat.
    """

    sizes: Mapping[str, int]
    bucket: Mapping[str, int]
    shapes: tuple[tuple[int, ...], ...]
    _fills: tuple[Any, ...]
    _masks: Mapping[int, Any]
    _cuts: tuple[_Slices | None, ...]

    @functools.cached_property
    def name(self) -> str:
        """The bucket's name."""
        return naming.bucket(self.bucket)

    def fill(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the arguments padded, and those that the caller leaves out."""
        return [self._masks[i] if leaf is OMITTED else self._filled(i, leaf) for i, leaf in enumerate(leaves)]

    def _filled(self, i: int, leaf: Any) -> Any:
        shape = self.shapes[i]
        if leaf.shape == shape:
            return leaf
        values = np.asarray(leaf)
        filled = np.full(shape, self._fills[i], values.dtype)
        filled[tuple(slice(0, size) for size in values.shape)] = values
        return filled

    def cut(self, results: Sequence[Any]) -> list[Any]:
        """Return the results without the elements of the padding; a result that is cut becomes a numpy array."""
        pairs = zip(results, self._cuts, strict=True)
        return [result if index is None else np.asarray(result)[index] for result, index in pairs]


class Padding:
    """The manifest's padding of one function.

    declared: dimension -> {"fill": number, "mask": name of the keyword argument, or ""}.
    mask_leaves: the numbers of the arguments that are masks -> the dimension.
    in_avals, out_avals: symbolic. paths: of the arguments. buckets: those with executables.
    """

    def __init__(
        self,
        declared: Mapping[str, Mapping[str, Any]],
        in_avals: Sequence[Aval],
        out_avals: Sequence[Aval],
        paths: Sequence[str],
        buckets: Sequence[Mapping[str, int]],
    ) -> None:
        self.declared = declared
        self.masks = {table["mask"]: dim for dim, table in declared.items() if table["mask"]}
        self._in_avals, self._out_avals, self._buckets = in_avals, out_avals, buckets
        self.mask_leaves = {paths.index(f"kwargs['{name}']"): dim for name, dim in self.masks.items()}

    def fit(self, leaves: Sequence[Any]) -> Fit | None:
        """Return how these arguments go into the smallest bucket that holds them; None if they do not."""
        given: list[tuple[int | str, int]] = []
        for aval, leaf in zip(self._in_avals, leaves, strict=True):
            if leaf is OMITTED:
                continue
            # The words of a PRNG key are one dimension more than its aval has.
            shape = leaf.shape[: len(aval.shape)] if aval.dtype.startswith("key<") else leaf.shape
            if len(shape) != len(aval.shape):
                return None
            given += zip(aval.shape, shape, strict=True)
        try:
            sizes = solve(given)
        except DimensionError:
            return None
        fitting = [bucket for bucket in self._buckets if self._holds(bucket, sizes)]
        if not fitting:
            return None
        bucket = min(fitting, key=lambda bucket: (math.prod(bucket.values()), sorted(bucket.items())))
        return Fit(
            sizes,
            bucket,
            tuple(
                (*evaluate_shape(aval.shape, bucket), *(() if leaf is OMITTED else leaf.shape[len(aval.shape) :]))
                for aval, leaf in zip(self._in_avals, leaves, strict=True)
            ),
            tuple(map(self._fill_of, range(len(leaves)))),
            {i: self._mask(self._in_avals[i], dim, sizes, bucket) for i, dim in self.mask_leaves.items()},
            tuple(self._cut(aval, sizes, bucket) for aval in self._out_avals),
        )

    def _holds(self, bucket: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
        return all(size == sizes[dim] or (dim in self.declared and size > sizes[dim]) for dim, size in bucket.items())

    def _fill_of(self, i: int) -> Any:
        if i in self.mask_leaves:  # a mask of the caller's own: padding is not real
            return 0
        dims = (str(dim) for dim in self._in_avals[i].shape)
        return next((self.declared[dim]["fill"] for dim in dims if dim in self.declared), 0)

    @staticmethod
    def _mask(aval: Aval, dim: str, sizes: Mapping[str, int], bucket: Mapping[str, int]) -> Any:
        from stagec.pjrt.arrays import dtype_of

        if aval.shape:
            return np.arange(bucket[dim]) < sizes[dim]
        return np.array(sizes[dim], dtype_of(aval))

    @staticmethod
    def _cut(aval: Aval, sizes: Mapping[str, int], bucket: Mapping[str, int]) -> _Slices | None:
        shape = evaluate_shape(aval.shape, sizes)
        return None if shape == evaluate_shape(aval.shape, bucket) else tuple(slice(0, size) for size in shape)
