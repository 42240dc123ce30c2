"""Baselines: the accepted costs of a manifest's executables, and their growth since.

A baseline is a JSON file beside the manifest, one line a metric in a stable order, so that people read and merge it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagec.audit.measurements import Executable
from stagec.backends.analysis import KERNEL_METRICS, UNKNOWN, Metric, of_kernels
from stagec.building.inventory import METRIC
from stagec.building.limits import IN_BYTES, in_bytes
from stagec.bundle.description import LARGEST
from stagec.core.builds.platforms import GPUS
from stagec.core.data import strict_json
from stagec.core.messages.errors import Problem, StagecError
from stagec.core.trees import json_shapes

FORMAT = 1
"""Version of the JSON form."""
DEFAULTS: Mapping[str, int | str] = {
    "peak_memory": "1%",
    "flops": "0%",
    "bytes_accessed": "1%",
    "executable_size": "5%",
    "spills": 0,
    "collectives": 0,
}
"""The default allowed growth of metrics; the others may always grow."""
_ARRAYS = 16
"""How many arrays of an executable a baseline has: the largest."""
_LISTED = 6
"""How many operations or arrays a message lists."""

Measured = dict[str, Any]
"""The costs of one executable: metrics by name; "collectives" and "operations" by kind, "arrays" by description."""


def measure(executables: Iterable[Executable]) -> dict[str, Measured]:
    """Return the costs of each executable, by its name. Raises StagecError if one has no inventory."""
    measured, problems = {}, []
    for executable in executables:
        if executable.inventory is None:
            write = f"build it with this stagec, and give the file {executable.name}.inventory.json with --inventory"
            problems.append(Problem("", executable.name, "its inventory is not there", write))
            continue
        analysis = executable.description.analysis
        arrays: dict[str, int] = {}
        for row in executable.inventory["arrays"]:
            key = " ".join(filter(None, (row["kind"], row["name"], row["type"])))
            if key in arrays or len(arrays) < _ARRAYS:
                arrays[key] = arrays.get(key, 0) + row["bytes"]
        of_gpu = executable.description.target.platform in GPUS
        metrics = {
            **(of_kernels(executable.inventory["kernels"]) if of_gpu else {}),
            "arrays": dict(sorted(arrays.items())),
            "bytes_accessed": analysis["bytes_accessed"],
            "collectives": {kind: row["count"] for kind, row in sorted(analysis["collectives"].items())},
            "executable_size": executable.description.executable_bytes,
            "flops": analysis["flops"],
            "operations": {kind: row["count"] for kind, row in sorted(executable.inventory["operations"].items())},
            "peak_memory": analysis["peak_bytes"],
            "stablehlo_sha256": executable.description.stablehlo_sha256,
        }
        measured[executable.name] = dict(sorted(metrics.items()))
    if problems:
        raise StagecError(*problems)
    return dict(sorted(measured.items()))


def to_json(manifest: str, measured: Mapping[str, Measured]) -> str:
    """Return the file's content. manifest: its name."""
    document = {"format": FORMAT, "kind": "baseline", "manifest": manifest, "executables": measured}
    return json.dumps(document, indent=1) + "\n"


def from_json(text: bytes, file: str, manifest: str, accept: str) -> dict[str, Measured]:
    """Read a baseline. manifest: the manifest that it must belong to. accept: the command for a new one, for messages.

    Raises StagecError, naming `file`, if it is damaged or another manifest's.
    """

    def refused(what: str) -> StagecError:
        return StagecError(Problem(file, "", what, f"write a new one: {accept}"))

    if b"\n<<<<<<< " in text or text.startswith(b"<<<<<<< "):
        raise refused("it has the marks of a merge that is not resolved")
    try:
        data = strict_json.parse(text, LARGEST)
        _BASELINE(data)
        strict_json.check_format(data, FORMAT, "accept the values of today")
    except ValueError as error:
        raise refused(f"not a baseline: {error}") from error
    if data["manifest"] != manifest:
        raise refused(f'it is the baseline of the manifest "{data["manifest"]}", and this is "{manifest}"')
    return dict(data["executables"])


@dataclass(frozen=True)
class Row:
    """A metric of an executable, before and after. allowed: the allowed growth; None: no limit."""

    metric: str
    before: Metric
    after: Metric
    allowed: int | str | None

    @property
    def ok(self) -> bool:
        """Whether it is within its tolerance. A known value must not become unknown."""
        if self.allowed is None or self.before == self.after or self.before == UNKNOWN:
            return True
        if self.after == UNKNOWN:
            return False
        before, after = float(self.before), float(self.after)
        if isinstance(self.allowed, str):
            return after <= before * (1 + float(self.allowed.removesuffix("%")) / 100)
        return after <= before + self.allowed


@dataclass(frozen=True)
class Change:
    """How an executable differs from its baseline.

    rows: the metrics that differ. new: its new parts, as sentences. missing: it is not in the baseline.
    """

    name: str
    rows: tuple[Row, ...] = ()
    new: tuple[str, ...] = ()
    missing: bool = False

    @property
    def ok(self) -> bool:
        """Whether the baseline allows it."""
        return not self.missing and all(row.ok for row in self.rows)


def compare(
    before: Mapping[str, Measured], after: Mapping[str, Measured], tolerances: Mapping[str, Mapping[str, int | str]]
) -> Iterator[Change]:
    """Yield the differences of executables from their baseline; equal ones are left out.

    tolerances: function -> metric -> the allowed growth, if it differs from `DEFAULTS`.
    """
    for name, now in after.items():
        if name not in before:
            yield Change(name, missing=True)
            continue
        if now == before[name]:
            continue
        function = name.partition(".")[0]
        allowed = {**DEFAULTS, **tolerances.get(function, tolerances.get(function.partition("-")[0], {}))}
        rows = tuple(row for row in _rows(before[name], now, allowed) if row.before != row.after)
        yield Change(name, rows, tuple(_news(before[name], now)))


def _rows(before: Measured, after: Measured, allowed: Mapping[str, int | str]) -> Iterator[Row]:
    for metric in ("peak_memory", "flops", "bytes_accessed", "executable_size"):
        yield Row(metric, before[metric], after[metric], allowed[metric])
    for metric in KERNEL_METRICS:
        if metric in after:
            yield Row(metric, before.get(metric, UNKNOWN), after[metric], allowed.get(metric))
    for metric in ("collectives", "operations"):
        for kind in sorted({*before[metric], *after[metric]}):
            yield Row(f"{metric}.{kind}", before[metric].get(kind, 0), after[metric].get(kind, 0), allowed.get(metric))


def _news(before: Measured, after: Measured) -> Iterator[str]:
    """The parts of an executable that the baseline lacks, and whether the program itself changed."""
    operations = [
        f"{count:,} {kind}" + (f" (before: {before['operations'][kind]:,})" if kind in before["operations"] else "")
        for kind, count in after["operations"].items()
        if count != UNKNOWN and before["operations"].get(kind, 0) not in (UNKNOWN, count)
        if count > before["operations"].get(kind, 0)
    ]
    arrays = [
        f"{what} ({in_bytes(size)})"
        for what, size in sorted(after["arrays"].items(), key=lambda row: -row[1])
        if size > before["arrays"].get(what, 0)
    ]
    for title, items in (("operations", operations), ("arrays", arrays)):
        if items:
            more = f", {len(items) - _LISTED} more" if len(items) > _LISTED else ""
            yield f"new {title}: {', '.join(items[:_LISTED])}{more}"
    same = before["stablehlo_sha256"] == after["stablehlo_sha256"]
    yield f"StableHLO: {'the same module: the compiler or its options changed' if same else 'another module'}"


def as_text(changes: Iterable[Change], gone: Sequence[str], name: str, count: int, accept: str) -> str:
    """Return a table for a person: growth, new parts, and the command that accepts them.

    gone: executables of the baseline that are not in the manifest. name: of the manifest. count: of its executables.
    """
    changes = list(changes)
    failed = [change for change in changes if not change.ok]
    lines = []
    for change in [*failed, *(change for change in changes if change.ok)]:
        lines.append(f"{'ok    ' if change.ok else 'FAILED'}  {change.name}")
        if change.missing:
            lines.append("  it is not in the baseline")
        shown = [row for row in change.rows if row.allowed is not None]
        if shown:
            table: list[tuple[str, ...]] = [("", "before", "after", "change", "allowed", "")]
            table += [_cells(row) for row in shown]
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            for first, *rest in table:
                cells = (f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
                lines.append("  ".join([f"  {first:<{widths[0]}}", *cells]).rstrip())
        lines += [f"  {what}" for what in change.new]
    lines += [f"ok      {executable}: only the baseline has it" for executable in gone]
    lines.append(f"{name}: {count} executable{'s' * (count != 1)}, {len(failed)} failed")
    if lines[1:]:
        lines.append(f"to accept what they take now: {accept}")
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    change = ""
    if UNKNOWN not in (row.before, row.after):
        more = float(row.after) - float(row.before)
        change = f"{more / float(row.before):+.1%}" if row.before else f"{more:+,.0f}"
    allowed = row.allowed if isinstance(row.allowed, str) else _told(row.metric, row.allowed or 0)
    before, after = _told(row.metric, row.before), _told(row.metric, row.after)
    if before == after:
        before, after = (f"{value:,}" for value in (row.before, row.after))
    return row.metric, before, after, change, f"+{allowed}", "" if row.ok else "FAILED"


def _told(metric: str, value: Metric) -> str:
    if isinstance(value, str):
        return value
    return in_bytes(value) if metric in IN_BYTES else f"{value:,.0f}"


_BASELINE = json_shapes.shape(
    {
        "format": int,
        "kind": "baseline",
        "manifest": str,
        "executables": {
            ...: {
                **dict.fromkeys(("bytes_accessed", "executable_size", "flops", "peak_memory"), METRIC),
                **{key: {...: METRIC} for key in ("arrays", "collectives", "operations")},
                "stablehlo_sha256": json_shapes.sha256,
                **dict.fromkeys((f"{metric}?" for metric in KERNEL_METRICS), METRIC),
            }
        },
    }
)
