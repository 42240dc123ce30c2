"""Golden inputs and outputs: whether the executables of a bundle give what JAX gave when it was built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagec.bundle.archive import Archive
from stagec.bundle.external import Files
from stagec.core import naming
from stagec.core.avals import parse_aval
from stagec.core.refusal import LoadError
from stagec.loader import trials
from stagec.loader.bundle import Bundle
from stagec.pjrt.arrays import dtype_of


@dataclass(frozen=True)
class Check:
    """One result of an executable, compared.

    function: name of the signature. target, bucket: of the executable. path: `result['y']`.
    absolute, relative: the largest errors; infinite where dtype, shape, NaN or infinities differ.
    atol, rtol: allowed. ok: whether each element is within atol + rtol * its magnitude.
    """

    function: str
    target: str
    bucket: dict[str, int]
    path: str
    absolute: float
    relative: float
    atol: float
    rtol: float
    ok: bool

    def as_text(self) -> str:
        """Return one line for a person."""
        errors = f"largest error {self.absolute:.3g}, relative {self.relative:.3g}"
        allowed = f"allowed {self.atol:.3g} + {self.rtol:.3g} * |value|"
        what = filter(None, (f"{self.function} for {self.target}", naming.bucket(self.bucket)))
        place = f"{', '.join(what)}: {self.path}"
        return f"{'ok    ' if self.ok else 'FAILED'}  {place}: {errors}; {allowed}"


def check(archive: Archive, function: str | None = None, weights: str | None = None) -> Iterator[Check]:
    """Run the executables for CPUs that this machine can run, and compare each result of those with golden inputs.

    function: name of one signature; None: all that have some. weights: the folder with the files of weights beside
    the bundle; None: the bundle's. Raises CallError and LoadError as calls do.
    """
    files = Files(archive.path, archive.index, weights, "use")
    index = archive.index
    for target, entry in index["targets"].items():
        if entry["platform"] != "cpu":
            continue
        try:
            bundle = Bundle(archive, target, policy="executable_only", files=files)
        except LoadError as error:
            if error.code in ("cpu-feature", "device-kind"):
                continue
            raise
        for name, signature in index["functions"].items():
            golden = signature.get("golden")
            built = [e for e in signature["executables"] if e["target"] == target]
            if golden and function in (None, name) and golden["bucket"] in [e["bucket"] for e in built]:
                yield from _check(bundle, archive, target, name, golden)


def _check(bundle: Bundle, archive: Archive, target: str, name: str, golden: dict[str, Any]) -> Iterator[Check]:
    inputs = {path: _array(archive, row) for path, row in golden["inputs"].items()}
    results, _ = trials.call(trials.find(bundle, name), inputs)
    for path, row in golden["outputs"].items():
        absolute, relative, ok = errors(results.get(path), _array(archive, row), row["rtol"], row["atol"])
        yield Check(name, target, golden["bucket"], path, absolute, relative, row["atol"], row["rtol"], ok)


def _array(archive: Archive, row: dict[str, Any]) -> NDArray[Any]:
    aval = parse_aval(row["aval"])
    values: NDArray[Any] = np.frombuffer(archive[row["member"]], dtype_of(aval))
    return values.reshape(tuple(map(int, aval.shape)))


def errors(given: NDArray[Any] | None, wanted: NDArray[Any], rtol: float, atol: float) -> tuple[float, float, bool]:
    """Return the largest absolute and relative error, and whether all elements are within the tolerance."""
    if given is None or given.dtype != wanted.dtype or given.shape != wanted.shape:
        return float("inf"), float("inf"), False
    kind = np.complex128 if wanted.dtype.kind == "c" else np.float64
    first, second = given.astype(kind).ravel(), wanted.astype(kind).ravel()
    finite = np.isfinite(second)
    same = np.array_equal(first[~finite], second[~finite], equal_nan=True) and bool(np.isfinite(first[finite]).all())
    if not same:
        return float("inf"), float("inf"), False
    error, size = np.abs(first[finite] - second[finite]), np.abs(second[finite])
    if rtol == atol == 0:  # 64-bit integers have more digits than a float
        return (
            float(error.max(initial=0)),
            0.0,
            given.tobytes() == wanted.tobytes(),
        )
    relative = error / np.maximum(size, np.finfo(np.float64).tiny)
    return float(error.max(initial=0)), float(relative.max(initial=0)), bool((error <= atol + rtol * size).all())
