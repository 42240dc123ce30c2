"""TPUs: generations of chips, and the slices of them that libtpu 0.0.42 compiles for."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagec.core.messages.errors import Problem, StagecError, nearest


@dataclass(frozen=True)
class Generation:
    """A generation of TPUs; properties are of one chip.

    name: as in a topology. device_kind: as `jax.Device.device_kind`.
    cores: the number of JAX's devices on a chip.
    pod: chips along each axis of the largest slice.
    memory: bytes of HBM. bandwidth: bytes a second from it. flops: peak bfloat16 operations a second.
    link_bandwidth: bytes a second of one link to a neighbour, in one direction; a chip has two for each axis of `pod`.
    network_bandwidth: bytes a second into the network between slices, in one direction; 0 if it is not known.
    """

    name: str
    device_kind: str
    cores: int
    pod: Sequence[int]
    memory: int
    bandwidth: float
    flops: float
    link_bandwidth: float
    network_bandwidth: float


_OTHER_NAMES = {"v5": "v5p", "v5 lite": "v5e", "v6 lite": "v6e"}
"""libtpu's other names of generations."""
_HINTS = {
    **dict.fromkeys(("v7x", "v7", "tpu7", "ironwood"), "tpu7x"),
    **dict.fromkeys(("v6", "trillium"), "v6e"),
    "v5litepod": "v5e",
}
"""Names that others use; libtpu refuses them."""
TOPOLOGY = r"^[A-Za-z0-9 ]+[:=_][1-9][0-9]*(x[1-9][0-9]*)*(_twisted|_untwisted)?$"
"""A generation, chips along each axis and whether the torus is twisted, in all spellings that libtpu takes."""
_SHAPE = re.compile(r"[1-9]\d*(?:x[1-9]\d*)*")
_HOST = (2, 2, 1)
"""The default chips of a host along each axis."""


@dataclass(frozen=True)
class Topology:
    """A slice of a pod, or several that a data-center network connects.

    shape: chips along each axis. host: chips of one host along x, y and z. slices: how many such slices there are.
    twisted: whether it is a torus whose links around one axis come back shifted along another
        (https://docs.cloud.google.com/tpu/docs/v4#twisted-tori).
    """

    generation: Generation
    shape: tuple[int, ...]
    host: tuple[int, int, int]
    slices: int = 1
    twisted: bool = False

    def __str__(self) -> str:
        return f"{self.generation.name}:{'x'.join(map(str, self.shape))}{'_twisted' if self.twisted else ''}"

    @property
    def num_devices(self) -> int:
        """How many devices JAX would see, over all slices."""
        return math.prod(self.shape) * self.generation.cores * self.slices

    @property
    def num_hosts(self) -> int:
        """How many hosts have the chips, over all slices; JAX runs a process on each."""
        return math.prod(self.shape) // math.prod(self.host) * self.slices

    def host_of(self, coords: Sequence[int], slice_index: int = 0) -> int:
        """Return the number of the host that has a chip, which is the `process_index` of its devices.

        coords: x, y and z of the chip in its slice; more numbers do not count.
        """
        number, below = 0, 1
        for at, chips, size in zip(coords, self.host, (*self.shape, 1), strict=False):
            number, below = number + at // chips * below, below * (size // chips)
        return number + below * slice_index

    @property
    def wraps(self) -> tuple[bool, ...]:
        """For each axis, whether the last chip is linked to the first.

        Slices of whole cubes of 4x4x4 chips are tori, and smaller ones are not; in a pod of two axes, links go around
        those that are as long as the pod's (https://jax-ml.github.io/scaling-book/tpus, "TPU networking").
        """
        if len(self.shape) == 3:
            return (all(size % 4 == 0 for size in self.shape),) * 3
        return tuple(size == largest for size, largest in zip(self.shape, self.generation.pod, strict=True))

    def options(self) -> dict[str, Any]:
        """Return libtpu's options beside the topology's name."""
        options: dict[str, Any] = {"chips_per_host_bounds": list(self.host)}
        if self.generation.name == "v4":
            options["chip_config_name"] = "megacore"  # one device a chip, as JAX runs it
        if self.slices > 1:
            options["num_slices"] = self.slices
        if self.twisted:
            options["wrap"] = [True] * 3  # libtpu takes a twisted torus only where links go around every axis
        return options


def parse_topology(text: str, generations: Mapping[str, Generation], host: str = "", slices: int = 1) -> Topology:
    """Read a topology: a generation and chips along each axis, such as "v5e:2x4", "v5p:4x4x8" or "v5p:4x4x8_twisted".

    generations: those that there are, by name.
    host: chips of one host, such as "2x4"; "" is 2x2, and 1x1 for a single chip. It changes the code.
    slices: the number of slices of that shape.
    Raises StagecError with similar topologies; its key is that of a target's table.
    """
    if not re.match(TOPOLOGY, text):
        write = "write a generation and the chips along each axis, for example v5e:2x2 or v5p:2x2x1"
        raise _fault("topology", f'"{text}" is not a TPU topology', write)
    # Slices are untwisted unless they say so: _untwisted makes the same bytes.
    twisted, plain = text.endswith("_twisted"), text.removesuffix("_untwisted").removesuffix("_twisted")
    name, chips_along = re.split("[:=_]", plain)
    generation = _generation(name.lower().removeprefix("tpu "), generations)
    shape = _numbers(chips_along)
    # libtpu takes v5e:2x2x1 for v5e:2x2 and v5p:2x2 for v5p:2x2x1; one topology has one name here.
    shape = (*shape, *(1,) * (len(generation.pod) - len(shape)))
    while len(shape) > len(generation.pod) and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) > len(generation.pod):
        axes = len(generation.pod)
        what = f"{text}: a {generation.name} slice has {axes} axes, not {len(shape)}"
        raise _fault("topology", what, _near(generation, shape))
    if any(size > largest for size, largest in zip(sorted(shape), sorted(generation.pod), strict=True)):
        what = f"{text}: a {generation.name} pod has {'x'.join(map(str, generation.pod))} chips"
        raise _fault("topology", what, _near(generation, shape))
    if host and not _SHAPE.fullmatch(host):
        raise _fault("chips_per_host", f'"{host}" is not a number of chips along each axis', "write for example 2x2")
    chips = _numbers(host) if host else (1,) if math.prod(shape) == 1 else _HOST
    bounds = (*chips, 1, 1, 1)[:3]
    axes = max(len(shape), 2)
    if len(chips) > 3 or any(size % chips for size, chips in zip((*shape, 1)[:3], bounds, strict=True)):
        what = f"{text}: a slice consists of whole hosts, and a host has {'x'.join(map(str, chips[:axes]))} chips"
        raise _fault("chips_per_host" if host else "topology", what, _near(generation, shape))
    if slices < 1:
        raise _fault("slices", f"{slices} slices", "write 1 or more")
    if twisted and not _can_be_twisted(shape):
        what = f"{text}: libtpu twists a torus of three axes, multiples of the shortest, of which one is twice as long"
        write = "write for example v5p:4x4x8_twisted or v5p:4x8x8_twisted, or leave out _twisted"
        raise _fault("topology", what, write)
    return Topology(generation, shape, (bounds[0], bounds[1], bounds[2]), slices, twisted)


def _can_be_twisted(shape: Sequence[int]) -> bool:
    """Whether libtpu takes such a torus; for any other one it ends the process. It was asked for thirty of them."""
    shortest = min(shape)
    return len(shape) == 3 and shortest > 1 and 2 * shortest in shape and all(size % shortest == 0 for size in shape)


def topologies(generation: Generation) -> list[str]:
    """Return usual topologies of a generation, smallest first: those with powers of two as axes, and the pod."""
    single = "x".join("1" for _ in generation.pod)
    sizes = [[2**i for i in range(1, 6) if 2**i <= largest] for largest in generation.pod]
    if len(sizes) == 3:
        sizes[2].insert(0, 1)
    shapes = {shape for shape in itertools.product(*sizes) if list(shape[:2]) == sorted(shape[:2])}
    shapes |= {tuple(generation.pod)}
    ordered = sorted(shapes, key=lambda shape: (math.prod(shape), shape))
    named = [f"{generation.name}:{'x'.join(map(str, shape))}" for shape in ordered]
    # v2 and v3 come in boards of four.
    return named if generation.name in ("v2", "v3") else [f"{generation.name}:{single}", *named]


def _generation(name: str, generations: Mapping[str, Generation]) -> Generation:
    known = generations.get(_OTHER_NAMES.get(name, name))
    if known:
        return known
    what = f"there is no TPU generation {name}; libtpu knows {', '.join(generations)}"
    near = f'did you mean "{_HINTS[name]}"?' if name in _HINTS else nearest(name, generations)
    raise _fault("topology", what, near if near.startswith("did") else "")


def _near(generation: Generation, shape: Sequence[int]) -> str:
    chips = math.prod(shape)

    def distance(text: str) -> float:
        return abs(math.log(math.prod(_numbers(text.partition(":")[2])) / chips))

    near = sorted(topologies(generation), key=distance)[:3]
    return f"write for example {', '.join(near[:-1])} or {near[-1]}"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


def _fault(key: str, what: str, write: str) -> StagecError:
    return StagecError(Problem("", key, what, write))
