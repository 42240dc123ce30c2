"""Find each process's part of the arrays, if a program is for chips of several hosts with a process on each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from stagec.hardware import tpu
from stagec.hardware.tpu_topologies import parse_topology

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""A part of an array: its start and end in each dimension."""

_SHOWN, _ARRAYS = 16, 4
"""The most processes to show to a person, and the most arguments and results of each; --json shows all."""


def processes(description: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the devices and parts of each process; None if one process has all, or if nothing says so.

    description: of an executable, in its JSON form.

    Fields of the result: chips_per_host, along x, y and z; device_ids: of each process, in the order of the mesh;
    parameters and results: of each array its path, its shape and its parts. Of each part: ranges, a beginning and an
    end for each dimension, and the processes that have it. Parts are None if the sharding has no names of axes.
    Raises ValueError if the description contradicts itself, StagecError for a topology that is not known.
    """
    target, assignment = description["target"], description["device_assignment"]
    if target["platform"] != "tpu" or assignment is None:
        return None
    topology = parse_topology(
        target["topology"], tpu.generations(), target.get("chips_per_host", ""), target.get("slices", 1)
    )
    ids = assignment["device_ids"]
    mesh = dict(zip(assignment["axis_names"], assignment["axis_sizes"], strict=True))
    if not len(assignment["coords"]) == len(ids) == topology.num_devices == math.prod(mesh.values() or [len(ids)]):
        raise ValueError(f"{len(ids)} devices are assigned to the mesh {mesh} of topology {topology}")
    if topology.num_hosts == 1:
        return None
    each = len(ids) // topology.slices
    hosts = [
        topology.host_of(tuple(map(int, coords.split(","))), number // each)
        for number, coords in enumerate(assignment["coords"])
    ]
    abi = description["abi"]
    return {
        "chips_per_host": list(topology.host),
        "device_ids": [[ids[i] for i, at in enumerate(hosts) if at == host] for host in range(topology.num_hosts)],
        **{
            kind: [
                {"path": array["path"], "shape": array["shape"], "parts": _parts(array, mesh, hosts)}
                for array in abi[kind]
            ]
            for kind in ("parameters", "results")
        },
    }


def _parts(array: Mapping[str, Any], mesh: Mapping[str, int], hosts: Sequence[int]) -> list[dict[str, Any]] | None:
    """Return the parts of an array. hosts: of each partition."""
    shape, split = array["shape"], array["sharding"]
    if split is None:
        if array["shard_shape"] != shape:
            return None
        split = [[] for _ in shape]
    if {name for axes in split for name in axes} - mesh.keys() or len(split) != len(shape):
        raise ValueError(f"{array['path']} is split over {split}, and the mesh is {dict(mesh)}")
    held: dict[Ranges, list[int]] = {}
    for coords, host in zip(itertools.product(*map(range, mesh.values())), hosts, strict=True):
        at = dict(zip(mesh, coords, strict=True))
        ranges = []
        for size, axes in zip(shape, split, strict=True):
            number, count = 0, 1
            for name in axes:
                number, count = number * mesh[name] + at[name], count * mesh[name]
            ranges.append((number * size // count, (number + 1) * size // count))
        holders = held.setdefault(tuple(ranges), [])
        if host not in holders:
            holders.append(host)
    return [{"ranges": [list(of) for of in ranges], "processes": sorted(on)} for ranges, on in sorted(held.items())]


def as_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the result of `processes` for a person: a line for all of them, and one for each of the first few."""
    ids = report["device_ids"]
    chips = "x".join(map(str, report["chips_per_host"]))
    lines = [f"processes  {len(ids)}, one on each host of {chips} chips"]
    for host in range(len(ids))[:_SHOWN]:
        parameters, results = (_of_arrays(report[kind], host) for kind in ("parameters", "results"))
        lines.append(f"  process {host}, devices {', '.join(map(str, ids[host]))}: {parameters} -> {results}")
    return [*lines, *([f"  ... and {len(ids) - _SHOWN} more, which --json shows"] if len(ids) > _SHOWN else [])]


def _of_arrays(arrays: Sequence[Mapping[str, Any]], host: int) -> str:
    more = [f"... and {len(arrays) - _ARRAYS} more"] if len(arrays) > _ARRAYS else []
    return "; ".join([*(_of_process(array, host) for array in arrays[:_ARRAYS]), *more]) or "nothing"


def _of_process(array: Mapping[str, Any], host: int) -> str:
    path, shape = array["path"], array["shape"]
    if array["parts"] is None:
        return f"{path}: a part that has no names of axes"
    parts = [tuple(map(tuple, part["ranges"])) for part in array["parts"] if host in part["processes"]]
    along = [sorted({part[i] for part in parts}) for i in range(len(shape))]
    boxes = [along] if math.prod(map(len, along)) == len(parts) else [[[of] for of in part] for part in parts]
    return " and ".join(_box(path, shape, box) for box in boxes)


def _box(path: str, shape: Sequence[int], along: Sequence[Sequence[tuple[int, int]]]) -> str:
    """Write a part as an index of NumPy, with + between ranges that do not touch."""
    words = []
    for size, ranges in zip(shape, along, strict=True):
        joined: list[list[int]] = []
        for begin, end in ranges:
            if joined and joined[-1][1] == begin:
                joined[-1][1] = end
            else:
                joined.append([begin, end])
        words.append(":" if joined == [[0, size]] else "+".join(f"{begin}:{end}" for begin, end in joined))
    return f"{path}[{', '.join(words)}]" if {*words} - {":"} else f"{path} whole"
