"""The chart in README: from the start of a process to its first result, a bar for each way to get there."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from benchmarks.measuring import Row

_ROW = "process start to first result, model"
"""The largest program of `cold_start`, where stagec gains least."""
_TITLE = "From the start of a process to its first result: 24 transformer blocks on a CPU"
_WAYS = {
    "jit": "jax.jit",
    "exported": "jax.export, read from a file",
    "cached": "jax.jit, its cache filled before",
    "serialized": "serialize_executable of JAX",
    "stagec": "stagec",
}
"""By its name in the results, what the chart calls each way."""
_LEFT, _SECOND, _LINE, _TOP = 230, 280, 30, 44
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600 } .axis { opacity: .75 }
.bar { fill: #8c959f } .stagec { fill: #1f6feb } line { stroke: #8c959f; stroke-opacity: .4 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } }
"""


def as_svg(rows: Sequence[Row]) -> str:
    """Return the chart of the rows of `cold_start`."""
    (row,) = (row for row in rows if row.name == _ROW)
    medians = {way: statistics.median(row.seconds[way]) for way in _WAYS}
    seconds = int(max(medians.values())) + 1
    bottom = _TOP + _LINE * len(_WAYS)
    width, height = _LEFT + _SECOND * seconds + 30, bottom + 48
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>{_TITLE}; less is better</title><style>{_STYLE}</style>",
        f'<text class="title" x="10" y="22">{_TITLE}</text>',
    ]
    for half in range(2 * seconds + 1):
        x = _LEFT + half * _SECOND // 2
        parts.append(f'<line x1="{x}" x2="{x}" y1="{_TOP - 6}" y2="{bottom}"/>')
        parts.append(f'<text class="axis" x="{x}" y="{bottom + 16}" text-anchor="middle">{half / 2:g} s</text>')
    for y, (way, name) in zip(range(_TOP, bottom, _LINE), _WAYS.items(), strict=True):
        length = round(_SECOND * medians[way])
        style = "bar stagec" if way == "stagec" else "bar"
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect class="{style}" x="{_LEFT}" y="{y}" width="{length}" height="{_LINE - 8}" rx="2"/>')
        parts.append(f'<text x="{_LEFT + length + 8}" y="{y + 16}">{medians[way]:.2f} s</text>')
    starts = len(row.seconds["stagec"])
    note = f"seconds, median of {starts} starts; less is better"
    parts.append(f'<text class="axis" x="{_LEFT}" y="{bottom + 38}">{note}</text></svg>')
    return "\n".join(parts) + "\n"
