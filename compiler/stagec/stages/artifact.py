"""`Artifact`: what an exported artifact holds, field by field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self, TypeAlias

from jaxlib import xla_client

from stagec.core.sizes.avals import Aval
from stagec.core.trees.tree import Tree
from stagec.stages.shardings import NamedSharding

OneSharding: TypeAlias = NamedSharding | xla_client.HloSharding | None
"""How one array is split; None: not specified. Bytes from before January 2026 have XLA's form, without axis names."""


@dataclass(frozen=True)
class Artifact:
    """A function lowered to StableHLO: the fields of `Exported`, which describes them and adds JAX's methods.

    Fields that begin with "_" are internal: shardings as they are stored, memory spaces by the numbers of the
    serialization (empty: all on the device), the vector-Jacobian product or what makes it, and names of parameters for
    messages.
    """

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
    _in_shardings: tuple[OneSharding, ...]
    _out_shardings: tuple[OneSharding, ...]
    _memory_spaces: tuple[int, ...] = ()
    _vjp: Self | Callable[[], Self] | None = field(default=None, repr=False)
    _parameters: tuple[str, ...] = field(default=(), repr=False)

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
