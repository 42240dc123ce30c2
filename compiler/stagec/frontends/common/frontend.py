"""The interface of the frontends: each is a module with the functions of `Frontend`."""

from __future__ import annotations

import importlib
import importlib.util
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np

from stagec.core.builds import extensions
from stagec.core.builds.frontends import TRACERS, of_entry
from stagec.core.builds.specs import FunctionSpec
from stagec.core.builds.version import VERSION
from stagec.core.messages.errors import StagecError, missing_package
from stagec.pjrt import compatibility

NamedArray: TypeAlias = tuple[str, Any, str]
"""An array that a function reaches by a name: the name, the array, and FILE:LINE of the function that uses it."""


class Export(NamedTuple):
    """What a frontend gives of a function. None of it holds a source location.

    artifact: in the serialization format of `jax.export`. by_device: its differences by device, in the form of
    `stages.by_device`; empty if nothing differs. premises: what the trace took for granted, for a program that has the
    function (`frontends/jax/premises.py`); None if none can compare it.
    """

    artifact: bytes
    by_device: bytes = b""
    premises: Mapping[str, Any] | None = None


class Frontend(Protocol):
    """A module of this package that exports the function of `spec.entry` as an artifact.

    import_roots: folders with the user's modules and files, first wins.
    Each function raises StagecError for every mistake of the user's.
    """

    def export(self, spec: FunctionSpec, import_roots: Sequence[str]) -> Export:
        """Trace, lower and export the function."""

    def export_with_locations(self, spec: FunctionSpec, import_roots: Sequence[str]) -> str:
        """Return the module of `export` as StableHLO text with the locations of operations in the sources."""

    def jaxpr(self, spec: FunctionSpec, import_roots: Sequence[str]) -> str:
        """Return the traced program as a string without addresses."""

    def parameters(self, spec: FunctionSpec, import_roots: Sequence[str]) -> list[str]:
        """Return the names of the parameters that take positional arguments, in order; empty if none have names.

        The last may be `*name`: of a parameter that takes all others.
        """

    def versions(self, spec: FunctionSpec) -> dict[str, str]:
        """Return the versions that made the artifact: name -> version."""

    def named_arrays(self, spec: FunctionSpec, least: int) -> Iterator[NamedArray]:
        """Yield the arrays of `least` bytes and more that the function reaches by names of its own."""

    def results(
        self, spec: FunctionSpec, import_roots: Sequence[str], serialized: bytes, values: Sequence[np.ndarray[Any, Any]]
    ) -> list[np.ndarray[Any, Any]]:
        """Return the right results for values of the arguments: from leaves to leaves; PRNG keys are their words.

        serialized: the artifact of `export`. Raises the errors of the function.
        """


def versions(spec: FunctionSpec) -> dict[str, str]:
    """Return the versions that made an exported artifact without JAX: name -> version."""
    return {"jaxlib": compatibility.version(), "stagec": VERSION, "python": platform.python_version()}


def frontend(spec: FunctionSpec) -> Frontend:
    """Return the frontend of a function. This imports its tracer.

    Raises StagecError if that is JAX or an extension, and is not installed.
    """
    try:
        return cast(
            Frontend, extensions.imported(of_entry(spec.entry, spec.frontend).module, f"to trace {spec.entry}, stagec")
        )
    except StagecError as error:
        (problem,) = error.problems
        raise spec.problem("frontend", problem.what, problem.write) from error
    except ModuleNotFoundError as error:
        sentence = missing_package(error, f"to trace {spec.entry}, stagec")
        if sentence is None:
            raise
        what, _, install = sentence.partition(": ")
        write = 'write frontend = "arrays" for a function of stagec_arrays.numpy,\n'
        write += f"or add jax to the lock of stagec.python(lock = ...); outside Bazel, {install}"
        raise spec.problem("frontend", what, write) from error


def preload() -> None:
    """Import the tracers that are installed: a worker has an extension on its path only for functions that need it."""
    installed = [row for row in TRACERS.values() if importlib.util.find_spec(row.package)]
    for name in ("numpy.random", *(name for row in installed for name in (row.module, *row.preloaded))):
        importlib.import_module(name)
