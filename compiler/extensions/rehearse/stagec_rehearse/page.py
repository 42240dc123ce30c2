"""The page of a rehearsal: one HTML file with all programs, which loads nothing and sends nothing."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterator

from stagec_rehearse import report
from stagec_rehearse.report import COLUMNS, Told

_SCRIPT = """
const body = document.querySelector("tbody");
const value = (row, at) => row.cells[at].dataset.value ?? row.cells[at].textContent;
document.querySelectorAll("th button").forEach((button, at) => button.addEventListener("click", () => {
  const rows = [...body.rows].sort((a, b) => {
    const [one, other] = [value(a, at), value(b, at)];
    return isNaN(one) ? one.localeCompare(other) : other - one;
  });
  body.append(...rows);
}));
"""
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{}'">
<title>stagec rehearse</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em; max-width: 90em; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: 0.2em 0.8em; border-bottom: 1px solid #8884; }}
td.number {{
  text-align: right;
  background: linear-gradient(to left, #4a90d955 var(--share), transparent var(--share));
}}
th button {{ font: inherit; font-weight: bold; border: 0; padding: 0; background: none; cursor: pointer; }}
</style>
</head>
<body>
"""


def as_html(told: Told) -> str:
    """Return the page. The programs that took longest to compile come first; a click on a title sorts by that."""
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    return "".join([_HEAD.format(digest), *_body(told), f"<script>{_SCRIPT}</script>\n</body>\n</html>\n"])


def _body(told: Told) -> Iterator[str]:
    said = html.escape(report.summary(told))
    yield f"<h1>{said.partition(':')[0]}</h1>\n<p>{said}.</p>\n"
    for title, lines in report.parts(told):
        items = "".join(f"<li>{html.escape(line)}</li>\n" for line in lines)
        yield f"<h2>{html.escape(title.rstrip(':').capitalize())}</h2>\n<ul>\n{items}</ul>\n"
    titles = "".join(f'<th scope="col"><button>{title}</button></th>' for title in COLUMNS)
    yield f"<h2>Programs</h2>\n<table>\n<thead><tr>{titles}</tr></thead>\n<tbody>\n"
    listed = sorted(told.rehearsal.programs, key=lambda program: -program.seconds)
    figures = [(each.seconds, float(each.bytes), max(each.flops, 0.0), float(each.runs)) for each in listed]
    most = [max(column) or 1.0 for column in zip(*figures, strict=True)]
    for program, numbers in zip(listed, figures, strict=True):
        cells = report.row(program)
        yield "<tr>"
        for number, largest, cell in zip(numbers, most, cells, strict=False):
            style = f"--share: {100 * number / largest:.1f}%"
            yield f'<td class="number" data-value="{number}" style="{style}">{html.escape(cell)}</td>'
        shapes = html.escape(f"({', '.join(program.arguments)}) -> {', '.join(program.results)}")
        yield f'<td title="{shapes}">{html.escape(program.name)}</td><td>{html.escape(cells[-1])}</td></tr>\n'
    yield "</tbody>\n</table>\n"
