"""`Program`: a StableHLO module for one platform with static shapes, and what compiling and calling it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stagec.core.builds.specs import CompilerOption
from stagec.core.sizes.avals import Aval
from stagec.core.trees.tree import Tree
from stagec.stages.artifact import OneSharding


@dataclass(frozen=True)
class Program:
    """A StableHLO module for one platform: the fields of `Lowered`, which describes them and adds JAX's methods."""

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

    def memory_of_parameters(self) -> tuple[dict[int, str], list[bool]]:
        """Return the memory of each that is not in the device's own, by number; and whether each is donated."""
        kinds = {number: kind for number, kind in enumerate(self.in_memory_kinds) if kind}
        return kinds, [self.donated[i] for i in self.kept_var_idx]
