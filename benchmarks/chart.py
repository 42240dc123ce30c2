"""The picture of the results: a bar for each row, as long as its value is by its target."""

from __future__ import annotations

from html import escape

from benchmarks.measuring import Row

_LINE, _SCALE, _RIGHT = 26, 260, 150
_LETTER = 6.5
"""Width of a letter of a name, on average."""
_LONGEST = 2.0
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.value { font-weight: 600 } .axis { stroke: #57606a; stroke-dasharray: 3 3 } .small { font-size: 11px; opacity: .75 }
.met { fill: #2da44e } .missed { fill: #d1832c } .reported { fill: #8c959f }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .axis { stroke: #8d96a0 }
}
"""


def as_svg(rows: list[Row]) -> str:
    """Return the chart. The dashed line is the target of each row, of "reported" ones 1; left of it is better."""
    left = 20 + round(_LETTER * max((len(row.name) for row in rows), default=0))
    width, height = left + int(_SCALE * _LONGEST) + _RIGHT, _LINE * (len(rows) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>Benchmarks of stagec</title><style>{_STYLE}</style>",
        f'<text class="small" x="{left + _SCALE}" y="16" text-anchor="middle">target</text>',
        f'<line class="axis" x1="{left + _SCALE}" x2="{left + _SCALE}" y1="22" y2="{height - _LINE + 4}"/>',
    ]
    for number, row in enumerate(rows, 1):
        top = number * _LINE
        share = row.ratio / (row.target or 1.0)
        length = max(2, round(_SCALE * min(share, _LONGEST)))
        style = "reported" if row.target is None else "met" if share <= 1 else "missed"
        unit = "x" if row.unit == "x" else f" {row.unit}"
        target = "reported" if row.target is None else f"target {row.target:g}{unit}"
        parts.append(f'<text x="{left - 10}" y="{top + 15}" text-anchor="end">{escape(row.name)}</text>')
        parts.append(
            f'<rect class="{style}" x="{left}" y="{top + 4}" width="{length}" height="{_LINE - 10}" rx="2">'
            f"<title>{escape(row.against or row.name)}</title></rect>"
        )
        parts.append(
            f'<text x="{left + length + 8}" y="{top + 15}"><tspan class="value">{row.ratio:.3g}{unit}</tspan>'
            f'<tspan class="small" dx="8">{target}</tspan></text>'
        )
    parts.append(f'<text class="small" x="{left}" y="{height - 8}">shorter is better</text></svg>')
    return "\n".join(parts) + "\n"
