"""What a rehearsal shows a person, or a build of its programs: a table, and what there is to tell of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stagec.backends.analysis import UNKNOWN
from stagec.building.limits import in_bytes
from stagec.core.messages.errors import Problem, StagecError
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


@dataclass(frozen=True)
class Row:
    """A program in a table. figures: numbers, -1 where one is not known, and how a person reads them."""

    program: Program
    figures: Sequence[tuple[float, str]]
    target: Sequence[str] = ()

    @property
    def cells(self) -> list[str]:
        """What the columns say of it."""
        return [*(text for _, text in self.figures), *self.target, self.program.name, self.program.line or "?"]


@dataclass(frozen=True)
class Report:
    """What a person is shown. The largest first figure comes first.

    said: the line that says what it is of. parts: what there is to tell besides the table, a title and lines each.
    columns: titles of the table.
    """

    said: str
    parts: Sequence[tuple[str, Sequence[str]]]
    columns: Sequence[str]
    rows: Sequence[Row]

    @property
    def ordered(self) -> list[Row]:
        """The rows, as they are shown."""
        return sorted(self.rows, key=lambda row: -row.figures[0][0])


_ROWS = 30
"""Rows of the table; programs.toml has all."""


def of_rehearsal(told: Told) -> Report:
    """Return the report of a rehearsal."""
    rows = [
        Row(
            program,
            [
                (program.seconds, f"{program.seconds:.2f}"),
                (program.bytes, in_bytes(program.bytes)),
                (program.flops, f"{program.flops:.3g}"),
                (program.runs, str(program.runs)),
            ],
        )
        for program in told.rehearsal.programs
    ]
    return Report(_summary(told), _parts(told), ("seconds", "memory", "flops", "runs", "program", "line"), rows)


def of_build(rehearsal: Rehearsal, costs: Mapping[tuple[str, str], Mapping[str, Any]], path: str) -> Report:
    """Return the report of a build. Raises StagecError if the costs of a program are not there.

    costs: what `programs.costs` read, by target and file of a program. path: of the programs.toml.
    """
    targets = list(dict.fromkeys(target for target, _ in costs))
    built = [program for program in rehearsal.programs if not program.not_kept]
    lacking = [(program, target) for target in targets for program in built if (target, program.file) not in costs]
    if lacking:
        write = "give what stagec action jax-compile wrote of it"
        faults = (f"the costs of {_where(program)} for {target} are not given" for program, target in lacking)
        raise StagecError(*(Problem(path, "programs", what, write) for what in faults))
    size = in_bytes(sum(taken["size"] for taken in costs.values()))
    runs = sum(program.runs for program in built)
    said = f"built for {', '.join(targets)}: {len(built)} programs, {size}, run {runs} times in the rehearsal"
    around: dict[str, list[str]] = {}
    for target in targets:
        for program in built:
            for issue, option in costs[target, program.file]["avoided"].items():
                around.setdefault(f"{issue} is avoided, with {option}", []).append(f"{_where(program)} for {target}")
    how = Counter(", ".join(f"{name} = {value}" for name, value in _set(program)) for program in built)
    parts = [
        ("compiled with settings of the program's own:", [f"{how[each]} with {each}" for each in sorted(how) if each]),
        ("compiled around a defect of XLA:", [f"{issue}: {', '.join(names)}" for issue, names in around.items()]),
        *_of_programs(rehearsal),
    ]
    columns = ("memory", "flops", "takes at least", "size", "runs", "target", "program", "line")
    rows = [Row(each, _taken(each, costs[target, each.file]), [target]) for target in targets for each in built]
    return Report(said, [(title, lines) for title, lines in parts if lines], columns, rows)


def _set(program: Program) -> list[tuple[str, Any]]:
    return sorted({**program.settings, **program.options}.items())


def _taken(program: Program, costs: Mapping[str, Any]) -> list[tuple[float, str]]:
    """Return the figures of a program that was built."""
    unknown, least = (-1.0, UNKNOWN), costs["roofline"]
    memory, flops = costs["peak_bytes"], costs["flops"]
    return [
        (memory, in_bytes(memory)) if memory != UNKNOWN else unknown,
        (flops, f"{flops:.3g}") if flops != UNKNOWN else unknown,
        (least["seconds"], f"{1e6 * least['seconds']:.3g} \N{MICRO SIGN}s, {least['bound']}")
        if least != UNKNOWN
        else unknown,
        (costs["size"], in_bytes(costs["size"])),
        (program.runs, str(program.runs)),
    ]


def text(report: Report) -> str:
    """Return the report as text."""
    lines = ["", report.said, ""]
    rows = [report.columns, *(row.cells for row in report.ordered[:_ROWS])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = len(report.rows[0].figures) if report.rows else 0
    lines += ["  ".join(_padded(cells, widths, numbers)).rstrip() for cells in rows]
    if len(report.rows) > _ROWS:
        lines.append(f"and {len(report.rows) - _ROWS} more")
    for title, told_of_it in report.parts:
        lines += ["", title, *(f"  {line}" for line in told_of_it)]
    return "\n".join(lines) + "\n"


def _summary(told: Told) -> str:
    """Return the line that says what was rehearsed."""
    rehearsal = told.rehearsal
    count, runs = len(rehearsal.programs), sum(program.runs for program in rehearsal.programs)
    device = f"{rehearsal.devices} virtual {rehearsal.device}" if rehearsal.device != "cpu" else "cpu"
    if rehearsal.processes > 1:
        device = f"{device}, {rehearsal.processes} processes"
    return f"rehearsed on {device}: {count} programs, run {runs} times, {_end(told.ended)}"


def _parts(told: Told) -> list[tuple[str, Sequence[str]]]:
    listed = told.rehearsal.programs
    hits = f"{sum(each.hits for each in listed)} of {sum(each.compiled for each in listed)} compilations"
    every = [
        ("found in JAX's cache:", [] if told.misses is None else [hits]),
        ("not found:", told.misses or []),
        ("not compiled, or not known:", [f"{_where(each)}: {each.error}" for each in listed if each.error]),
        (
            "compiled, and not run, because a virtual device lacks what it calls; its results were zeros:",
            [f"{_where(each)} calls {each.not_run}" for each in listed if each.not_run],
        ),
        (
            "not computed, so its results were zeros:",
            [f"{_where(each)}: {each.zeros}" for each in listed if each.zeros],
        ),
        *_of_programs(told.rehearsal),
        ("other than before:", told.differences),
        ("over the budget:", told.faults),
        ("not rehearsed, so nothing was written:", told.missing),
    ]
    return [(title, lines) for title, lines in every if lines]


def _of_programs(rehearsal: Rehearsal) -> list[tuple[str, Sequence[str]]]:
    """Return what there is to tell of programs, whether they were rehearsed or built."""
    listed = rehearsal.programs
    large = [
        f"{_where(program)} has {constant['aval']}, {in_bytes(constant['bytes'])}: pass it as an argument"
        for program in listed
        for constant in program.constants
    ]
    stormy = [
        f"{_where(program)} was compiled {times} times: {reason}"
        for program, times, reason in programs.storms(rehearsal)
    ]
    not_built = [f"{_where(each)}: {each.not_kept}" for each in listed if each.not_kept]
    return [
        ("not built, so JAX compiles it at each start:", not_built),
        ("compiled again and again:", stormy),
        ("large constants inside programs:", large),
    ]


def plain(told: Told) -> dict[str, Any]:
    """Return the same for `--json`."""
    values = asdict(told)
    return {"kind": "rehearsal", **values.pop("rehearsal"), **values}


def _end(ended: Ended) -> str:
    if ended.status is None:
        return f"then ended: {ended.why}" + (f", and was at {ended.line}" if ended.line else "")
    return "to its end" if not ended.status else f"until it failed with status {ended.status}"


def _padded(cells: Sequence[str], widths: Sequence[int], numbers: int) -> list[str]:
    return [
        cell.rjust(width) if place < numbers else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]


def _where(program: Program) -> str:
    return f"{program.name} ({program.line})"
