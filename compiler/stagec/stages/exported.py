"""`Exported`: a JAX function lowered to StableHLO, and its bytes, without JAX.

`jax.export.deserialize` reads the bytes of `serialize`, and `deserialize` reads JAX's bytes
(https://docs.jax.dev/en/latest/export/export.html).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxlib import xla_client

from stagec.core.messages.calls import Call
from stagec.core.messages.errors import missing_package
from stagec.core.messages.refusal import CallError
from stagec.core.sizes.avals import Aval, arrow
from stagec.core.sizes.size import DimensionError, solve
from stagec.core.trees.node_types import NodeTypes
from stagec.core.trees.tree import TreeMismatch, argument_path
from stagec.stages import mlir
from stagec.stages.data import ExportedData
from stagec.stages.shardings import NamedSharding, OneSharding, named_sharding

if TYPE_CHECKING:
    from stagec.stages.compiled import Compiled


class Exported(ExportedData):
    """A function as portable StableHLO: for several platforms, with symbolic sizes if you want.

    Fields and methods are those of `jax.export.Exported`
    (https://docs.jax.dev/en/latest/_autosummary/jax.export.Exported.html).

    fun_name: name of the function, for messages.
    in_tree: structure of `(args, kwargs)`.
    in_avals: flat, in the order of `in_tree`'s leaves; dimensions may be expressions such as `2*batch`.
    out_tree: structure of the result.
    out_avals: flat; dimension variables are those of `in_avals`.
    nr_devices: the number of devices of the module.
    platforms: "cpu", "cuda", "rocm", "tpu"; with more than one, `main` takes their index as its first argument.
    ordered_effects, unordered_effects: class names of the effects in the module.
    disabled_safety_checks: the checks that were off at export: "platform", "shape_assertions", "custom_call:TARGET".
    mlir_module_serialized: the module, in StableHLO's portable form (VHLO).
    calling_convention_version: of the module
        (https://docs.jax.dev/en/latest/export/export.html#calling-convention-versions).
    module_kept_var_idx: sorted indices of the `in_avals` that `main` takes; the others are unused and were dropped.
    uses_global_constants: the module has dimension variables or a platform index, and must be refined before XLA.
    """

    @staticmethod
    def deserialize(serialized: bytes | bytearray) -> Exported:
        """Read the bytes of `serialize`, here or in JAX. Raises NotExported when the bytes are something else."""
        exported: Exported = _serialization("deserialize").read(Exported, bytes(serialized))
        return exported

    def serialize(self, vjp_order: int = 0) -> bytes:
        """Return the bytes that `jax.export.deserialize` reads.

        vjp_order: the number of orders of the vector-Jacobian product to include.
        Raises ValueError when there are fewer, or when a dtype has no place in the format.

        >>> import numpy as np
        >>> exported = stagec.jit(lambda x: x * 2).trace(np.ones(3, np.float32)).export()
        >>> stagec.Exported.deserialize(exported.serialize())
        Exported(<lambda>(f32[3]) -> (f32[3]), for cpu)
        """
        stored: bytes = _serialization("serialize").write(self, vjp_order)
        return stored

    def __repr__(self) -> str:
        devices = f", {self.nr_devices} devices" if self.nr_devices > 1 else ""
        signature = arrow(self.in_avals, self.out_avals)
        return f"Exported({self.fun_name}{signature}, for {' and '.join(self.platforms)}{devices})"

    @property
    def in_shardings_hlo(self) -> tuple[xla_client.HloSharding | None, ...]:
        """For each of `in_avals` XLA's form of its sharding; None if it is not specified."""
        return _hlo(self._in_shardings, self.in_avals)

    @property
    def out_shardings_hlo(self) -> tuple[xla_client.HloSharding | None, ...]:
        """For each of `out_avals` XLA's form of its sharding; None if it is not specified."""
        return _hlo(self._out_shardings, self.out_avals)

    def in_shardings_jax(self, mesh: Any = None) -> tuple[NamedSharding | None, ...]:
        """For each of `in_avals` its sharding over `mesh`; None if it is not specified.

        mesh: a `Mesh`, or a mesh of JAX. None: the exported mesh, which has axes and no devices.

        Raises ValueError if its axes differ from the exported ones, or if it is None and the file has no mesh.
        """
        return _over(mesh, self._in_shardings, self.in_avals)

    def out_shardings_jax(self, mesh: Any = None) -> tuple[NamedSharding | None, ...]:
        """For each of `out_avals` its sharding over `mesh`, as `in_shardings_jax`."""
        return _over(mesh, self._out_shardings, self.out_avals)

    def interface(self) -> dict[str, Any]:
        """Return the facts for a caller in the form of a bundle's index (docs/bundle-format.md)."""
        return {
            "in_tree": self.in_tree.to_json(),
            "in_avals": [str(aval) for aval in self.in_avals],
            "out_tree": self.out_tree.to_json(),
            "out_avals": [str(aval) for aval in self.out_avals],
            "platforms": list(self.platforms),
            "nr_devices": self.nr_devices,
            "custom_calls": mlir.inventory(self.mlir_module_serialized),
            "calling_convention_version": self.calling_convention_version,
        }

    def mlir_module(self, serialized: bool = True) -> Any:
        """Return the module as StableHLO text with locations, or as an `ir.Module` when `serialized` is False."""
        with mlir.make_context() as context:
            module = mlir.read_artifact(context, self.mlir_module_serialized)
            return module.operation.get_asm(enable_debug_info=True) if serialized else module

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on this machine's CPU: numpy arrays in, numpy arrays out.

        Results are in plain containers, or in objects of the model's types if this process has them.

        Dimension variables take their sizes from the shapes of the arguments. The executable for a combination of sizes
        is kept. Pass a PRNG key as its uint32 words; for a function of several devices, pass whole arrays. You may pass
        64-bit arrays for 32-bit arguments, unless JAX's `jax_enable_x64` is set.

        Raises CallError if structure, dtypes or shapes do not fit; CannotLower if the module is not for CPUs; and
        SizesDoNotFit, a kind of CannotLower, if the sizes break a constraint of its dimensions.

        >>> import numpy as np
        >>> struct = stagec_arrays.ShapeDtypeStruct(stagec_arrays.symbolic_shape("n"), np.float32)
        >>> double = stagec.jit(lambda x: x * 2, frontend="arrays").trace(struct).export()
        >>> double.call(np.ones(3, np.float32))
        array([2., 2., 2.], dtype=float32)
        """
        return self._compiled_for(args, kwargs)(*args, **kwargs)

    def _compiled_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
        from stagec.stages.lowering import lower_exported

        sizes = self._sizes(args, kwargs)
        key = tuple(sorted(sizes.items()))
        if key not in self._executables:
            lowered = lower_exported(self, "cpu", sizes)
            named = dataclasses.replace(lowered, _parameters=tuple(self._usage.parameters))
            self._executables[key] = named.compile()
        return self._executables[key]

    @functools.cached_property
    def _executables(self) -> dict[tuple[tuple[str, int], ...], Compiled]:
        return {}

    def _sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
        """Return the size of each dimension variable."""
        if not any(isinstance(dim, str) for aval in self.in_avals for dim in aval.shape):
            return {}
        try:
            types = NodeTypes().of_arguments(self.in_tree.custom_nodes())
            leaves = self.in_tree.flatten((args, kwargs), types=types)
        except TreeMismatch as error:
            raise CallError("structure", f"{self.fun_name}: {self._usage.mismatch(error, kwargs)}") from None
        return self.sizes([tuple(getattr(leaf, "shape", ())) for leaf in leaves])

    @functools.cached_property
    def _usage(self) -> Call:
        """How a call is written, for messages; names of parameters that nobody said may be in the module."""
        usage = Call(self.fun_name, self.in_tree, self.in_avals, self.out_tree, self.out_avals, self._parameters)
        return usage if self._parameters else dataclasses.replace(usage, parameters=self._stored_names(usage))

    def _stored_names(self, call: Call) -> list[str]:
        """Return the name of each positional argument that JAX stored; "" for one that the module does not take."""
        stored = mlir.argument_names(self.mlir_module_serialized, len(self.module_kept_var_idx))
        names = dict(zip(self.module_kept_var_idx, stored, strict=True))
        paths = list(map(argument_path, self.in_tree.paths()))
        stored_names = []
        for argument in call.arguments:
            if not argument.by_keyword:
                ends = [(names.get(leaf, ""), paths[leaf].removeprefix(argument.path)) for leaf in argument.leaves]
                stored_names.append(
                    next((name[: len(name) - len(end)] for name, end in ends if name.endswith(end)), "")
                )
        return stored_names

    def sizes(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """Return the size of each dimension variable for arguments of these shapes, flat.

        Raises CallError ("shape") when they do not fit.
        """
        equations: list[tuple[int | str, int]] = []
        paths = list(self.in_tree.paths())
        for aval, shape, path in zip(self.in_avals, shapes, paths, strict=True):
            given = shape[: len(aval.shape)] if aval.dtype.startswith("key<") else shape
            if len(given) != len(aval.shape):
                shown = self._usage.path(argument_path(path))
                what = f"{shown} has shape {shape}; expected {len(aval.shape)} dimensions ({aval})"
                raise CallError("shape", f"{self.fun_name}: {what}")
            equations += zip(aval.shape, given, strict=True)
        names = (
            f"{self._usage.path(argument_path(path))}.shape[{i}]"
            for aval, path in zip(self.in_avals, paths, strict=True)
            for i in range(len(aval.shape))
        )
        try:
            return solve(equations, names)
        except DimensionError as error:
            raise CallError("shape", f"{self.fun_name}: {error}") from None


def _serialization(method: str) -> Any:
    """Return the module that reads and writes bytes. Raises ModuleNotFoundError with advice about the package."""
    try:
        from stagec.stages import serialization
    except ModuleNotFoundError as error:
        sentence = missing_package(error, f"Exported.{method}")
        if sentence is None:
            raise
        raise ModuleNotFoundError(sentence, name=error.name) from None
    return serialization


def _hlo(shardings: Sequence[OneSharding], avals: Sequence[Aval]) -> tuple[xla_client.HloSharding | None, ...]:
    return tuple(
        sharding.to_hlo(len(aval.shape)) if isinstance(sharding, NamedSharding) else sharding
        for sharding, aval in zip(shardings, avals, strict=True)
    )


def _over(mesh: Any, shardings: Sequence[OneSharding], avals: Sequence[Aval]) -> tuple[NamedSharding | None, ...]:
    def placed(sharding: OneSharding, aval: Aval) -> NamedSharding | None:
        if isinstance(sharding, NamedSharding):
            return sharding if mesh is None else sharding.with_mesh(mesh)
        if sharding is not None and mesh is None:
            raise ValueError(f"{sharding} has no mesh, as in files from before January 2026: name one")
        return None if sharding is None else named_sharding(sharding, len(aval.shape), mesh)

    return tuple(map(placed, shardings, avals))
