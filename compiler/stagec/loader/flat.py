"""Flat calls: a function bound to one executable, from the leaves of its arguments to those of its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stagec.core.messages.refusal import CallError, RunError
from stagec.core.sizes.avals import Aval
from stagec.loader.loaded import Loaded
from stagec.loader.selection import Shapes
from stagec.pjrt.arrays import DeviceArray
from stagec.pjrt.calling_convention import Signature
from stagec.pjrt.prepared import MOST_KINDS, Kinds, Prepared, kinds_of


class Flat:
    """The result of `Function.flat`: call it with the leaves of `(args, kwargs)`, in the order of `paths`.

    Leaves are numpy arrays, or device arrays; results are always device arrays, in a list. A call looks nothing up:
    there is one executable, with known containers, bucket and devices. A call checks what XLA does not: number, dtype
    and shape of the leaves, and whether one was donated. A call raises CallError ("structure", "dtype", "shape",
    "deleted", "closed"), RunError.

    paths: where each leaf is in the arguments, such as `args[0]['w']`.
    """

    def __init__(
        self,
        signature: Signature,
        shapes: Shapes,
        donate: bool,
        loaded: Loaded,
        failed: Callable[[Exception, Signature], RunError],
    ) -> None:
        """See `Function.flat`. shapes: of the leaves. loaded: the bundle. failed: translates errors of XLA."""
        self.paths = tuple(signature.paths)
        self._signature = signature
        self._shapes = list(shapes)
        self._donate = donate
        self._loaded = loaded
        self._failed = failed
        self._prepared: dict[Kinds, Prepared] = {}

    def __call__(self, *leaves: Any) -> list[DeviceArray]:
        """Run the executable."""
        if self._loaded.archive is None:
            raise CallError("closed", f"{self._signature.name}: the bundle was closed")
        kinds = kinds_of(leaves)
        prepared = self._prepared.get(kinds)
        try:
            if prepared is not None and (buffers := prepared.buffers(leaves)) is not None:
                return list(map(DeviceArray, buffers, prepared.results))
            return self._checked(leaves, kinds)
        except RuntimeError as error:  # XLA's own
            raise self._failed(error, self._signature) from error

    def _checked(self, leaves: Sequence[Any], kinds: Kinds) -> list[DeviceArray]:
        """Run the executable on leaves of kinds that no earlier call had."""
        if len(leaves) != len(self._shapes):
            what = f"{self._signature.name}: {len(leaves)} arrays are given; expected {len(self._shapes)}"
            raise CallError("structure", what)
        arrays = self._signature.check_dtypes(leaves)
        if [array.shape for array in arrays] != self._shapes:
            raise self._refusal(arrays)
        outputs = self._signature.call_on_device(arrays, self._donate)
        prepared = self._signature.prepare(kinds, self._donate)
        if prepared is not None and len(self._prepared) < MOST_KINDS:
            self._prepared[kinds] = prepared
        return outputs

    def _refusal(self, arrays: Sequence[Any]) -> CallError:
        wrong = [i for i, array in enumerate(arrays) if array.shape != self._shapes[i]]
        avals, path = self._signature.description.in_avals, self._signature.path
        faults = [f"{path(i)} is {Aval(avals[i].dtype, arrays[i].shape)}; expected {avals[i]}" for i in wrong]
        return CallError("shape", f"{self._signature.name}: {'; '.join(faults)}")

    def __repr__(self) -> str:
        return f"Flat({self._signature.name}: {', '.join(map(str, self._signature.description.in_avals))})"
