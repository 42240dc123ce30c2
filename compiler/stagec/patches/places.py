"""Where a library has the sites of a change: in the builds of stagec's own locks, known instead of sought.

To search jaxlib's code takes a process that compiles 0.1 CPU seconds, and one that exports 0.24, a tenth of its start.
places.json has the addresses by build-id, counted from the first byte of the code; `tools/known_builds.py places`
writes them. Each is looked at again, and `known_builds.known` counts those that are left: so an address that has
something else is an error as it was with a search. Only a search would find a site more; a build has none more than its
row says, and the build-id says which build it is.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from stagec.patches.machine_code import Code

TABLE = Path(__file__).with_suffix(".json")
CHANGES = ("cpuid", "every_cpuid", "hash_seeds")
"""The changes whose sites take a search."""


def of(code: Code, change: str) -> list[int] | None:
    """Return the addresses of the sites of a change; None if they must be sought, as in a file that is examined."""
    places = None if code.is_file else _places(code).get(change)
    return None if places is None else [code.address + place for place in places]


@functools.cache  # to read a build-id takes as long as all that is left
def _places(code: Code) -> dict[str, list[int]]:
    return dict(json.loads(TABLE.read_text("ascii")).get(code.build_id(), {}))
