"""Chrome trace events, which Perfetto and chrome://tracing show.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def slice_of(
    name: str, category: str, track: int, at: float, seconds: float, arguments: Mapping[str, Any], digits: int = 0
) -> dict[str, Any]:
    """Return a complete event; its times are microseconds, with that many digits after the point."""
    times = {key: round(value * 1e6, digits or None) for key, value in (("ts", at), ("dur", seconds))}
    return {"name": name, "cat": category, "ph": "X", "pid": 1, "tid": track, **times, "args": dict(arguments)}


def to_json(process: str, tracks: Sequence[str], events: Iterable[Mapping[str, Any]]) -> str:
    """Return a trace as JSON, one event a line. process, tracks: their names, the tracks in the order of "tid"."""
    named = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": process}}]
    named += [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": name}}
        for track, name in enumerate(tracks)
    ]
    lines = ",\n".join(json.dumps(event) for event in (*named, *events))
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'
