"""What a rehearsal shows a person: a table of programs, storms of compilations, what did not fit, and what differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stagec.building.limits import in_bytes
from stagec_rehearse import programs
from stagec_rehearse.programs import Program, Rehearsal
from stagec_rehearse.running import Ended


@dataclass(frozen=True)
class Told:
    """What there is to tell of a rehearsal. Of each list, a line is a fault; misses: None if no folder was given."""

    rehearsal: Rehearsal
    ended: Ended
    differences: Sequence[str]
    faults: Sequence[str]
    missing: Sequence[str]
    misses: Sequence[str] | None


COLUMNS = ("seconds", "memory", "flops", "runs", "program", "line")
_ROWS = 30
"""Rows of the table; programs.toml has all."""


def text(told: Told) -> str:
    """Return the report. The programs that took longest to compile come first."""
    rehearsal = told.rehearsal
    lines = ["", summary(told), ""]
    by_time = sorted(rehearsal.programs, key=lambda program: -program.seconds)
    rows = [COLUMNS, *map(row, by_time[:_ROWS])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  ".join(_padded(cells, widths)).rstrip() for cells in rows]
    if len(by_time) > _ROWS:
        lines.append(f"and {len(by_time) - _ROWS} more")
    for title, told_of_it in parts(told):
        lines += ["", title, *(f"  {line}" for line in told_of_it)]
    return "\n".join(lines) + "\n"


def summary(told: Told) -> str:
    """Return the line that says what was rehearsed."""
    rehearsal = told.rehearsal
    count, runs = len(rehearsal.programs), sum(program.runs for program in rehearsal.programs)
    device = f"{rehearsal.devices} virtual {rehearsal.device}" if rehearsal.device != "cpu" else "cpu"
    if rehearsal.processes > 1:
        device = f"{device}, {rehearsal.processes} processes"
    return f"rehearsed on {device}: {count} programs, run {runs} times, {_end(told.ended)}"


def parts(told: Told) -> list[tuple[str, Sequence[str]]]:
    """Return what there is to tell besides the table: a title for each part, and its lines."""
    listed = told.rehearsal.programs
    hits = f"{sum(each.hits for each in listed)} of {sum(each.compiled for each in listed)} compilations"
    large = [
        f"{_where(program)} has {constant['aval']}, {in_bytes(constant['bytes'])}: pass it as an argument"
        for program in listed
        for constant in program.constants
    ]
    stormy = [
        f"{_where(program)} was compiled {times} times: {reason}" for program, times, reason in programs.storms(listed)
    ]
    every = [
        ("found in JAX's cache:", [] if told.misses is None else [hits]),
        ("not found:", told.misses or []),
        ("not compiled, or not known:", [f"{_where(each)}: {each.error}" for each in listed if each.error]),
        (
            "compiled, and not run, because a virtual device lacks what it calls; its results were zeros:",
            [f"{_where(each)} calls {each.not_run}" for each in listed if each.not_run],
        ),
        (
            "not built, so JAX compiles it at each start:",
            [f"{_where(each)}: {each.not_kept}" for each in listed if each.not_kept],
        ),
        (
            "not computed, so its results were zeros:",
            [f"{_where(each)}: {each.zeros}" for each in listed if each.zeros],
        ),
        ("compiled again and again:", stormy),
        ("large constants inside programs:", large),
        ("other than before:", told.differences),
        ("over the budget:", told.faults),
        ("not rehearsed, so nothing was written:", told.missing),
    ]
    return [(title, lines) for title, lines in every if lines]


def plain(told: Told) -> dict[str, Any]:
    """Return the same for `--json`."""
    values = asdict(told)
    return {"kind": "rehearsal", **values.pop("rehearsal"), **values}


def _end(ended: Ended) -> str:
    if ended.status is None:
        return f"then ended: {ended.why}" + (f", and was at {ended.line}" if ended.line else "")
    return "to its end" if not ended.status else f"until it failed with status {ended.status}"


def row(program: Program) -> tuple[str, ...]:
    """Return what `COLUMNS` says of a program."""
    memory = in_bytes(program.bytes)
    where = program.line or "?"
    return f"{program.seconds:.2f}", memory, f"{program.flops:.3g}", str(program.runs), program.name, where


def _padded(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell.rjust(width) if place < 4 else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]


def _where(program: Program) -> str:
    return f"{program.name} ({program.line})"
