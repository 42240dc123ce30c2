"""Until when an exported artifact is readable: JAX promises it for six months after the release that exported it.

https://docs.jax.dev/en/latest/export/export.html#compatibility-guarantees: a JAX that is released within six months
reads it. One that is released later may refuse it, as jax 0.11.1 and newer do; the JAX that wrote it always reads it.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from stagec.bundle.index import UNKNOWN

RELEASED: Mapping[str, str] = {
    "0.10.1": "2026-05-18",
    "0.10.2": "2026-06-17",
    "0.11.0": "2026-07-16",
    "0.11.1": "2026-08-17",
    "0.11.2": "2026-09-17",
    "0.12.0": "2026-10-16",
    "0.12.0.1": "2026-10-20",
}
"""The day of each release of jax that stagec works with: that of the files in its wheel on PyPI.

    pip download --no-deps jax==0.10.1 && unzip -l jax-0.10.1-py3-none-any.whl
"""
_MONTHS = 6


def readable_until(jax: str | None) -> str:
    """Return the day (YYYY-MM-DD) until which a released JAX reads what the version `jax` exported.

    UNKNOWN for a version that is not in `RELEASED`, and for None: an artifact that was not made by JAX.
    """
    released = RELEASED.get(jax or "")
    if released is None:
        return UNKNOWN
    year, month, day = map(int, released.split("-"))
    year, month = year + (month + _MONTHS - 1) // 12, (month + _MONTHS - 1) % 12 + 1
    while True:
        try:
            return datetime.date(year, month, day).isoformat()
        except ValueError:  # the 31st of a shorter month
            day -= 1
