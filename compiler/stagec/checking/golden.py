"""Golden inputs and outputs: whether the executables of a bundle give what JAX gave when it was built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagec.bundle.archive import Archive
from stagec.bundle.external import Files
from stagec.checking import trials
from stagec.core.builds import naming
from stagec.core.sizes.avals import parse_aval
from stagec.core.sizes.tolerances import tolerances
from stagec.loader.bundle import Bundle
from stagec.loader.loaded import Settings
from stagec.pjrt import compatibility
from stagec.pjrt.arrays import dtype_of

_WORST = 3
"""How many elements of a result are listed."""
OTHER_MACHINE = ("platform", "architecture", "cpu-feature", "device-kind", "device-count")
"""Codes of refusals that say that a target is for another machine."""


@dataclass(frozen=True)
class Deviation:
    """An element of a result: its index, what the executable gave, and what JAX gave."""

    index: tuple[int, ...]
    given: str
    wanted: str

    def as_text(self) -> str:
        """Return it for a person."""
        return f"[{', '.join(map(str, self.index))}] is {self.given}; expected {self.wanted}"


@dataclass(frozen=True)
class Check:
    """The comparison of one result of an executable.

    function: name of the signature. target, bucket: of the executable. path: `result['y']`.
    absolute, relative: the largest errors; infinite where dtype, shape, NaN or infinities differ.
    atol, rtol: the tolerance. ok: whether each element is within atol + rtol * its magnitude.
    worst: the elements with the largest errors in proportion to the tolerance.
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
    worst: tuple[Deviation, ...] = ()

    def as_text(self) -> str:
        """Return one line for a person."""
        errors = f"largest error {self.absolute:.3g}, relative {self.relative:.3g}"
        allowed = f"allowed {self.atol:.3g} + {self.rtol:.3g} * |value|"
        what = filter(None, (f"{self.function} for {self.target}", naming.bucket(self.bucket)))
        where = f"{', '.join(what)}: {self.path}"
        lines = [f"{'ok    ' if self.ok else 'FAILED'}  {where}: {errors}; {allowed}"]
        if not self.ok:
            lines += [f"          {element.as_text()}" for element in self.worst]
        return "\n".join(lines)


@dataclass(frozen=True)
class Skipped:
    """A target whose executables this machine cannot run. functions: those with golden inputs. why: a sentence."""

    target: str
    functions: tuple[str, ...]
    why: str

    def as_text(self) -> str:
        """Return one line for a person."""
        return f"SKIPPED {', '.join(self.functions)} for {self.target}: {self.why}"


@dataclass(frozen=True)
class Refused:
    """An optimized program that CPUs cannot run. why: a sentence with the names of instructions."""

    function: str
    target: str
    why: str

    def as_text(self) -> str:
        """Return one line for a person."""
        return f"REFUSED {self.function} for {self.target}: {self.why}"


def check(
    archive: Archive, function: str | None = None, platform: str | None = None, weights: str | None = None
) -> Iterator[Check | Skipped]:
    """Run the executables with golden inputs that this machine can run, and compare each result.

    function: name of one signature; None: all with golden inputs. platform: of the targets; None: all. weights: the
    folder with the files of weights beside the bundle; None: the bundle's. Yields a `Skipped` for a target of another
    machine. In a bundle for several jaxlibs, only executables for the installed jaxlib count. Raises CallError and
    LoadError as calls do.
    """
    files = Files(archive.path, archive.index, weights, "use")
    index, here = archive.index, compatibility.version()
    made_with = {built["versions"]["jaxlib"] for f in index["functions"].values() for built in f["executables"]}
    # Where none is of this jaxlib, all are asked: then the refusal says so, and nothing is passed over.
    foreign = made_with - {here} if here in made_with else set()
    for target, entry in index["targets"].items():
        asked = {
            name: signature["golden"]
            for name, signature in index["functions"].items()
            if function in (None, name) and "golden" in signature
            for built in signature["executables"]
            if built["target"] == target and built["bucket"] == signature["golden"]["bucket"]
            if built["versions"]["jaxlib"] not in foreign
        }
        if not asked or platform not in (None, entry["platform"]):
            continue
        bundle = Bundle(archive, Settings(target, policy="executable_only", selected_only=False, files=files))
        skipped: dict[str, list[str]] = {}
        for name, golden in asked.items():
            selection = bundle.select(name)
            if selection.chosen:
                yield from _check(bundle, archive, target, name, golden)
                continue
            refused = [candidate for candidate in selection.candidates if candidate.offer.target == target]
            # A test that skips what this machine should run would always pass.
            if not all(candidate.code in OTHER_MACHINE for candidate in refused):
                raise selection.refusal(archive.path)
            for reason in dict.fromkeys(candidate.reason for candidate in refused):
                skipped.setdefault(reason, []).append(name)
        for reason, names in skipped.items():
            yield Skipped(target, tuple(names), reason)


def _check(bundle: Bundle, archive: Archive, target: str, name: str, golden: dict[str, Any]) -> Iterator[Check]:
    inputs = {path: array_of(archive, row) for path, row in golden["inputs"].items()}
    results, _ = trials.call(trials.find(bundle, name), inputs)
    platform = archive.index["targets"][target]["platform"]
    yield from compared(golden, results, archive, name, target, platform)


def compared(
    golden: dict[str, Any], results: trials.Arrays, archive: Archive, name: str, target: str, platform: str = ""
) -> Iterator[Check]:
    """Yield the comparison of each result. golden: the signature's, in the index. name: of the signature.

    platform: where the results are from, if the machine code of a device made them.
    """
    for path, row in golden["outputs"].items():
        given, wanted, (rtol, atol) = results.get(path), array_of(archive, row), tolerances(row, platform)
        absolute, relative, ok = errors(given, wanted, rtol, atol)
        worst = tuple(deviations(given, wanted, rtol, atol))
        yield Check(name, target, golden["bucket"], path, absolute, relative, atol, rtol, ok, worst)


def array_of(archive: Archive, row: dict[str, Any]) -> NDArray[Any]:
    """Return a golden array of a bundle, by its row in the index."""
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
    # NaN and infinities must stand where they stood: no tolerance says anything of them.
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


def deviations(given: NDArray[Any] | None, wanted: NDArray[Any], rtol: float, atol: float) -> Iterator[Deviation]:
    """Yield the elements with the largest errors in proportion to the tolerance; none if all are equal."""
    if given is None or given.dtype != wanted.dtype or given.shape != wanted.shape or not wanted.size:
        return
    if wanted.dtype.kind in "biu":  # 64-bit integers have more digits than a float
        over = np.where(given == wanted, 0.0, np.abs(given.astype(np.float64) - wanted.astype(np.float64)) + 1)
    else:
        kind = np.complex128 if wanted.dtype.kind == "c" else np.float64
        first, second = given.astype(kind), wanted.astype(kind)
        with np.errstate(invalid="ignore"):
            error, allowed = np.abs(first - second), atol + rtol * np.abs(second)
            over = error / np.maximum(allowed, np.finfo(np.float64).tiny)
        same = (first == second) | (np.isnan(first) & np.isnan(second))
        over = np.where(same, 0.0, np.where(np.isfinite(over), over, np.inf))
    flat = over.ravel()
    for number in np.argsort(-flat, kind="stable")[:_WORST]:
        if flat[number]:
            index = tuple(map(int, np.unravel_index(number, wanted.shape)))
            yield Deviation(index, str(given[index]), str(wanted[index]))
