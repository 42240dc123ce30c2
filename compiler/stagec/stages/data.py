"""The data of `Exported` and `Lowered`: all that reading, writing, lowering and compiling need of them.

The modules that do this import only the data, and the classes with the methods import these modules. So no module names
a class above it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from stagec.core.builds.specs import CompilerOption
from stagec.core.sizes.avals import Aval
from stagec.core.trees.tree import Tree
from stagec.stages.shardings import OneSharding


@dataclass(frozen=True)
class ExportedData:
    """The fields of an `Exported`, which documents them."""

    fun_name: str
    in_tree: Tree
    in_avals: tuple[Aval, ...]
    out_tree: Tree
    out_avals: tuple[Aval, ...]
    nr_devices: int
    platforms: tuple[str, ...]
    ordered_effects: tuple[str, ...]
    unordered_effects: tuple[str, ...]
    disabled_safety_checks: tuple[str, ...]
    mlir_module_serialized: bytes = field(repr=False)
    calling_convention_version: int
    module_kept_var_idx: tuple[int, ...]
    uses_global_constants: bool
    # Shardings as they are stored, memory spaces by the numbers of the serialization (empty: all on the device), the
    # vector-Jacobian product or what makes it, and names of parameters for messages.
    _in_shardings: tuple[OneSharding, ...]
    _out_shardings: tuple[OneSharding, ...]
    _memory_spaces: tuple[int, ...] = ()
    _vjp: Self | Callable[[], Self] | None = field(default=None, repr=False)
    _parameters: tuple[str, ...] = field(default=(), repr=False)
    # The version of the serialization and of the JAX that wrote the bytes it was read from; None: it was made here.
    _written_by: tuple[int, str] | None = field(default=None, repr=False, compare=False)

    def has_vjp(self) -> bool:
        """Whether `vjp` can be called."""
        return self._vjp is not None

    def vjp(self) -> Self:
        """Return the vector-Jacobian product, itself exported.

        Its arguments are flat: those of this function, then a cotangent for each result. Its results are a tuple of
        cotangents, one for each argument. A cotangent of integers has dtype f0: an array of bools, all False.

        Raises ValueError if it was not exported.
        """
        if self._vjp is None:
            raise ValueError("No VJP is available")
        return self._vjp() if callable(self._vjp) else self._vjp


@dataclass(frozen=True)
class LoweredData:
    """The fields of a `Lowered`, which documents them."""

    fun_name: str
    platform: str
    in_tree: Tree
    flat_in_avals: tuple[Aval, ...]
    out_tree: Tree
    flat_out_avals: tuple[Aval, ...]
    kept_var_idx: tuple[int, ...]
    donated: tuple[bool, ...]
    custom_calls: tuple[str, ...]
    module: bytes = field(repr=False)
    nr_devices: int
    in_shardings: tuple[OneSharding, ...]
    out_shardings: tuple[OneSharding, ...]
    compiler_options: Mapping[str, CompilerOption] = field(default_factory=dict)
    in_memory_kinds: tuple[str | None, ...] = ()
    out_memory_kinds: tuple[str | None, ...] = ()
    _parameters: tuple[str, ...] = field(default=(), repr=False)
    # Raises StagecError for types in the trees that cannot be described; None: all are.
    _check_trees: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    def memory_of_parameters(self) -> tuple[dict[int, str], list[bool]]:
        """Return the memory of each that is not in the device's own, by number; and whether each is donated."""
        kinds = {number: kind for number, kind in enumerate(self.in_memory_kinds) if kind}
        return kinds, [self.donated[i] for i in self.kept_var_idx]
