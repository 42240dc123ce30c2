"""`Compiled`: an executable, with its description, that can be called.

Fields and methods are those of `jax.stages.Compiled` (https://docs.jax.dev/en/latest/jax.stages.html).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxlib import _jax

from stagec.bundle import archive
from stagec.bundle.description import Description, architecture
from stagec.bundle.members import encode, members_table
from stagec.core.messages.refusal import CallError, LoadError
from stagec.core.sizes.avals import Aval
from stagec.core.trees import json_shapes
from stagec.core.trees.tree import Tree
from stagec.pjrt import clients, compatibility, host
from stagec.pjrt.calling_convention import Signature
from stagec.pjrt.executable import Executable
from stagec.pjrt.shardings import Sharding as OnDevices
from stagec.stages.info import args_info, donate_argnums, out_info
from stagec.stages.shardings import (
    AXIS_TYPES,
    Format,
    GSPMDSharding,
    Layout,
    Mesh,
    Sharding,
    SingleDeviceSharding,
    named_sharding,
)

_EXECUTABLE, _DESCRIPTION = "executable.xla", "description.json"
_AXES = {
    "axis_sizes": [int],
    "axis_names": [str],
    "axis_types": [json_shapes.constant(*AXIS_TYPES)],
    ...: object,
}
_INDEX = json_shapes.shape(
    {
        "format": int,
        "kind": "compiled",
        "mesh": json_shapes.either("a mesh, or nothing,", _AXES, None),
        "members": object,
    }
)
"""Shape of the index in the bytes of `serialize`; its format is that of bundles."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """An executable and the facts about it.

    Methods are those of `jax.stages.Compiled` (https://docs.jax.dev/en/latest/jax.stages.html#jax.stages.Compiled).

    executable: bytes that jaxlib's client loads; canonical ones if it was compiled for a named target.
    description: calling convention, target, costs and memory.
    hlo: the optimized program as text; None after `deserialize`, until you ask for it.
    mesh: the mesh over which its arrays are split; None if it is not known.
    stablehlo: the module that XLA compiled, in StableHLO's portable form; None unless it was built from a manifest.
    inventory: its parts (`stages.inventory`); None unless requested.
    optimized: jaxlib's HloModule of `hlo`; None unless this process compiled it for a named target.
    kernels: the facts about each kernel for GPUs; empty unless this process compiled it for one.

    Call it with numpy arrays, in the structure and the shapes that it was compiled for. Results are numpy arrays in
    plain containers, or in objects of the model's types if their module is imported. Pass and read arrays on several
    devices as a whole. A PRNG key is its uint32 words. You may pass a 64-bit array for a 32-bit argument, unless JAX's
    `jax_enable_x64` is set. A call raises CallError if an argument does not fit.
    """

    executable: bytes = field(repr=False)
    description: Description
    hlo: str | None = field(default=None, repr=False)
    mesh: Mesh | None = None
    stablehlo: bytes | None = field(default=None, repr=False)
    inventory: Mapping[str, Any] | None = field(default=None, repr=False)
    optimized: Any = field(default=None, repr=False)
    kernels: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    _parameters: tuple[str, ...] = field(default=(), repr=False)
    _check_trees: Callable[[], None] | None = field(default=None, repr=False)  # of `Lowered`
    _executable: Executable | None = field(default=None, repr=False)  # the same, loaded, if this process compiled it

    def __repr__(self) -> str:
        return f"Compiled({self.description.function}, target {self.description.target.name})"

    @property
    def nr_devices(self) -> int:
        """How many devices it runs on."""
        return self.description.nr_devices

    @property
    def in_tree(self) -> Tree:
        """Structure of `(args, kwargs)`."""
        return self.description.in_tree

    @property
    def out_tree(self) -> Tree:
        """Structure of the result."""
        return self.description.out_tree

    @property
    def args_info(self) -> Any:
        """An `ArgInfo` for each argument, in the structure `(args, kwargs)`."""
        return args_info(self.in_tree, self.description.in_avals, self.description.donated)

    @property
    def in_avals(self) -> Any:
        """The `Aval` of each argument, in the structure `(args, kwargs)`."""
        return self.in_tree.unflatten(self.description.in_avals)

    @property
    def out_info(self) -> Any:
        """An `OutInfo` for each result, in the structure of the result."""
        return out_info(self.out_tree, self.description.out_avals, self._output_formats())

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Indices of the donated arguments, among the leaves of the arguments."""
        return donate_argnums(self.description.donated)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the executable.

        Raises CallError ("structure", "dtype", "shape", "deleted") when an argument does not fit, and LoadError
        ("platform", "architecture", "cpu-feature") when it was compiled for another machine.
        """
        signature = self._called
        return signature.unflatten(self._run(signature.flatten(args, kwargs)))

    def call(self, *args: Any, **kwargs: Any) -> tuple[Any, Sequence[Any], Sequence[Any]]:
        """Run the executable; return the result, its leaves, and the leaves of the arguments.

        It raises the errors of a call. In JAX it is a static method, and takes `Compiled._params` first. Here,
        `Compiled.call(self, ...)` works too.
        """
        signature = self._called
        leaves = signature.flatten(args, kwargs)
        results = self._run(leaves)
        return signature.unflatten(results), results, leaves

    @property
    def _params(self) -> Compiled:
        """The first argument of `Compiled.call` in JAX's code."""
        return self

    def call_flat(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run the executable on the leaves of `(args, kwargs)`; return the leaves of the result.

        Raises CallError ("dtype", "shape", "deleted"), and LoadError as a call does.
        """
        return self._run(self._called.check_dtypes(leaves))

    def _run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        for i, (leaf, aval) in enumerate(zip(leaves, self.description.in_avals, strict=True)):
            # XLA compares no shapes: it would read beyond the end of a smaller array.
            if leaf.shape != aval.shape:
                path, given = self._signature.path(i), Aval(aval.dtype, leaf.shape)
                raise CallError("shape", f"{self.description.function}: {path} is {given}; expected {aval}")
        return self._signature.call(leaves)

    @functools.cached_property
    def _called(self) -> Signature:
        """The path of calls. XLA also loads code for other CPUs, for its sizes, but a call would end this process."""
        _check_host(self.description, self.description.function)
        return self._signature

    @functools.cached_property
    def _signature(self) -> Signature:
        target = self.description.target
        if target.platform != "cpu":
            raise LoadError("platform", f"it is for {target.device_kind}; this process runs executables for CPUs only")
        signature = Signature(self.description.function, self.description, parameters=self._parameters)
        if self._executable is not None:
            signature.executable = self._executable
        else:
            calls, devices = tuple(self.description.custom_calls), clients.devices("cpu", self.nr_devices)
            signature.load(self.executable, calls, devices, self.description.memory_kinds)
        return signature

    @property
    def _loaded(self) -> Executable:
        return self._signature.executable

    def as_text(self) -> str:
        """Return the optimized program as HLO text."""
        return self.hlo if self.hlo is not None else str(self.runtime_executable().hlo_modules()[0].to_string())

    def cost_analysis(self) -> dict[str, float]:
        """Return XLA's estimate for the optimized program, by XLA's names: "flops", "bytes accessed" and others."""
        return dict(self.runtime_executable().cost_analysis())

    def memory_analysis(self) -> _jax.CompiledMemoryStats:
        """Return XLA's sizes in bytes: `argument_size_in_bytes`, `temp_size_in_bytes` and others."""
        return self.runtime_executable().get_compiled_memory_stats()

    def runtime_executable(self) -> _jax.LoadedExecutable:
        """Return jaxlib's loaded executable."""
        return self._loaded.loaded

    @property
    def input_shardings(self) -> Any:
        """The sharding of each argument, in the structure `(args, kwargs)`; None for one that the program drops."""
        return self.in_tree.unflatten(self._inputs())

    @property
    def output_shardings(self) -> Any:
        """How each result is split, in the structure of the result."""
        return self.out_tree.unflatten(self._outputs())

    @property
    def input_formats(self) -> Any:
        """Layout and sharding of each argument, in the structure `(args, kwargs)`."""
        layouts = self._kept(list(map(_layout, self.runtime_executable().get_parameter_layouts())))
        return self.in_tree.unflatten(list(map(Format, layouts, self._inputs())))

    @property
    def output_formats(self) -> Any:
        """Layout and sharding of each result, in the structure of the result."""
        return self.out_tree.unflatten(self._output_formats())

    def _output_formats(self) -> list[Format]:
        layouts = map(_layout, self.runtime_executable().get_output_layouts())
        return list(map(Format, layouts, self._outputs()))

    def _inputs(self) -> list[Sharding | None]:
        taken = [self.description.in_avals[i] for i in self.description.kept_var_idx]
        return self._kept(self._shardings(self._loaded.parameter_shardings, taken))

    def _outputs(self) -> list[Sharding]:
        return self._shardings(self._loaded.output_shardings, self.description.out_avals)

    def _kept(self, values: Sequence[Any]) -> list[Any]:
        """Return the values of the arguments that the program takes, and None for the others."""
        by_index = dict(zip(self.description.kept_var_idx, values, strict=True))
        return [by_index.get(i) for i in range(len(self.description.in_avals))]

    def _shardings(self, placements: Sequence[OnDevices], avals: Sequence[Aval]) -> list[Sharding]:
        result: list[Sharding] = []
        for placement, aval in zip(placements, avals, strict=True):
            if placement.spec is None:
                result.append(SingleDeviceSharding(memory_kind=placement.memory_kind))
                continue
            try:
                named = named_sharding(placement.spec, len(aval.shape), self.mesh or Mesh((), ()))
                result.append(dataclasses.replace(named, memory_kind=placement.memory_kind))
            except ValueError:
                result.append(GSPMDSharding(str(placement.spec), placement.memory_kind))
        return result

    def serialize(self) -> bytes:
        """Return bytes for `deserialize`, without pickle.

        They are for processes with this jaxlib, on machines with the features that the target requires. Without a named
        target, these are the features of this machine's CPU.

        Raises StagecError, as `Traced.export`, with every type in the trees that cannot be described.

        >>> import numpy as np
        >>> double = stagec.jit(lambda x: x * 2).lower(np.ones(3, np.float32)).compile()
        >>> stagec.Compiled.deserialize(double.serialize())(np.ones(3, np.float32))
        array([2., 2., 2.], dtype=float32)
        """
        if self._check_trees:
            self._check_trees()
        members = {_EXECUTABLE: self.executable, _DESCRIPTION: self.description.to_json().encode()}
        listed = {
            "format": archive.FORMAT,
            "kind": "compiled",
            "mesh": dataclasses.asdict(self.mesh) if self.mesh else None,
            "members": members_table(members),
        }
        return encode({archive.INDEX: archive.encode_index(listed), **dict(sorted(members.items()))})

    @staticmethod
    def deserialize(serialized: bytes) -> Compiled:
        """Read the bytes of `serialize`.

        Raises LoadError if the bytes are something else, are damaged, or are for another jaxlib, architecture or CPU.
        XLA gets the executable at the first use.
        """
        name = "a serialized Compiled"
        container = archive.Archive(name, bytes(serialized), _INDEX)
        try:
            description = Description.from_json(container[_DESCRIPTION])
            axes = container.index["mesh"]
            mesh = _read_mesh(axes) if axes else None
        except (ValueError, KeyError, TypeError) as error:
            raise LoadError("format", f"{name}: {error}") from error
        made_with, here = description.versions["jaxlib"], compatibility.version()
        if made_with != here:
            raise LoadError("jaxlib-version", f"{name}: it was compiled with jaxlib {made_with}, here is {here}")
        _check_host(description, name)
        return Compiled(container[_EXECUTABLE], description, None, mesh)


def _check_host(description: Description, name: str) -> None:
    """Raise LoadError ("architecture", "cpu-feature") if this machine cannot run the code."""
    target = description.target
    if refusal := host.architecture_refusal(architecture(target.to_plain()), host.architecture()):
        raise LoadError("architecture", f"{name}: {refusal}")
    if refusal := host.cpu_refusal(target.requires, host.cpu_flags()):
        raise LoadError("cpu-feature", f"{name}: {refusal}")


def _read_mesh(axes: Mapping[str, Any]) -> Mesh:
    return Mesh(tuple(axes["axis_sizes"]), tuple(axes["axis_names"]), tuple(axes["axis_types"]))


def _layout(layout: _jax.PjRtLayout) -> Layout:
    xla_layout = layout._xla_layout()
    tiling = tuple(map(tuple, xla_layout.tiling()))
    return Layout(tuple(xla_layout.minor_to_major()[::-1]), tiling, xla_layout.element_size_in_bits())
