"""The tensors of a function, as the Open Inference Protocol describes them: names, datatypes and shapes.

A function takes and returns pytrees; the protocol knows lists of named tensors. Each leaf is one tensor, whose name is
the leaf's path, `x`, `batch['image']`, `result['probs']`, or one that the manifest gives. Bound weights, masks and
state are not inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagec.core.messages.calls import Call
from stagec.core.sizes.avals import Aval, physical
from stagec.pjrt.arrays import dtype_of
from stagec_serve.refusal import RequestError

DATATYPES: Mapping[str, str] = {
    "bool": "BOOL",
    **{f"u{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
    **{f"i{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    "bf16": "BF16",
    **{f"f{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}
"""The protocol's name of each dtype that it has. It has none for fp8, int4 and complex numbers."""
_LARGEST = 2**31 - 1
"""The largest size of a dimension in a request, so that products of sizes are small numbers for NumPy."""


class Tensor(NamedTuple):
    """An input or an output.

    name: of the leaf. leaf: its number among all leaves of the arguments, or of the result.
    aval: of the executable; for a PRNG key its words. datatype: the protocol's name of its dtype. dtype: NumPy's.
    """

    name: str
    leaf: int
    aval: Aval
    datatype: str
    dtype: np.dtype[Any]

    def metadata(self) -> dict[str, Any]:
        """Return the protocol's metadata: -1 is a size that varies."""
        shape = [dim if isinstance(dim, int) else -1 for dim in self.aval.shape]
        return {"name": self.name, "datatype": self.datatype, "shape": shape}

    def checked_shape(self, shape: object, datatype: object) -> tuple[int, ...]:
        """Return the client's shape, if rank, datatype and fixed sizes are those of the tensor.

        Raises RequestError ("request"). Which sizes the others may have, `Model.fit` decides.
        """
        if datatype != self.datatype:
            raise self._wrong(f"datatype is {_shown(datatype)}; expected {self.datatype}")
        if not isinstance(shape, list) or not {*map(type, shape)} <= {int}:
            raise self._wrong(f"shape is {_shown(shape)}; expected a list of whole numbers")
        own = self.aval.shape
        wrong = [dim for dim, size in zip(own, shape, strict=False) if size != dim and not isinstance(dim, str)]
        if wrong or len(shape) != len(own) or (shape and not 0 <= min(shape) <= max(shape) <= _LARGEST):
            raise self._wrong(f"shape is {_shown(shape)}; expected {self.aval}")
        return tuple(shape)

    def from_bytes(self, data: memoryview, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the array with the elements `data`, little-endian and in row-major order.

        Raises RequestError ("request") if the number of bytes does not fit the shape, or a BOOL is not 0 or 1.
        """
        count = math.prod(shape) * self.dtype.itemsize
        if len(data) != count:
            raise self._wrong(f"{len(data):,} bytes; shape {list(shape)} takes {count:,}")
        if self.dtype == np.bool_ and np.frombuffer(data, np.uint8).max(initial=0) > 1:
            raise self._wrong("a BOOL is a byte of 0 or 1")
        values = np.frombuffer(data, self.dtype)
        return self._shaped(values if values.flags.aligned else values.copy(), shape)

    def from_numbers(self, data: object, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the array with the numbers of a JSON list as elements, flat in row-major order or nested.

        Raises RequestError ("request") for another number of elements, one of another kind, or one that the dtype
        cannot hold.
        """
        if not isinstance(data, list):
            raise self._wrong(f"data is {_shown(data)}; expected a list")
        flat: list[Any] = data
        for size in shape if data and isinstance(data[0], list) else ():
            flat = [data] if flat is data else flat
            if not all(isinstance(row, list) and len(row) == size for row in flat):
                raise self._wrong(f"data is not nested as shape {list(shape)} says")
            flat = [value for row in flat for value in row]
        self._check_count(len(flat), shape)
        kind, types = self.dtype.kind, {*map(type, flat)}
        allowed = {bool} if kind == "b" else {int} if kind in "iu" else {int, float}
        if kind in "iu" and float in types:  # how -0 is read
            flat = [0 if value == 0 and type(value) is float else value for value in flat]
            types = {*map(type, flat)}
        if not types <= allowed:
            names = ", ".join(sorted(wrong.__name__ for wrong in types - allowed))
            raise self._wrong(f"data has {names}; expected values of {self.datatype}")
        try:
            with np.errstate(over="ignore"):  # the infinity says it
                values = np.array(flat, self.dtype if kind in "biu" else np.float64).astype(self.dtype)
        except OverflowError as error:
            raise self._wrong(str(error)) from None
        if kind not in "biu" and not np.isfinite(values.astype(np.float64)).all():
            raise self._wrong(f"data has a number that is too large for {self.datatype}")
        return self._shaped(values, shape)

    def from_values(self, values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the array whose elements, in row-major order, are numbers of a wider dtype or of its own.

        Raises RequestError ("request") for another number of elements, or an integer that the dtype cannot hold.
        """
        self._check_count(len(values), shape)
        converted = values.astype(self.dtype)
        if self.dtype.kind in "iu" and (converted != values).any():
            raise self._wrong(f"data has a number that {self.datatype} cannot hold")
        return self._shaped(converted, shape)

    def _check_count(self, count: int, shape: tuple[int, ...]) -> None:
        if count != math.prod(shape):
            what = f"data does not have the {math.prod(shape):,} values that shape {list(shape)} needs"
            raise self._wrong(what)

    def _shaped(self, values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        try:
            return values.reshape(shape)
        except ValueError:  # an empty array with sizes whose product is none of NumPy's numbers
            raise self._wrong(f"shape {list(shape)} is too large") from None

    def _wrong(self, what: str) -> RequestError:
        return RequestError("request", f"{self.name}: {what}")


class Interface(NamedTuple):
    """The inputs and outputs of a function, in the order of leaves."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def interface_of(usage: Call) -> Interface:
    """Return the tensors of a function, with the names that its manifest gives.

    Raises RequestError ("unsupported") for a dtype that the protocol lacks.
    """
    states = usage.states.values()
    sides = (
        ("inputs", usage.input_paths, usage.in_avals, {leaf for state in states for leaf in state.taken}),
        ("outputs", dict(enumerate(usage.output_paths)), usage.out_avals, {leaf for s in states for leaf in s.given}),
    )
    tensors = []
    for key, paths, avals, kept in sides:
        names = usage.serve.get(key, {})
        shown = {leaf: path for leaf, path in paths.items() if leaf not in kept}
        tensors.append(tuple(_tensor(leaf, names.get(path, path), avals[leaf]) for leaf, path in shown.items()))
    return Interface(*tensors)


def _tensor(leaf: int, name: str, aval: Aval) -> Tensor:
    stored = physical(aval)
    if stored.dtype not in DATATYPES:
        raise RequestError("unsupported", f"{name} is {aval}, and the Open Inference Protocol has no such datatype")
    return Tensor(name, leaf, stored, DATATYPES[stored.dtype], dtype_of(stored))


def _shown(value: object) -> str:
    written = repr(value)
    return written if len(written) <= 60 else f"{written[:57]}..."
