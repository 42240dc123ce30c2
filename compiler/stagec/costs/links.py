"""How long the links between devices need at least for an exchange of arrays.

TPUs of a slice are a torus, or a grid where links do not go around; NVIDIA devices of a partition are at a switch;
a network joins slices and partitions. docs/costs.md lists the assumptions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stagec.costs import collectives
from stagec.costs.collectives import Exchange

_ROUNDS = {"all-reduce": 2}
"""How often parts of the arrays go around all devices: an all-reduce scatters the sums and gathers them."""
Coords = tuple[int, ...]
"""The chip of a device along each axis, and its core."""


def _received(kind: str, parts: int) -> float:
    """How many times the bytes of the arrays each of `parts` gets from others."""
    return 1.0 if kind == "collective-broadcast" else _ROUNDS.get(kind, 1) * (parts - 1) / parts


@dataclass(frozen=True)
class Torus:
    """Chips in rows, each with links to the next ones along each axis.

    shape: chips along each axis; wraps: whether the last is linked to the first. bandwidth: bytes a second of one link
    in one direction. cores: devices of a chip, which share its links.
    """

    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    bandwidth: float
    cores: int = 1

    def seconds(self, kind: str, size: int, coords: Sequence[Coords]) -> float:
        """Return how long an exchange of `size` bytes takes in a group of devices.

        coords: chip along each axis and core of each of them. All other groups, which the same instruction makes
        exchange arrays at the same time, lie alike.
        """
        chips = {chip[: len(self.shape)] for chip in coords}
        if len(chips) < 2:
            return 0.0
        sides = [sorted(along) for along in map(set, zip(*chips, strict=True))]
        # A group that leaves chips out shares the links around them with those groups that these are in.
        spans = [len(s) if s[-1] - s[0] + 1 == len(s) else n for s, n in zip(sides, self.shape, strict=True)]
        share = len(coords) / (math.prod(spans) * self.cores)
        links = [self._links(span, axis) for axis, span in enumerate(spans)]
        whole = self.bandwidth * sum(links) * share
        received = size * _received(kind, len(chips)) / whole
        if not kind.endswith("all-to-all"):
            return received
        # Half of each device's data crosses the middle of each axis.
        per_link = size * len(coords) / len(chips) / 4 / self.bandwidth / share
        across = [len(side) * per_link / count for side, count in zip(sides, links, strict=True) if count]
        return max(*across, received)

    def _links(self, span: int, axis: int) -> int:
        """Links of a chip along an axis by which it gets the parts of others; at the end of a row there is one."""
        return 0 if span < 2 else 2 if self.wraps[axis] and span == self.shape[axis] else 1

    def permutation_seconds(self, size: int, pairs: Sequence[tuple[Coords, Coords]]) -> float:
        """Return the time to send `size` bytes from each device to another: the time of the busiest link.

        They go along one axis after the other, the shorter way; half of them each way around where both are as long.
        """
        used: Counter[tuple[Coords, int, int]] = Counter()
        for source, target in pairs:
            at = list(source[: len(self.shape)])
            for axis, end in enumerate(target[: len(self.shape)]):
                for distance, part in self._ways(at[axis], end, axis):
                    step = 1 if distance > 0 else -1
                    for turn in range(abs(distance)):
                        passed = [*at[:axis], (at[axis] + step * turn) % self.shape[axis], *at[axis + 1 :]]
                        used[tuple(passed), axis, step] += part
                at[axis] = end
        # Parts are halves.
        return max(used.values(), default=0) / 2 * size / self.bandwidth

    def _ways(self, start: int, end: int, axis: int) -> list[tuple[int, int]]:
        """Distances along an axis, and how many halves go each of them."""
        direct = end - start
        around = direct - math.copysign(self.shape[axis], direct) if self.wraps[axis] else math.inf
        if abs(direct) == abs(around):
            return [(direct, 1), (int(around), 1)]
        return [(direct if abs(direct) < abs(around) else int(around), 2)]


@dataclass(frozen=True)
class Switch:
    """Devices that all have the same way to all others: bandwidth is bytes a second of a device, in one direction."""

    bandwidth: float

    def seconds(self, kind: str, size: int, coords: Sequence[Coords]) -> float:
        """Return the time of an exchange of `size` bytes in a group of devices."""
        return size * _received(kind, len(coords)) / self.bandwidth if len(coords) > 1 else 0.0

    def permutation_seconds(self, size: int, pairs: Sequence[tuple[Coords, Coords]]) -> float:
        """Return the time to send `size` bytes from each device to another."""
        return size / self.bandwidth if any(source != target for source, target in pairs) else 0.0


@dataclass(frozen=True)
class Links:
    """How the devices of a target are connected.

    inside: those of a domain, which is a slice of TPUs, or a partition of NVIDIA devices; None if nothing is known
    of them. domain: how many devices it has. network: between domains, bytes a second of a device in one direction;
    None if that is not known.
    """

    inside: Torus | Switch | None
    domain: int
    network: float | None = None

    def seconds(self, exchange: Exchange, devices: int, coords: Sequence[Coords]) -> float | None:
        """Return the least time of an exchange; None if the target does not give the speed of the link.

        devices: of the program. coords: for each, x, y and z of its chip, and the core; empty for devices at a switch.
        Exchanges inside and between domains go on at the same time.
        """
        coords = tuple(coords) or tuple((i,) for i in range(devices))
        among = collectives.groups(exchange.among, devices)
        if exchange.kind == "collective-permute":
            pairs = [(source, target) for source, target in among if source != target]
            return self._longest(exchange, pairs, coords)
        times = [self._group(exchange, group, coords) for group in among]
        return None if None in times else max(filter(None, times), default=0.0)

    def _longest(self, exchange: Exchange, pairs: Sequence[tuple[int, int]], coords: Sequence[Coords]) -> float | None:
        """The time of a permutation: by the way that takes longest."""
        near = [pair for pair in pairs if pair[0] // self.domain == pair[1] // self.domain]
        times = [0.0]
        for domain in {source // self.domain for source, _ in near}:
            inside = [(coords[a], coords[b]) for a, b in near if a // self.domain == domain]
            if self.inside is None:
                return None
            times.append(self.inside.permutation_seconds(exchange.bytes, inside))
        if len(near) < len(pairs):
            if not self.network:
                return None
            times.append(exchange.bytes / self.network)
        return max(times)

    def _group(self, exchange: Exchange, group: Sequence[int], coords: Sequence[Coords]) -> float | None:
        """The time of a group of devices."""
        domains: dict[int, list[Coords]] = {}
        for device in group:
            domains.setdefault(device // self.domain, []).append(coords[device])
        members, kind = max(domains.values(), key=len), exchange.kind
        size, times = exchange.bytes, [0.0]
        if len(members) > 1:
            if self.inside is None:
                return None
            # Of an all-to-all, the rest goes to other domains at once.
            near = size * len(members) // len(group) if kind.endswith("all-to-all") else size
            times.append(self.inside.seconds(kind, near, members))
        if len(domains) > 1:
            if not self.network:
                return None
            # Each device of a domain exchanges a part of the arrays with those of the others that have the same part.
            apart = 1 / len(members) * _received(kind, len(domains))
            if kind.endswith("all-to-all"):
                apart = (len(group) - len(members)) / len(group)
            times.append(size * apart / self.network)
        return max(times)


@dataclass(frozen=True)
class Seconds:
    """How long an exchange takes at least, as `Links.seconds`; two of the same are equal. links: None: not known."""

    links: Links | None
    devices: int
    coords: tuple[Coords, ...]

    def __call__(self, exchange: Exchange) -> float | None:
        """Return it for one exchange; None if it is not known."""
        return self.links.seconds(exchange, self.devices, self.coords) if self.links else None
