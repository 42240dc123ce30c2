"""`stagec profile`: report where the time of a build went, from the profiles of its actions (`phases`)."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from stagec.core.messages.errors import Problem, StagecError
from stagec_insight import traces

_SUFFIX = ".profile.json"
_PHASES = ("import", "trace", "lower", "export", "refine", "compile", "analyze", "canonicalize", "other")
"""In the order of a build."""


def read(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Return the profiles that files stand for, in the order of their starts.

    A path is a profile, a folder with profiles at any depth, or a file that names them: Bazel's
    `--build_event_json_file` writes it. Raises StagecError for any other file, and if there is no profile at all.
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
            problems.append(Problem(text, "", "is neither a profile nor a file of Bazel's build events", write))
    profiles = []
    for file in files:
        try:
            profile = json.loads(file.read_text("utf-8"))
            if (profile["format"], profile["kind"]) != (1, "profile"):
                raise ValueError
            profiles.append(profile)
        except OSError as error:
            write = "build with --output_groups=+profile" if isinstance(error, FileNotFoundError) else ""
            problems.append(Problem(str(file), "", f"cannot be read: {error.strerror}", write))
        except (ValueError, KeyError, TypeError):
            problems.append(Problem(str(file), "", "is not a profile of format 1"))
    if not problems and not profiles:
        write = "build with --output_groups=+profile"
        problems = [Problem(text, "", "lists no profile", write) for text in paths]
    if problems:
        raise StagecError(*problems)
    return sorted(profiles, key=lambda profile: (profile["started"], profile["artifact"]))


def _named(path: Path) -> list[Path]:
    """Return the profiles that build events name, each event a line of JSON.

    https://bazel.build/remote/bep: namedSetOfFiles has files with a URI each.
    """
    profiles = []
    for line in path.read_text("utf-8").splitlines():
        for file in json.loads(line).get("namedSetOfFiles", {}).get("files", ()):
            uri = urlparse(file.get("uri", ""))
            if uri.scheme == "file" and uri.path.endswith(_SUFFIX):
                profiles.append(Path(unquote(uri.path)))
    return profiles


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
    known = [name for name in _PHASES if name in seconds]
    return {name: seconds[name] for name in [*known, *sorted(set(seconds) - set(_PHASES))]}


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


def as_trace(profiles: Sequence[dict[str, Any]]) -> str:
    """Return the build as Chrome trace events for Perfetto and chrome://tracing: JSON, one event a line.

    Each action is a slice with its phases below it; actions that overlap are on separate tracks.
    """
    begin = min(profile["started"] for profile in profiles)
    ends: list[float] = []
    events: list[dict[str, Any]] = []
    for profile in sorted(profiles, key=lambda profile: profile["started"]):
        start = profile["started"] - begin
        track = next((i for i, end in enumerate(ends) if end <= start), len(ends))
        ends[track : track + 1] = [start + profile["seconds"]]
        arguments = {"artifact": profile["artifact"], "max_rss": profile["max_rss"]}
        name = f"{profile['command']} {profile['artifact']}"
        events.append(traces.slice_of(name, "action", track, start, profile["seconds"], arguments))
        events += [
            traces.slice_of(phase, "phase", track, start + at, seconds, {}) for phase, at, seconds in profile["phases"]
        ]
    return traces.to_json("stagec", [f"actions {track + 1}" for track in range(len(ends))], events)
