"""The binary interface of an executable: how a program without Python passes its arrays (docs/without-python.md)."""

from __future__ import annotations

from typing import Any

from stagec.core.sizes.avals import Aval
from stagec.core.trees.tree import argument_path
from stagec.costs import hlo
from stagec.costs.array_types import array
from stagec.stages.data import LoweredData
from stagec.stages.shardings import NamedSharding


def of_module(program: LoweredData, text: str) -> dict[str, list[dict[str, Any]]]:
    """Return "parameters" and "results" of an executable, in the order in which PJRT takes and gives them.

    text: the optimized HLO of `program`. Arguments that the program drops are not parameters. Each has:

    path: the argument or result, such as `args[0]['w']`.
    dtype, shape: of the whole array. shard_shape: of the part on one device, which PJRT takes and returns there.
    sharding: for each dimension the mesh axes over which it is split, outermost first; None if that is not named.
    minor_to_major, tiles: its layout on the device, as in XLA's (https://openxla.org/xla/tiled_layout).
    donated: parameters only; whether the call consumes the buffer.
    unreduced: if there are any, the mesh axes of a pending sum: each device has an addend. memory_kind: where it lies
        in another memory than the device's own, which one ("pinned_host").
    """
    # From the first line of the optimized program, which every backend has.
    parameters, results = hlo.entry_types(text)
    paths = list(map(argument_path, program.in_tree.paths()))
    return {
        "parameters": [
            {
                **_array(paths[i], program.flat_in_avals[i], program.in_shardings[i], kind, memory),
                "donated": program.donated[i],
            }
            for i, kind, memory in zip(program.kept_var_idx, parameters, program.in_memory_kinds, strict=True)
        ],
        "results": [
            _array(path, aval, sharding, kind, memory)
            for path, aval, sharding, kind, memory in zip(
                program.out_tree.paths("result"),
                program.flat_out_avals,
                program.out_shardings,
                results,
                program.out_memory_kinds,
                strict=True,
            )
        ],
    }


def _array(path: str, aval: Aval, sharding: Any, kind: str, memory: str | None) -> dict[str, Any]:
    part = array(kind)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else None
    whole = [()] * (len(aval.shape) - len(spec.partitions)) if spec else []
    return {
        "path": path,
        "dtype": aval.dtype,
        "shape": list(map(int, aval.shape)),
        "shard_shape": list(part.dims),
        "sharding": list(map(list, (*spec.partitions, *whole))) if spec else None,
        "minor_to_major": list(part.order),
        "tiles": list(map(list, part.tiles)),
        **({"unreduced": list(spec.unreduced)} if spec and spec.unreduced else {}),
        **({"memory_kind": memory} if memory else {}),
    }
