"""Calling conventions: from the arguments of a call to the flat arrays of an executable, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from jaxlib import _jax

from stagec.avals import Aval
from stagec.runtime.arrays import Array, dtype_of
from stagec.runtime.executable import ArraySpecs, Executable
from stagec.runtime.node_types import NodeTypes
from stagec.runtime.refusal import CallError
from stagec.trees import Tree, TreeMismatch, argument_path


class Convention(Protocol):
    """How an executable is called; the fields are those of `Description` and of `Lowered`."""

    @property
    def in_tree(self) -> Tree:
        """Structure of `(args, kwargs)`."""

    @property
    def in_avals(self) -> tuple[Aval, ...]:
        """Flat."""

    @property
    def out_tree(self) -> Tree:
        """Structure of the result."""

    @property
    def out_avals(self) -> tuple[Aval, ...]:
        """Flat."""

    @property
    def kept_var_idx(self) -> tuple[int, ...]:
        """Sorted indices of the `in_avals` that the executable takes."""

    @property
    def donated(self) -> tuple[bool, ...]:
        """For each of `in_avals`, whether its buffer is consumed by a call."""


class _Omitted:
    """An argument that the caller leaves out, and the loader makes."""

    shape = ()


OMITTED = _Omitted()


class Signature:
    """One executable with its calling convention.

    name: of the function, for messages.
    executable: None until `load`, or until it is set to one that is loaded already.
    """

    def __init__(self, name: str, description: Convention, types: NodeTypes | None = None) -> None:
        self.name = name
        self.description = description
        self._types = types or NodeTypes()
        self._nodes_in = list(description.in_tree.custom_nodes())
        self._nodes_out = list(description.out_tree.custom_nodes())
        self.paths = [argument_path(path) for path in description.in_tree.paths()]
        self.executable: Executable | None = None
        self._dtypes = [dtype_of(aval) for aval in description.in_avals]

    def load(
        self,
        serialized: bytes | memoryview,
        custom_calls: Sequence[str],
        devices: Sequence[_jax.Device],
    ) -> None:
        """Hand the executable to XLA. Raises LoadError ("custom-call", "executable").

        devices: as many as it is for.
        """
        parameters, results = self.parameters_and_results()
        self.executable = Executable.load(serialized, parameters, results, custom_calls, devices)

    def parameters_and_results(self) -> tuple[ArraySpecs, ArraySpecs]:
        """Return shape and dtype of each array that the executable takes, and of each that it gives."""
        taken = [self.description.in_avals[i] for i in self.description.kept_var_idx]
        parameters, results = (
            [(tuple(map(int, aval.shape)), dtype_of(aval)) for aval in avals]
            for avals in (taken, self.description.out_avals)
        )
        return parameters, results

    def flatten(self, args: tuple[object, ...], kwargs: dict[str, object]) -> list[Any]:
        """Return the leaves as numpy or device arrays of the right dtype. Raises CallError ("structure", "dtype")."""
        try:
            types = self._types.of_arguments(self._nodes_in)
            leaves = self.description.in_tree.flatten((args, kwargs), types=types)
        except TreeMismatch as error:
            where = argument_path(error.path) if error.path else "the call"
            raise CallError("structure", f"{self.name}: {where}: {error.what}") from None
        return self.check_dtypes(leaves)

    def check_dtypes(self, leaves: Sequence[Any]) -> list[Any]:
        """Return flat arguments as numpy or device arrays. Raises CallError ("dtype")."""
        return [
            leaf if isinstance(leaf, Array) and leaf.dtype == dtype else self._to_numpy(leaf, dtype, i)
            for i, (leaf, dtype) in enumerate(zip(leaves, self._dtypes, strict=True))
        ]

    def _to_numpy(self, leaf: object, dtype: np.dtype[Any], i: int) -> Any:
        if leaf is OMITTED:
            return leaf
        if type(leaf) in (bool, int, float, complex):
            # A Python number has no dtype of its own: it takes the parameter's where the value survives.
            value = np.array(leaf)
            if np.can_cast(value.dtype.type(0), dtype, "same_kind") or value.dtype.kind == dtype.kind:
                return value.astype(dtype)
        values = np.asarray(leaf)
        if values.dtype != dtype:
            given = getattr(leaf, "dtype", values.dtype)
            wanted = self.description.in_avals[i]
            what = f"{self.name}: {self.paths[i]} has dtype {given}, {dtype} is wanted ({wanted})"
            raise CallError("dtype", what)
        return values

    def call(self, leaves: Sequence[Any], donate: bool = True) -> Sequence[Any]:
        """Return the flat results: numpy arrays, or device arrays when an argument is one.

        donate: whether device arrays of donated arguments are consumed; otherwise the executable gets copies of them.
        """
        executable = self.executable
        assert executable is not None
        donated = self.description.donated
        arguments = []
        for number, i in enumerate(self.description.kept_var_idx):
            leaf = leaves[i]
            if isinstance(leaf, Array):
                if leaf.is_deleted():
                    what = f"{self.name}: {self.paths[i]} was donated to an earlier call; pass that call's result"
                    raise CallError("deleted", what)
                if donated[i] and not donate:
                    leaf = leaf.copy()
            arguments.append(executable.put(number, leaf, donated[i]))
        outputs = executable(arguments)
        if any(isinstance(leaf, Array) for leaf in leaves):
            return outputs
        return [output.numpy() for output in outputs]

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """Return the result in its structure. Raises CallError ("structure") when a type here has another one."""
        try:
            return self.description.out_tree.unflatten(outputs, self._types.of_results(self._nodes_out))
        except TreeMismatch as error:
            raise CallError("structure", f"{self.name}: the result: {error.what}") from None
