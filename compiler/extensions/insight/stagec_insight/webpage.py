"""The page of `stagec report`: one HTML file with everything in it, which loads nothing and sends nothing.

Apache ECharts (page/echarts.min.js from npm) draws a chart when a reader opens it. A policy in the page allows its own
two scripts by their digests, and no network. The same inputs give the same bytes. Of the libraries that are well kept,
only ECharts has treemaps, SVG for print, and patterns beside colours.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stagec.backends.analysis import UNKNOWN
from stagec.building.limits import in_bytes

_FOLDER = Path(__file__).parent / "page"
_NAMES = ("A", "B")


def as_html(collected: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of one bundle, or of two side by side. collected: the result of `overview.collect` for each."""
    bundles = [bundle["bundle"] for bundle in collected]
    title = " and ".join(dict.fromkeys(f"{bundle['name']} {bundle['version']}" for bundle in bundles))
    style, script, charts = (_read(name) for name in ("page.css", "page.js", "echarts.min.js"))
    policy = _POLICY.format(" ".join(f"'sha256-{_digest(text)}'" for text in (charts, script)))
    return "".join(
        [
            _HEAD.format(policy=policy, title=html.escape(title), style=style),
            *_header(title, bundles),
            *_details(bundles),
            *_functions(collected),
            f'<script type="application/json" id="bundles">{_json(bundles)}</script>\n',
            f"<script>{charts}</script>\n<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {}; base-uri 'none'; form-action 'none'"
)
_HEAD = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}: stagec report</title>
<style>
{style}</style>
</head>
<body>
<a class="skip" href="#functions">To the functions</a>
"""
_OPENED = '<details{attributes}><summary>{summary}</summary><div class="body">{body}</div></details>\n'


def _read(name: str) -> str:
    return (_FOLDER / name).read_text("utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(value: object) -> str:
    """JSON that is safe inside a script element."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True).replace("<", "\\u003c")


def _header(title: str, bundles: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"<header>\n<h1>{html.escape(title)}</h1>\n"
    for name, bundle in zip(_NAMES, bundles, strict=False):
        mark = f"<strong>{name}</strong>: " if len(bundles) > 1 else ""
        targets = ", ".join(f"{target} ({what})" for target, what in bundle["targets"].items())
        file = f"{bundle['file']}, {in_bytes(bundle['bytes'])}, sha256 {bundle['sha256'][:16]}"
        text = f"{file}. Targets: {targets or 'none'}."
        yield f"<p>{mark}{html.escape(text)}</p>\n"
    yield "</header>\n<main>\n"


def _details(bundles: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "<h2>The bundle</h2>\n"
    yield _OPENED.format(attributes=' data-open="sizes"', summary="What takes the space of the file", body="")
    if any(bundle["times"] for bundle in bundles):
        yield _OPENED.format(attributes=' data-open="times"', summary="How long the build took", body="")
    tables = []
    for name, bundle in zip(_NAMES, bundles, strict=False):
        rows = [*bundle["provenance"], *bundle["signatures"]]
        cells = "".join(f'<tr><th scope="row">{html.escape(k)}</th><td>{html.escape(v)}</td></tr>' for k, v in rows)
        caption = f"<caption>{name}</caption>" if len(bundles) > 1 else ""
        tables.append(f'<div class="wide"><table>{caption}<tbody>{cells}</tbody></table></div>')
    yield _OPENED.format(attributes="", summary="Where it comes from, and who signed it", body="".join(tables))


def _functions(collected: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = sorted({name for bundle in collected for name in bundle["functions"]})
    yield f'<h2 id="functions" tabindex="-1">{len(names):,} function{"s" * (len(names) != 1)}</h2>\n'
    hidden = " hidden" if len(names) < 10 else ""
    yield f'<p class="controls"{hidden}><label>Find <input id="filter" type="search"></label>'
    yield f'<span id="shown" role="status">{len(names)} shown</span></p>\n'
    for name in names:
        functions = [bundle["functions"].get(name) for bundle in collected]
        call = next(function["call"] for function in functions if function)
        executables = {
            key: [function["executables"].get(key) if function else None for function in functions]
            for key in sorted({key for function in functions if function for key in function["executables"]})
        }
        text = html.escape(name)
        yield (
            f'<details class="function" data-open="function" id="{text}" data-name="{text}"><summary>'
            f'<span class="name">{text}</span> '
            f'<span class="figures">{html.escape(_summary(executables))}</span></summary>'
            f'<script type="application/json">{_json({"call": call, "executables": executables})}</script>'
            '<div class="body"></div></details>\n'
        )
    yield "</main>\n"


def _summary(executables: Mapping[str, Sequence[Mapping[str, Any] | None]]) -> str:
    """A line on a function: the number of executables, and the largest costs of one, in each bundle."""
    parts = [f"{len(executables)} executable{'s' * (len(executables) != 1)}"]
    for key, what in (("peak_bytes", "peak"), ("size", "size")):
        sides = []
        for side in zip(*executables.values(), strict=True):
            values = [executable[key] for executable in side if executable and executable[key] != UNKNOWN]
            sides.append(in_bytes(max(values)) if values else "not there")
        if sides:
            parts.append(f"{what} {' / '.join(dict.fromkeys(sides))}")
    return ", ".join(parts)
