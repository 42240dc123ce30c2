"""The binary interface of an executable: how a program without Python passes its arrays (docs/without-python.md)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from stagec.core.sizes.avals import Aval
from stagec.core.trees.tree import argument_path
from stagec.costs import hlo
from stagec.stages.shardings import NamedSharding

if TYPE_CHECKING:
    from stagec.stages.lowered import Lowered

_TYPE = re.compile(r"[a-z0-9]+\[([^\]]*)\](?:\{([\d,]*):?([^}]*)\})?")
_TILES, _TILE = re.compile(r"T(?:\([\d,]+\))+"), re.compile(r"\(([\d,]+)\)")


def of_module(program: Lowered, text: str) -> dict[str, list[dict[str, Any]]]:
    """Return "parameters" and "results" of an executable, in the order in which PJRT takes and gives them.

    text: the optimized HLO that XLA made of `program`. Arguments that the program drops are not parameters. Of each:

    path: the argument or result, such as `args[0]['w']`.
    dtype, shape: of the whole array. shard_shape: of the part on one device, which is what PJRT takes and gives there.
    sharding: for each dimension the mesh axes over which it is split, outermost first; None where that is not named.
    minor_to_major, tiles: its layout on the device, as in XLA's (https://openxla.org/xla/tiled_layout).
    donated: parameters only; whether the call consumes the buffer.
    unreduced: where there are any, the mesh axes over which it is a sum that nobody has made yet: each device has an
        addend. memory_kind: where it lies in another memory than the device's own, which one ("pinned_host").
    """
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
            _array(f"result{path}", aval, sharding, kind, memory)
            for path, aval, sharding, kind, memory in zip(
                program.out_tree.paths(),
                program.flat_out_avals,
                program.out_shardings,
                results,
                program.out_memory_kinds,
                strict=True,
            )
        ],
    }


def _array(path: str, aval: Aval, sharding: Any, kind: str, memory: str | None) -> dict[str, Any]:
    match = _TYPE.fullmatch(kind)
    assert match, kind
    sizes, order, rest = match.groups(default="")
    tiles = _TILES.search(rest)
    return {
        "path": path,
        "dtype": aval.dtype,
        "shape": list(map(int, aval.shape)),
        "shard_shape": _numbers(sizes),
        "sharding": _axes(sharding, len(aval.shape)),
        "minor_to_major": _numbers(order),
        "tiles": [_numbers(tile) for tile in _TILE.findall(tiles[0])] if tiles else [],
        **({"unreduced": list(unreduced)} if (unreduced := _unreduced(sharding)) else {}),
        **({"memory_kind": memory} if memory else {}),
    }


def _unreduced(sharding: Any) -> tuple[str, ...]:
    return sharding.spec.unreduced if isinstance(sharding, NamedSharding) else ()


def _axes(sharding: Any, rank: int) -> list[list[str]] | None:
    if not isinstance(sharding, NamedSharding):
        return None
    split = sharding.spec.partitions
    return [*map(list, split), *([] for _ in range(rank - len(split)))]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
