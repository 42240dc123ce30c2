"""Executables that an older jaxlib made, for `policy="measured"`: which may run here, and a first call in a child."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stagec.bundle import crossings
from stagec.bundle.archive import Archive
from stagec.bundle.description import Description
from stagec.core.builds.platforms import GPUS, PLATFORMS
from stagec.core.data import child, gpu_executables, thunks
from stagec.core.messages.refusal import LoadError, Refusal
from stagec.core.sizes.avals import parse_aval, physical
from stagec.core.sizes.tolerances import tolerances
from stagec.core.trees.tree import argument_path
from stagec.loader.once import Once
from stagec.loader.selection import Offer
from stagec.pjrt import compatibility, packages
from stagec.pjrt.arrays import dtype_of
from stagec.pjrt.host import Host
from stagec.pjrt.making import random_arrays

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TRIED = Once()
"""What ran in a child, by the bundle's index, which has the golden outputs, and the kinds of operations, or the digest
of an executable: once in a process. What failed is not kept."""


class Crossings:
    """The executables of other jaxlibs in a bundle. What is said of one is said for as long as the bundle is loaded."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._index = ""  # the digest of the bundle's, once it is needed
        self._here = crossings.Jaxlib(host.jaxlib, compatibility.build_id())
        self._kinds: dict[str, frozenset[str]] = {}  # by member
        self._versions: dict[str, bytes] = {}  # of the runtime that an executable for a GPU needs, by member
        self._refusals: dict[tuple[str, str, float], str] = {}  # by member, jaxlib that made it, and tolerance

    def refusal(self, archive: Archive | None, name: str, offer: Offer) -> str:
        """Return why this jaxlib must not run an executable of another one; "" if it may. XLA does not load it.

        archive: of the bundle, None if that was closed. name: of the signature, as in the index. Executables for CPUs
        of pairs that nobody measured are not read. Of one for a GPU, XLA is asked first whether its runtime fits.
        """
        if archive is None:
            return "the bundle was closed"
        function = archive.index["functions"][name]
        asked = self._told_by_xla(archive, offer) if offer.platforms[0] in GPUS else ""
        return asked or self._refusal(archive, function, offer, crossings.within(function, offer.bucket))

    def _told_by_xla(self, archive: Archive, offer: Offer) -> str:
        from stagec.pjrt import abi  # most processes have no executable for a GPU

        plugin = PLATFORMS[offer.platforms[0]].plugin
        assert plugin is not None
        try:
            if offer.member not in self._versions:
                self._versions[offer.member] = gpu_executables.abi_version(bytes(archive[offer.member]))
        except (LoadError, ValueError) as error:
            return str(error)
        return abi.refusal(str(packages.library(plugin)), self._versions[offer.member])

    def _refusal(self, archive: Archive, function: Mapping[str, Any], offer: Offer, tolerance: float) -> str:
        which = offer.member, offer.versions["jaxlib"], tolerance
        if which not in self._refusals:
            kinds = functools.partial(self._kinds_of, archive, offer.member)
            pair = crossings.maker(function, offer.member), self._here
            where = self._host.architecture if offer.architecture else offer.device_kind
            flags = self._host.cpu_flags if offer.architecture else None
            self._refusals[which] = crossings.refusal(kinds, *pair, where, flags, tolerance)
        return self._refusals[which]

    def _kinds_of(self, archive: Archive, member: str) -> frozenset[str]:
        if member not in self._kinds:
            try:
                self._kinds[member] = thunks.kinds(bytes(archive[member]))
            except LoadError as error:
                raise ValueError(str(error)) from error
        return self._kinds[member]

    def passes(self, offer: Offer, description: Description, archive: Archive, function: Mapping[str, Any]) -> bool:
        """Return whether a child process runs an executable that `refusal` allows; if not, `refusal` says why now.

        The first one in this process of a bundle, a jaxlib and these kinds of operations is loaded and called, on the
        function's golden inputs if it has some for these sizes and no weights, else on random arrays. What it gives for
        golden inputs must be right, within the function's tolerances. One that may have other bits within these is
        called itself. function: its entry in the index.
        """
        made_with, tolerance = offer.versions["jaxlib"], crossings.within(function, offer.bucket)
        self._index = self._index or hashlib.sha256(archive.encoded_index).hexdigest()
        key: tuple[Any, ...] = self._index, made_with, self._kinds[offer.member]
        if self._refusal(archive, function, offer, 0.0):
            key = self._index, made_with, description.executable_sha256, description.artifact
        try:
            _TRIED.get(key, lambda: _try(bytes(archive[offer.member]), description, archive, function))
        except ValueError as error:  # of this executable alone: another with the same kinds has a call of its own
            self._refusals[offer.member, made_with, tolerance] = f"a first call in a child process failed: {error}"
            return False
        return True


def _try(code: bytes, description: Description, archive: Archive, function: Mapping[str, Any]) -> bool:
    """Call an executable in a child process; return True. Raises ValueError if that fails."""
    golden = function.get("golden")
    rows: dict[str, Any] = {}
    arrays: list[bytes] = []
    if golden and golden["bucket"] == description.bucket and not function["bind"]:
        for which in ("inputs", "outputs"):
            rows[which] = {path: [row["aval"], *tolerances(row)] for path, row in golden[which].items()}
            arrays += (bytes(archive[row["member"]]) for row in golden[which].values())
    data = [code, description.to_json().encode(), json.dumps(rows).encode(), *arrays]
    child.call(call, b"".join(data), [*map(len, data)])
    return True


def call(data: bytes, sizes: list[int]) -> None:
    """Load and call an executable in this process. Raises ValueError if that fails, or golden outputs are others.

    data: the executable, its description, rows of golden arrays ("inputs" and "outputs": by path the aval, rtol and
    atol; without any, it is called with random arrays), and these arrays. sizes: the bytes of each.
    """
    ends = np.cumsum(sizes).tolist()
    parts = iter([data[end - size : end] for end, size in zip(ends, sizes, strict=True)])
    code, description, rows = next(parts), Description.from_json(next(parts)), json.loads(next(parts))
    # A child has a limit of memory, and each thread takes some of its addresses. Devices wait for each other in theirs.
    os.environ["NPROC"] = str(description.nr_devices)
    given, wanted = (
        {path: (_array(next(parts), row[0]), *row[1:]) for path, row in rows.get(which, {}).items()}
        for which in ("inputs", "outputs")
    )
    names = [argument_path(path) for path in description.in_tree.paths()]
    leaves = [given[name][0] for name in names] if given else random_arrays(description.in_avals, 0)
    made = results(code, description, leaves)
    for path, (array, rtol, atol) in wanted.items():
        result = np.asarray(made.get(path))
        if (result.shape, result.dtype) != (array.shape, array.dtype) or not _equal(result, array, rtol, atol):
            raise ValueError(f"{path} is not the golden one")


def results(code: bytes, description: Description, leaves: Sequence[Any]) -> dict[str, NDArray[Any]]:
    """Load and call an executable for CPUs in this process; return its results by path. Raises ValueError if it fails.

    leaves: its arguments, flat.
    """
    from stagec.pjrt import clients
    from stagec.pjrt.calling_convention import Signature

    signature = Signature(description.artifact, description)
    try:
        devices = clients.devices("cpu", description.nr_devices)
        signature.load(code, tuple(description.custom_calls), devices, description.memory_kinds)
        made = list(map(np.asarray, signature.call(leaves)))
    except (Refusal, RuntimeError) as error:
        raise ValueError(str(error)) from error
    return dict(zip((f"result{path}" for path in description.out_tree.paths()), made, strict=True))


def _equal(first: NDArray[Any], second: NDArray[Any], rtol: float, atol: float) -> bool:
    if rtol == atol == 0:  # 64-bit integers have more digits than a float
        return bool((first == second).all())
    return np.allclose(first.astype(np.complex128), second.astype(np.complex128), rtol, atol, equal_nan=True)


def _array(data: bytes, aval: str) -> NDArray[Any]:
    form = physical(parse_aval(aval))
    return np.frombuffer(data, dtype_of(form)).reshape(tuple(map(int, form.shape)))
