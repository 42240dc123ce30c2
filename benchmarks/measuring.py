"""How a benchmark is measured, and what it returns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """What the command line says.

    folder: an empty folder for what a benchmark writes.
    rounds: how often each is measured; a benchmark that takes long may do fewer, and says so in its rows.
    sizes: how many functions the small, the middle and the large workspace have.
    """

    folder: Path
    rounds: int = 5
    sizes: tuple[int, int, int] = (10, 100, 1000)


@dataclass(frozen=True)
class Row:
    """A line of the table.

    name: what was measured. against: what it is compared with; "" for a number that is compared with nothing.
    ratio: the median over all rounds of one by the other; with another unit than "x" the median of the number itself.
    target: what it should be at the most; None where it is reported only.
    seconds: what each round took, by name, in the order of rounds.
    unit: of ratio and target: "x", "s", "MB", "MiB".
    note: what a reader must know besides, such as the number of rounds.
    """

    name: str
    against: str
    ratio: float
    target: float | None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    unit: str = "x"
    note: str = ""


def interleaved(rounds: int, timed: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Call each in turn, all of them again for every round; return by name the seconds that they return.

    So what else the machine does meets all of them. A callable takes its own time: what it prepares does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, measure in timed.items():
            seconds[name].append(measure())
    return seconds


def ratio(seconds: Mapping[str, list[float]], name: str, other: str) -> float:
    """Return the median over the rounds of `name` by `other`."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[other], strict=True))


def as_table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| benchmark | against | measured | target | seconds, median |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        medians = ", ".join(f"{name} {_number(statistics.median(values))}" for name, values in row.seconds.items())
        target = "reported" if row.target is None else f"<= {_number(row.target)}{_unit(row)}"
        name = f"{row.name} ({row.note})" if row.note else row.name
        lines.append(f"| {name} | {row.against or '-'} | {_number(row.ratio)}{_unit(row)} | {target} | {medians} |")
    return "\n".join(lines) + "\n"


def _unit(row: Row) -> str:
    return "x" if row.unit == "x" else f" {row.unit}"


def _number(value: float) -> str:
    """Three digits that count, however small: 0.000012, 0.0123, 1.23, 123."""
    digits = f"{value:#.3g}"
    return f"{value:,.0f}" if value >= 100 else (digits if "e" not in digits else f"{value:.6f}")
