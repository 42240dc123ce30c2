"""How long links need for exchanges: by hand, for tori and grids of chips, switches, and the networks between them."""

import itertools

import pytest

from stagec.costs.collectives import Exchange
from stagec.costs.links import Links, Switch, Torus

B = 100.0
"""Bytes a second of a link in one direction."""
S = 1200
"""Bytes of the arrays."""


def coords(*shape: int, cores: int = 1) -> list[tuple[int, ...]]:
    """Place and core of each device of a slice, row by row."""
    whole = (*shape, *(1,) * (3 - len(shape)))
    return [(*place, core) for place in itertools.product(*map(range, whole)) for core in range(cores)]


def seconds(torus: Torus, kind: str, among: str, size: int = S) -> float | None:
    """The time of an exchange of all devices of a slice."""
    places = coords(*torus.shape, cores=torus.cores)
    return Links(torus, len(places)).seconds(Exchange(kind, size, among), len(places), places)


RING = Torus((4, 4), (True, True), B)
GRID = Torus((4, 4), (False, False), B)
ROWS, COLUMNS, ALL = "[4,4]<=[16]", "[4,4]<=[4,4]T(1,0)", "{}"


@pytest.mark.parametrize(
    ("torus", "kind", "among", "expected"),
    [
        # A device gets 3/4 of the arrays, by two links of a ring, or by the one at the end of a row.
        (RING, "all-gather", ROWS, S * 3 / 4 / (2 * B)),
        (RING, "all-gather", COLUMNS, S * 3 / 4 / (2 * B)),
        (GRID, "all-gather", ROWS, S * 3 / 4 / B),
        (RING, "reduce-scatter", ROWS, S * 3 / 4 / (2 * B)),
        (RING, "all-reduce", ROWS, 2 * S * 3 / 4 / (2 * B)),
        (RING, "collective-broadcast", ROWS, S / (2 * B)),
        # Both axes at the same time.
        (RING, "all-gather", ALL, S * 15 / 16 / (4 * B)),
        (GRID, "all-gather", ALL, S * 15 / 16 / (2 * B)),
        # Half of a row has no link around.
        (RING, "all-gather", "[8,2]<=[16]", S / 2 / B),
        # Every second chip of a row: two groups share its links.
        (RING, "all-gather", "{{0,2},{1,3},{4,6},{5,7},{8,10},{9,11},{12,14},{13,15}}", S / 2 / (2 * B / 2)),
        # A quarter of a slice.
        (RING, "all-gather", "{{0,1,4,5},{2,3,6,7},{8,9,12,13},{10,11,14,15}}", S * 3 / 4 / (2 * B)),
        # Two chips on each side of the middle send half of theirs across it: by the link there and the one around.
        (RING, "all-to-all", ROWS, 2 * S / 2 / (2 * B)),
        (GRID, "all-to-all", ROWS, 2 * S / 2 / B),
        (RING, "all-to-all", ALL, 8 * S / 2 / (8 * B)),
        (RING, "all-gather", "{{0},{1}}", 0.0),
    ],
)
def test_a_slice(torus: Torus, kind: str, among: str, expected: float) -> None:
    assert seconds(torus, kind, among) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("torus", "pairs", "expected"),
    [
        (RING, "{{0,1},{1,2},{2,3},{3,0}}", S / B),
        # The last one goes back through the whole row.
        (GRID, "{{0,1},{1,2},{2,3},{3,0}}", S / B),
        (GRID, "{{0,3},{1,3}}", 2 * S / B),
        # Two links away in a ring of four: half goes each way around, here by the link that the other one takes too.
        (RING, "{{0,2}}", S / 2 / B),
        (RING, "{{0,3},{1,3}}", 1.5 * S / B),
        (RING, "{{0,5}}", S / B),
        (RING, "{{3,3}}", 0.0),
    ],
)
def test_a_permutation_in_a_slice(torus: Torus, pairs: str, expected: float) -> None:
    assert seconds(torus, "collective-permute", pairs) == pytest.approx(expected)


def test_the_cores_of_a_chip_share_its_links() -> None:
    chips = Torus((2, 2), (False, False), B, cores=2)
    # Devices 0 and 1 are one chip.
    assert seconds(chips, "all-gather", "{{0,1},{2,3},{4,5},{6,7}}") == 0.0
    assert seconds(chips, "all-gather", "{{0,2},{1,3},{4,6},{5,7}}") == pytest.approx(S / 2 / (B / 2))
    assert seconds(chips, "all-gather", "{{0,1,2,3},{4,5,6,7}}") == pytest.approx(S / 2 / B)
    assert seconds(chips, "all-gather", ALL) == pytest.approx(S * 3 / 4 / (2 * B))


def test_three_axes() -> None:
    torus = Torus((4, 4, 4), (True, True, True), B)
    assert seconds(torus, "all-reduce", ALL) == pytest.approx(2 * S * 63 / 64 / (6 * B))
    assert seconds(torus, "all-gather", "[4,16]<=[64]") == pytest.approx(S * 15 / 16 / (4 * B))


SWITCH = Links(Switch(B), domain=4, network=10.0)


@pytest.mark.parametrize(
    ("kind", "among", "expected"),
    [
        ("all-gather", "[2,4]<=[8]", S * 3 / 4 / B),
        ("all-reduce", "[2,4]<=[8]", 2 * S * 3 / 4 / B),
        ("all-to-all", "[2,4]<=[8]", S * 3 / 4 / B),
        ("collective-broadcast", "[2,4]<=[8]", S / B),
        # The four devices of a partition each get a quarter of what the other one has; one alone gets all of it.
        ("all-gather", "{}", S / 2 / 4 / 10),
        ("all-reduce", "{}", 2 * S / 2 / 4 / 10),
        ("all-gather", "[4,2]<=[2,4]T(1,0)", S / 2 / 10),
        ("all-to-all", "{}", S / 2 / 10),
        ("collective-permute", "{{0,1},{1,0}}", S / B),
        ("collective-permute", "{{0,1},{1,4}}", S / 10),
    ],
)
def test_partitions_and_the_network_between_them(kind: str, among: str, expected: float) -> None:
    assert SWITCH.seconds(Exchange(kind, S, among), 8, ()) == pytest.approx(expected)


def test_several_slices() -> None:
    links = Links(RING, domain=16, network=10.0)
    places = coords(4, 4) * 2
    assert links.seconds(Exchange("all-gather", S, "[2,16]<=[32]"), 32, places) == pytest.approx(S * 15 / 16 / (4 * B))
    across = links.seconds(Exchange("all-reduce", S, "[16,2]<=[2,16]T(1,0)"), 32, places)
    assert across == pytest.approx(2 * S / 2 / 10)


@pytest.mark.parametrize("kind", ["all-gather", "collective-permute"])
def test_what_is_not_known(kind: str) -> None:
    near, far = ("{{0,1}}", "{{0,4}}")
    assert Links(None, 4, 10.0).seconds(Exchange(kind, S, near), 8, ()) is None
    assert Links(Switch(B), 4).seconds(Exchange(kind, S, far), 8, ()) is None
    assert Links(Switch(B), 4).seconds(Exchange(kind, S, near), 8, ()) is not None
    assert Links(None, 4, 10.0).seconds(Exchange(kind, S, far), 8, ()) is not None
