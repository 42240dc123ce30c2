"""The checked-in hardware as a table for a person."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stagec.core.builds.platforms import PLATFORMS
from stagec.hardware.tables import Entry

_HEAD = ("target", "memory", "bf16 peak", "bandwidth", "links", "what it is")
_GIB, _TERA, _GIGA = 1 << 30, 1e12, 1e9


def as_text(entries: Iterable[Entry]) -> str:
    """Return a table for each platform, with the sources of the numbers below it. Ends with a newline."""
    entries = list(entries)
    rows = [
        (
            entry.name,
            f"{entry.memory / _GIB:.1f} GiB" if entry.memory else "-",
            f"{entry.flops / _TERA:,.0f} TFLOP/s" if entry.flops else "-",
            f"{entry.bandwidth / _GIGA:,.0f} GB/s" if entry.bandwidth else "-",
            f"{entry.links / _GIGA:,.0f} GB/s" if entry.links else "-",
            entry.doc,
        )
        for entry in entries
    ]
    widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
    blocks = []
    for platform in PLATFORMS.values():
        lines = [platform.listed, _line(_HEAD, widths)]
        for entry, row in zip(entries, rows, strict=True):
            if entry.platform == platform.name:
                lines.append(_line(row, widths))
                if entry.examples != (entry.name,):
                    lines.append(f"    {_examples(entry)}")
        blocks.append("\n".join(lines))
    sources: dict[str, list[str]] = {}
    for entry in entries:
        sources.setdefault(entry.source, []).append(entry.name)
    cited = "".join(f"  {', '.join(names)}: {source}\n" for source, names in sources.items())
    return "\n\n".join(blocks) + f"\n\nsources of the numbers\n{cited}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *numbers, last = cells
    middle = (cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=False))
    return "  ".join(["", first.ljust(widths[0]), *middle, last])


def _examples(entry: Entry) -> str:
    def devices(count: int) -> str:
        return f"{count:,} device{'' if count == 1 else 's'}"

    pairs = zip(entry.examples, entry.devices, strict=True)
    return ", ".join(f"{name} ({devices(count)})" for name, count in pairs)
