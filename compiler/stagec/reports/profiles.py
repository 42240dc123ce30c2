"""What `stagec profile` tells: where the time of a build went, from the profiles of its actions (`phases`)."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from stagec.core.errors import Problem, StagecError

_SUFFIX = ".profile.json"
_LEFT, _WIDTH, _LINE, _TOP = 320, 900, 16, 56
_COLOURS = {
    "import": "#8c959f",
    "trace": "#1f77b4",
    "lower": "#17a2a2",
    "export": "#6f42c1",
    "refine": "#e3a008",
    "compile": "#d1542c",
    "analyze": "#c04f86",
    "canonicalize": "#2da44e",
    "other": "#b5bac0",
}
"""In the order of a build; each can be told from a light and from a dark background."""


def read(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Return the profiles that files stand for, in the order of their starts.

    A path is a profile, a folder with profiles at any depth, or a file of Bazel's `--build_event_json_file` that names
    them. Raises StagecError for one that is none of these, and where no profile is found at all.
    """
    files: dict[Path, None] = {}
    problems = []
    for text in paths:
        path = Path(text)
        try:
            if path.is_dir():
                files |= dict.fromkeys(sorted(Path(os.path.realpath(path)).rglob(f"*{_SUFFIX}")))
            elif path.name.endswith(_SUFFIX):
                files[path] = None
            else:
                files |= dict.fromkeys(_named(path))
        except OSError as error:
            problems.append(Problem(text, "", f"cannot be read: {error.strerror}"))
        except (ValueError, AttributeError, TypeError):
            write = f"give *{_SUFFIX} files, folders with them, or a file of --build_event_json_file"
            problems.append(Problem(text, "", "is neither a profile nor build events of Bazel's", write))
    profiles = []
    for file in files:
        try:
            told = json.loads(file.read_text("utf-8"))
            if (told["format"], told["kind"]) != (1, "profile"):
                raise ValueError
            profiles.append(told)
        except OSError as error:
            write = "build with --output_groups=+profile" if isinstance(error, FileNotFoundError) else ""
            problems.append(Problem(str(file), "", f"cannot be read: {error.strerror}", write))
        except (ValueError, KeyError, TypeError):
            problems.append(Problem(str(file), "", "is no profile of format 1"))
    if not problems and not profiles:
        write = "build with --output_groups=+profile"
        problems = [Problem(text, "", "names no profile", write) for text in paths]
    if problems:
        raise StagecError(*problems)
    return sorted(profiles, key=lambda profile: (profile["started"], profile["artifact"]))


def _named(path: Path) -> list[Path]:
    """Return the profiles that build events name, each event a line of JSON.

    https://bazel.build/remote/bep: namedSetOfFiles has files with a URI each.
    """
    found = []
    for line in path.read_text("utf-8").splitlines():
        for file in json.loads(line).get("namedSetOfFiles", {}).get("files", ()):
            uri = urlparse(file.get("uri", ""))
            if uri.scheme == "file" and uri.path.endswith(_SUFFIX):
                found.append(Path(unquote(uri.path)))
    return found


def report(profiles: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a report: a row for each action, longest first, and the sums.

    wall: seconds from the first start to the last end. seconds: of all actions. max_rss: bytes, the most of any action.
    """
    rows = [
        {
            "artifact": profile["artifact"],
            "command": profile["command"],
            "seconds": profile["seconds"],
            "phases": _by_phase([profile]),
            "max_rss": profile["max_rss"],
        }
        for profile in sorted(profiles, key=lambda profile: -profile["seconds"])
    ]
    begin = min(profile["started"] for profile in profiles)
    return {
        "kind": "profiles",
        "actions": rows,
        "phases": _by_phase(profiles),
        "seconds": sum(profile["seconds"] for profile in profiles),
        "wall": max(profile["started"] + profile["seconds"] for profile in profiles) - begin,
        "max_rss": max(profile["max_rss"] for profile in profiles),
    }


def _by_phase(profiles: Iterable[dict[str, Any]]) -> dict[str, float]:
    seconds: Counter[str] = Counter()
    for profile in profiles:
        for name, _, length in profile["phases"]:
            seconds[name] += length
    known = [name for name in _COLOURS if name in seconds]
    return {name: seconds[name] for name in [*known, *sorted(set(seconds) - set(_COLOURS))]}


def as_text(report: dict[str, Any]) -> str:
    """Return the report for a person to read: a table in seconds and MiB."""
    names = list(report["phases"])
    rows = [("artifact", "command", "seconds", *names, "MiB")]
    sums = {"artifact": f"all {len(report['actions'])}", "command": "", **report}
    for row in (*report["actions"], sums):
        lengths = [f"{row['phases'][name]:.2f}" if name in row["phases"] else "-" for name in names]
        memory = f"{row['max_rss'] / 2**20:,.0f}"
        rows.append((row["artifact"], row["command"], f"{row['seconds']:.2f}", *lengths, memory))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if column < 2 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    share = report["seconds"] / report["wall"] if report["wall"] else 1.0
    last = f"{report['wall']:.2f} s from the first start to the last end, {share:.1f} actions at a time"
    return "\n".join([*(line.rstrip() for line in lines), last]) + "\n"


def as_svg(profiles: Sequence[dict[str, Any]]) -> str:
    """Return a picture: a line for each action in the order of their starts, time to the right, coloured by phase."""
    begin = min(profile["started"] for profile in profiles)
    wall = max(profile["started"] + profile["seconds"] for profile in profiles) - begin or 1.0
    height, width = _TOP + _LINE * len(profiles) + 16, _LEFT + _WIDTH + 90
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<style>text { font: 11px system-ui, sans-serif; fill: #24292f }",
        ".grid { stroke: #8c959f; stroke-opacity: .35 }",
        "@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } }</style>",
    ]
    for place, name in enumerate(_by_phase(profiles)):
        x = 10 + 110 * place
        parts.append(f'<rect x="{x}" y="8" width="11" height="11" rx="2" fill="{_colour(name)}"/>')
        parts.append(f'<text x="{x + 16}" y="18">{escape(name)}</text>')
    for tick in range(6):
        across, seconds = _LEFT + _WIDTH * tick / 5, wall * tick / 5
        parts.append(f'<line class="grid" x1="{across:g}" x2="{across:g}" y1="{_TOP - 6}" y2="{height - 12}"/>')
        parts.append(f'<text x="{across:g}" y="{_TOP - 12}" text-anchor="middle">{seconds:.1f} s</text>')
    for row, profile in enumerate(profiles):
        y, start = _TOP + _LINE * row, profile["started"] - begin
        told = f"{profile['command']} {profile['artifact']}"
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 11}" text-anchor="end">{escape(told)}</text>')
        for name, at, seconds in profile["phases"]:
            x, length = _LEFT + _WIDTH * (start + at) / wall, max(0.3, _WIDTH * seconds / wall)
            title = f"<title>{escape(name)} {seconds:.3f} s</title>"
            parts.append(
                f'<rect x="{x:.2f}" y="{y + 2}" width="{length:.2f}" height="{_LINE - 4}" '
                f'fill="{_colour(name)}">{title}</rect>'
            )
        end = _LEFT + _WIDTH * (start + profile["seconds"]) / wall
        parts.append(f'<text x="{end + 4:.2f}" y="{y + 11}">{profile["seconds"]:.2f} s</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _colour(name: str) -> str:
    return _COLOURS.get(name, _COLOURS["other"])
