"""`stagec inspect --sizes`: what takes the space of a bundle, and the limit on it."""

import json
from pathlib import Path

from tests.building import checked, stagec


def test_size_tells_what_takes_the_space(zoo: Path) -> None:
    size = zoo.stat().st_size
    lines = checked("inspect", zoo, "--sizes").splitlines()
    assert lines[0] == f"zoo: {size:,} bytes"
    assert any(line.endswith("executables of factorize") for line in lines)
    parts = json.loads(checked("inspect", zoo, "--sizes", "--json"))["parts"]
    assert sum(part["bytes"] for part in parts) == size
    assert checked("inspect", zoo, "--sizes", "--most", str(size)).startswith(
        f"zoo: {size:,} bytes, within the limit of {size:,} "
    )
    done = stagec("inspect", zoo, "--sizes", "--most", str(size - 1), "--rows", "1")
    assert done.returncode == 1
    assert done.stdout.startswith(
        f"FAILED  zoo: {size:,} bytes, over the limit of {size - 1:,} (manifest.bundle_size)\n"
    )


def test_size_shows_the_largest_first(zoo: Path) -> None:
    """Also where that is of no function: of many small ones, descriptions and the index take most."""
    parts = [part["bytes"] for part in json.loads(checked("inspect", zoo, "--sizes", "--json"))["parts"]]
    assert parts == sorted(parts, reverse=True)
    _, first, more = checked("inspect", zoo, "--sizes", "--rows", "1").splitlines()
    shown = checked("inspect", zoo, "--sizes", "--rows", str(len(parts))).splitlines()
    assert first.split() == shown[1].split()
    assert len(shown) == 1 + len(parts)
    assert more.endswith(f" {len(parts) - 1} more")
