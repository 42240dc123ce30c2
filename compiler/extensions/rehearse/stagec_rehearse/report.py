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


_ROWS = 30
"""Rows of the table; programs.toml has all."""


def text(told: Told) -> str:
    """Return the report. The programs that took longest to compile come first."""
    rehearsal = told.rehearsal
    count, runs = len(rehearsal.programs), sum(program.runs for program in rehearsal.programs)
    device = f"{rehearsal.devices} virtual {rehearsal.device}" if rehearsal.device != "cpu" else "cpu"
    lines = ["", f"rehearsed on {device}: {count} programs, run {runs} times, {_end(told.ended)}", ""]
    by_time = sorted(rehearsal.programs, key=lambda program: -program.seconds)
    rows = [("seconds", "memory", "flops", "runs", "program", "line"), *map(_row, by_time[:_ROWS])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  ".join(_padded(row, widths)).rstrip() for row in rows]
    if count > _ROWS:
        lines.append(f"and {count - _ROWS} more")
    if told.misses is not None:
        events, found = (sum(getattr(each, name) for each in rehearsal.programs) for name in ("compiled", "found"))
        lines += ["", f"found in JAX's cache: {found} of {events} compilations"]
        lines += _part("not found:", told.misses)
    failed = [f"{_where(program)}: {program.error}" for program in rehearsal.programs if program.error]
    lines += _part("not compiled, or not known:", failed)
    unrun = [f"{_where(program)} calls {program.not_run}" for program in rehearsal.programs if program.not_run]
    lines += _part("compiled, and not run, because a virtual device lacks what it calls; its results were zeros:", unrun)
    unkept = [f"{_where(program)}: {program.not_kept}" for program in rehearsal.programs if program.not_kept]
    lines += _part("not built, because JAX keeps no such program and compiles it at each start:", unkept)
    stormy = [
        f"{_where(program)} was compiled {times} times: {reason}"
        for program, times, reason in programs.storms(rehearsal.programs)
    ]
    lines += _part("compiled again and again:", stormy)
    large = [
        f"{_where(program)} has {constant['aval']}, {in_bytes(constant['bytes'])}: pass it as an argument"
        for program in rehearsal.programs
        for constant in program.constants
    ]
    lines += _part("large constants inside programs:", large)
    lines += _part("other than before:", told.differences)
    lines += _part("over the budget:", told.faults)
    lines += _part("not rehearsed, so nothing was written:", told.missing)
    return "\n".join(lines) + "\n"


def plain(told: Told) -> dict[str, Any]:
    """Return the same for `--json`."""
    values = asdict(told)
    return {"kind": "rehearsal", **values.pop("rehearsal"), **values}


def _end(ended: Ended) -> str:
    if ended.status is None:
        return f"then ended: {ended.why}" + (f", and was at {ended.line}" if ended.line else "")
    return "to its end" if not ended.status else f"until it failed with status {ended.status}"


def _row(program: Program) -> tuple[str, ...]:
    memory = in_bytes(program.bytes)
    where = program.line or "?"
    return f"{program.seconds:.2f}", memory, f"{program.flops:.3g}", str(program.runs), program.name, where


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell.rjust(width) if place < 4 else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def _where(program: Program) -> str:
    return f"{program.name} ({program.line})"


def _part(title: str, lines: Sequence[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines)] if lines else []
