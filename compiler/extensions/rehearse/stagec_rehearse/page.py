"""The page of a report: one HTML file with all programs, which loads nothing and sends nothing."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterator

from stagec_rehearse.report import Report

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
<title>stagec: programs</title>
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


def as_html(report: Report) -> str:
    """Return the page. A click on a title sorts by that."""
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    return "".join([_HEAD.format(digest), *_body(report), f"<script>{_SCRIPT}</script>\n</body>\n</html>\n"])


def _body(report: Report) -> Iterator[str]:
    said = html.escape(report.said)
    yield f"<h1>{said.partition(': ')[0]}</h1>\n<p>{said}.</p>\n"
    for title, lines in report.parts:
        items = "".join(f"<li>{html.escape(line)}</li>\n" for line in lines)
        yield f"<h2>{html.escape(title[:1].upper() + title[1:].rstrip(':'))}</h2>\n<ul>\n{items}</ul>\n"
    titles = "".join(f'<th scope="col"><button>{title}</button></th>' for title in report.columns)
    yield f"<h2>Programs</h2>\n<table>\n<thead><tr>{titles}</tr></thead>\n<tbody>\n"
    columns = zip(*(row.figures for row in report.rows), strict=True)
    most = [max(0.0, *(number for number, _ in column)) or 1.0 for column in columns]
    for row in report.ordered:
        yield "<tr>"
        for (number, cell), largest in zip(row.figures, most, strict=True):
            style = f"--share: {100 * max(number, 0) / largest:.1f}%"
            yield f'<td class="number" data-value="{number}" style="{style}">{html.escape(cell)}</td>'
        *target, name, line = map(html.escape, row.cells[len(row.figures) :])
        yield "".join(f"<td>{cell}</td>" for cell in target)
        shapes = html.escape(f"({', '.join(row.program.arguments)}) -> {', '.join(row.program.results)}")
        yield f'<td title="{shapes}">{name}</td><td>{line}</td></tr>\n'
    yield "</tbody>\n</table>\n"
