"""Which releases read an exported artifact: JAX promises this for releases within six months of the exporting one.

https://docs.jax.dev/en/latest/export/export.html#compatibility-guarantees: a JAX that is released within six months
reads it. A later release may refuse it, as jax 0.11.1 and newer do; the JAX that wrote it always reads it. So only the
release day of the reading JAX counts, and not the day of the reading.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection

from stagec.bundle.index import UNKNOWN
from stagec.core.builds.releases import known, release

_MONTHS = 6
_SOON = datetime.timedelta(days=90)
"""A build warns when less than this is left: in that time, JAX has two or three releases."""


def may_read(jaxlib: str, until: str, made_with: str | None) -> tuple[bool | None, str]:
    """Return whether JAX promises that a jaxlib reads an exported artifact, and a sentence if not.

    The first is None if stagec does not know the day of that jaxlib. jaxlib: the reading version. until: the last day
    (YYYY-MM-DD) of the releases that read it; UNKNOWN: any does. made_with: the version that wrote it, which always
    reads it.
    """
    if until == UNKNOWN or made_with == jaxlib:
        return True, ""
    here = release(jaxlib).day  # days written so have the order of strings
    promise = f"JAX promises that releases until {until} read it"
    if not here:
        return None, f"{promise}, and this stagec does not know of which day jaxlib {jaxlib} is"
    return here <= until, "" if here <= until else f"{promise}, and jaxlib {jaxlib} is of {here}"


def readable_until(jax: str | None) -> str:
    """Return the last day (YYYY-MM-DD) of the releases of JAX that read the exports of the version `jax`.

    UNKNOWN for a version that stagec does not know, and for None, an artifact that JAX did not make.
    """
    if not (written := release(jax or "").day):
        return UNKNOWN
    start = datetime.date.fromisoformat(written)
    year, month, day = start.year + (start.month + _MONTHS - 1) // 12, (start.month + _MONTHS - 1) % 12 + 1, start.day
    while True:
        try:
            return datetime.date(year, month, day).isoformat()
        except ValueError:  # the 31st of a shorter month
            day -= 1


def ends_soon(until: str, today: datetime.date) -> bool:
    """Return whether less than 90 days are left of a promise, or none. until: as `readable_until` returns it."""
    return until != UNKNOWN and datetime.date.fromisoformat(until) - today < _SOON


def newer_jax(jax: str, here: Collection[str]) -> str:
    """Return what to do for a promise that ends later than that of `jax`.

    here: the releases with wheels for this Python.
    """
    releases = list(known())
    newer = releases[releases.index(jax) + 1 :] if jax in releases else []
    if not newer:
        return "upgrade stagec: this one knows no newer jax"
    python, newest = "", newer[-1]
    if fitting := [version for version in newer if version in here]:
        newest = fitting[-1]
    else:
        python = "this Python has no newer jax: take a newer Python (for Bazel: STAGEC_PYTHON=/path/to/python3)\n"
    write = f"{python}write jax=={newest} and jaxlib=={newest} into requirements.in"
    write += ", and run bazel run @stagec//:lock -- requirements.in"
    return f"{write}\nwithout Bazel: python3 -m pip install jax=={newest} jaxlib=={newest}"
