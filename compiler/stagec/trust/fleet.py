"""Which machines of a fleet a bundle serves: those with a jaxlib that it has executables of. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from stagec.bundle import additions, crossings, expiry, index as bundle_index
from stagec.bundle.description import architecture
from stagec.core.builds import naming, releases
from stagec.core.data.strict_json import shown
from stagec.core.messages.errors import Problem, StagecError, mistake, nearest

Kinds: TypeAlias = Callable[[str], Collection[str]]
"""Returns the kinds of operations of an executable, by its member (`core/data/thunks.py`). Raises ValueError."""
_SHOWN = 3
"""How many functions a sentence names."""


def release(requirement: str, key: str) -> str:
    """Return the version in `jaxlib==0.12.0`. key: who says so, for messages. Raises StagecError."""
    if not re.match(naming.JAXLIB, requirement):
        raise StagecError(Problem("", key, f"{requirement!r} is not a release of jaxlib", "write jaxlib==0.12.0"))
    return requirement.partition("==")[2]


def serves(
    index: Mapping[str, Any],
    jaxlibs: Sequence[str],
    functions: Sequence[str] = (),
    targets: Sequence[str] = (),
    kinds: Kinds | None = None,
) -> list[dict[str, Any]]:
    """Return for each jaxlib, function and target whether there are executables for all sizes of the function.

    index: of a bundle. functions, targets: names, none: all. Of a row: "jaxlib", "function" (as in the index),
    "target", "ok", "executables" and "missing" (sizes, as a person reads them), and "exported": the fate of a call
    without an executable. A function without any executable, of target "", is served if stagec knows that this jaxlib
    may read its exported artifact. A function of `functions` has a row for each of `targets`.
    kinds: count executables of older jaxlibs too, where these were measured to have the same bits, or results within
    the tolerance that the function states, on the CPUs on which that was measured (`bundle/crossings.py`); then
    "measured" says how many, and "refused" by size why not. None: none.
    Raises StagecError for an unknown name, and if no function has a target of `targets`.
    """
    for what, names, known in (("function", functions, index["functions"]), ("target", targets, index["targets"])):
        for name in names:
            if name not in known:
                raise mistake(f"no {what} {name!r}", nearest(name, known))
    chosen = {name: function for name, function in index["functions"].items() if not functions or name in functions}
    rows = [
        row
        for jaxlib in jaxlibs
        for name, function in chosen.items()
        for row in _of_function(jaxlib, name, function, targets if functions else (), index["targets"], kinds)
        if not targets or row["target"] in ("", *targets)
    ]
    if not rows:
        raise mistake(f"no function has executables for {', '.join(targets)}" if targets else "it has no function")
    return rows


def _of_function(
    jaxlib: str,
    name: str,
    function: Mapping[str, Any],
    targets: Sequence[str],
    hardware: Mapping[str, Any],
    kinds: Kinds | None,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a function; one for each of `targets` too if it has executables for others alone."""
    until, maker = function["readable_until"], function["versions"].get("jaxlib")
    readable, why = expiry.may_read(jaxlib, until, maker)
    # JAX's promise is one of days, so a release counts only if its day is known; a release reads its own in any case.
    known = bool(releases.release(jaxlib).day) or maker == jaxlib
    exported = why or (
        f"this stagec does not know jaxlib {jaxlib}"
        if not known
        else "JAX promises nothing"
        if until == bundle_index.UNKNOWN
        else f"jaxlib {jaxlib} reads it, by JAX's promise"
    )
    row = {"jaxlib": jaxlib, "function": name, "target": "", "ok": known and readable is True, "executables": 0}
    # For each size, why none of the executables runs; the best of them counts: of this jaxlib, measured, neither.
    by_target: dict[str, dict[str, tuple[int, str]]] = {}
    for entry in sorted(function["executables"], key=additions.order):
        made_with, target = entry["versions"]["jaxlib"], hardware[entry["target"]]
        verdict = 0 if made_with == jaxlib else 2, ""
        if kinds and made_with != jaxlib:
            which = partial(kinds, entry["executable"])
            pair = crossings.maker(function, entry["executable"]), crossings.Jaxlib(jaxlib)
            near = crossings.within(function, entry["bucket"])
            why = crossings.refusal(which, *pair, architecture(target) or target["device_kind"], None, near)
            verdict = 2 if why else 1, why
        sizes = by_target.setdefault(entry["target"], {})
        what = shown(naming.bucket(entry["bucket"]))
        before = sizes.get(what, verdict)
        sizes[what] = before if before[0] < verdict[0] else verdict
    # A function without executables is compiled where it is loaded, so only the promise for its artifact counts.
    if not by_target:
        yield {**row, "missing": [], "exported": exported}
    for target in [name for name in targets if by_target and name not in by_target]:
        yield {**row, "target": target, "ok": False, "missing": [], "exported": exported}
    for target, sizes in by_target.items():
        refused = {what: why for what, (place, why) in sizes.items() if place == 2}
        missing = [*refused]
        count = {"ok": not missing, "executables": len(sizes) - len(missing), "missing": missing}
        if kinds:
            count |= {"measured": sum(place == 1 for place, _ in sizes.values()), "refused": refused}
        yield {**row, "target": target, **count, "exported": exported}


def by_jaxlib(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the rows of each jaxlib."""
    return {row["jaxlib"]: [other for other in rows if other["jaxlib"] == row["jaxlib"]] for row in rows}


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Sum up the rows of one jaxlib, for a person."""
    missing = [row for row in rows if not row["ok"]]
    if not missing:
        count = sum(row["executables"] for row in rows)
        compiled = sum(not row["target"] for row in rows)
        functions = len({row["function"] for row in rows})
        only = f", {compiled} of which {'is' if compiled == 1 else 'are'} compiled there" if compiled else ""
        older = sum(row.get("measured", 0) for row in rows)
        only += f", {older} of which {'is' if older == 1 else 'are'} of an older jaxlib, as measured" if older else ""
        return f"{count} executables of {functions} function{'s' if functions != 1 else ''}{only}"
    named = [
        f"{row['function']}{row['target'] and ' for '}{row['target']}"
        + (f" ({'; '.join(filter(None, row['missing']))})" if any(row["missing"]) else "")
        for row in missing
    ]
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    whys = ", ".join(dict.fromkeys(row["exported"] for row in missing))
    refused = dict.fromkeys(why for row in missing for why in row.get("refused", {}).values())
    measured = f"; of an older jaxlib: {'; '.join(refused)}" if refused else ""
    return f"no executable of {', '.join(named[:_SHOWN])}{more}{measured}; of the exported artifact: {whys}"
