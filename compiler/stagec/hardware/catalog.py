"""The targets that are checked in, by their short names: manifests/targets/*.toml."""

from __future__ import annotations

import difflib
import functools
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stagec.core.errors import Problem, StagecError, show
from stagec.core.specs import CpuTarget, CudaTarget, TargetSpec, TpuTarget
from stagec.hardware import cuda_devices
from stagec.hardware.cuda_devices import REMARKS, Device, read
from stagec.hardware.tpu_topologies import TOPOLOGY, Generation, parse_topology, topologies

FILES = ("cpu.toml", "nvidia.toml", "tpu.toml")
PARALLELISM = 8
"""Into how many partitions XLA may split an operation on a CPU, where a target does not say."""
_FOLDER = Path(__file__).parent.parent / "targets"
"""A link to manifests/targets; in an installed package, the files themselves."""


@dataclass(frozen=True)
class Entry:
    """What a person wants to read of a checked-in target.

    name: its short name; of a TPU generation, its name in topologies. platform: "cpu", "cuda" or "tpu".
    doc: one line. source: where the figures are from.
    memory: bytes; flops: peak bfloat16 operations a second; bandwidth: bytes a second from memory; links: bytes a
        second of all links to other devices, in one direction. All are of one device or chip, and None for CPUs: an
        instruction set says nothing of them. links is None too where there are none.
    examples: names of targets with it: the short name, or topologies. devices: how many devices each of those has.
    """

    name: str
    platform: str
    doc: str
    source: str
    memory: int | None
    flops: float | None
    bandwidth: float | None
    links: float | None
    examples: tuple[str, ...]
    devices: tuple[int, ...]


@functools.cache
def devices() -> Mapping[str, Device]:
    """Return the NVIDIA devices by their short names."""
    return {name: read(table, "nvidia.toml", name) for name, table in _tables("nvidia.toml").items()}


@functools.cache
def generations() -> Mapping[str, Generation]:
    """Return the generations of TPUs by their names in topologies, oldest first."""
    return {
        name: Generation(name, **{key: value for key, value in table.items() if key not in REMARKS})
        for name, table in _tables("tpu.toml").items()
    }


@functools.cache
def isas() -> Mapping[str, str]:
    """Return XLA's names of the instruction sets by the short names of CPUs."""
    return {name: table["isa"] for name, table in _tables("cpu.toml").items()}


def entries() -> list[Entry]:
    """Return all that is checked in: CPUs, NVIDIA devices, TPUs."""
    cpus, gpus, tpus = (_tables(file) for file in FILES)
    found = [
        Entry(name, "cpu", table["doc"], table["source"], None, None, None, None, (name,), (1,))
        for name, table in cpus.items()
    ]
    for name, device in devices().items():
        doc, source = gpus[name]["doc"], gpus[name]["source"]
        figures = device.device_memory_size, device.bf16_flops, float(device.memory_bandwidth)
        found.append(Entry(name, "cuda", doc, source, *figures, device.nvlink_bandwidth or None, (name,), (1,)))
    for name, one in generations().items():
        usual = topologies(one)
        examples = (*usual[:3], usual[-1])
        counts = tuple(parse_topology(text, generations()).num_devices for text in examples)
        doc, source = tpus[name]["doc"], tpus[name]["source"]
        links = 2 * len(one.pod) * one.link_bandwidth
        found.append(Entry(name, "tpu", doc, source, one.memory, one.flops, one.bandwidth, links, examples, counts))
    return found


def target(name: str, others: tuple[str, ...] = ()) -> TargetSpec:
    """Return the target of a short name ("cpu-avx2", "h100-sxm") or of a TPU topology ("v5e:2x2").

    A topology's target is called with - for the colon: it is a part of file names.
    others: names that are known besides, for the message.
    Raises StagecError, which tells near names, when there is no such one.
    """
    if name in isas():
        return CpuTarget(name, isas()[name], PARALLELISM, {})
    if name in devices():
        return CudaTarget(name, name, "1x1x1", asdict(device(name)), {})
    # With "_" for the colon, which libtpu takes as well, it may be a name like any other.
    plain = name.removesuffix("_untwisted").removesuffix("_twisted")
    if re.match(TOPOLOGY, name) and ("_" not in plain or plain.split("_", maxsplit=1)[0].lower() in generations()):
        topology = parse_topology(name, generations())
        figures = asdict(topology.generation)
        return TpuTarget(str(topology).replace(":", "-"), str(topology), "", 1, figures, {})
    if name.lower() in generations():
        usual = topologies(generations()[name.lower()])
        write = f"write the chips of the slice too, for example {_either(usual[:3])}"
    else:
        kinds = "a short name that stagec targets lists, or a TPU topology such as v5e:2x2"
        listed = f"one of {', '.join(others)}, " if others else ""
        write = _near(name, [*others, *isas(), *devices()]) or f"write {listed}{kinds}"
    raise StagecError(Problem("", "", f'unknown target "{name}"', write))


def device(name: str) -> Device:
    """Return the NVIDIA device of a short name. Raises StagecError, which tells near names, when there is none."""
    if name not in devices():
        write = _near(name, devices()) or f"write one of {', '.join(devices())}"
        write += "\nfor another one, write the path of a file that describes it, as stagec describe-device writes it"
        raise StagecError(Problem("", "device", f'unknown device "{name}"', write))
    return devices()[name]


def _near(name: str, known: Collection[str]) -> str:
    """A question with the names that begin so, else with those that are spelled alike; "" where there are none."""
    near = [one for one in known if name and one.lower().startswith(name.lower())]
    near = near or difflib.get_close_matches(name.lower(), known, 3)
    return f"did you mean {_either([show(one) for one in near])}?" if near else ""


def _either(texts: Sequence[str]) -> str:
    return f"{', '.join(texts[:-1])} or {texts[-1]}" if len(texts) > 1 else texts[0]


def num_devices(target: TargetSpec) -> int | None:
    """Return how many devices a target has; None where it may be any number."""
    match target:
        case TpuTarget():
            return parse_topology(target.topology, generations(), target.chips_per_host, target.slices).num_devices
        case CudaTarget():
            return cuda_devices.num_devices(target.topology)
        case CpuTarget():
            return None


def topologies_with(count: int, target: TargetSpec) -> list[str]:
    """Return usual topologies of the hardware of `target` that have `count` devices, at most three."""
    match target:
        case TpuTarget():
            usual = topologies(generations()[str(target.figures["name"])])
            return [text for text in usual if parse_topology(text, generations()).num_devices == count][:3]
        case CudaTarget():
            return [f"1x1x{count}"]
        case CpuTarget():
            return []


@functools.cache
def _tables(file: str) -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads((_FOLDER / file).read_text("utf-8"))
