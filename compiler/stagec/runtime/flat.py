"""Flat calls: a function bound to one executable, from the leaves of its arguments to those of its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stagec.avals import Aval
from stagec.runtime.arrays import Array
from stagec.runtime.refusal import CallError
from stagec.runtime.selection import Shapes
from stagec.runtime.signature import Signature


class Flat:
    """What `Function.flat` returns: call it with the leaves of `(args, kwargs)`, in the order of `paths`.

    Leaves are numpy arrays, or device arrays; results are device arrays, in a list, whatever the leaves are. Nothing is
    looked up: there is one executable, and its containers, buckets and devices are known. What XLA does not check is:
    number, dtype and shape of the leaves, and whether one was donated. A call raises CallError ("structure", "dtype",
    "shape", "deleted", "closed").

    paths: where each leaf has its place in the arguments, as `args[0]['w']`.
    """

    def __init__(self, signature: Signature, shapes: Shapes, run: Callable[[Sequence[Any]], list[Array]]) -> None:
        """See `Function.flat`. shapes: of the leaves. run: calls the signature's executable with checked leaves."""
        self.paths = tuple(signature.paths)
        self._signature = signature
        self._shapes = list(shapes)
        self._run = run

    def __call__(self, *leaves: Any) -> list[Array]:
        """Run the executable."""
        if len(leaves) != len(self._shapes):
            what = f"{self._signature.name}: {len(leaves)} arrays are given, {len(self._shapes)} are wanted"
            raise CallError("structure", what)
        arrays = self._signature.check_dtypes(leaves)
        if [array.shape for array in arrays] != self._shapes:
            raise self._refusal(arrays)
        return self._run(arrays)

    def _refusal(self, arrays: Sequence[Any]) -> CallError:
        triples = zip(self.paths, arrays, self._signature.description.in_avals, strict=True)
        faults = [f"{p} is {Aval(a.dtype, x.shape)}, {a} is wanted" for p, x, a in triples if x.shape != a.shape]
        return CallError("shape", f"{self._signature.name}: {'; '.join(faults)}")

    def __repr__(self) -> str:
        return f"Flat({self._signature.name}: {', '.join(map(str, self._signature.description.in_avals))})"
