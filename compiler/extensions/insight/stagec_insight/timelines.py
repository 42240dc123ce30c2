"""Estimate the timeline of a device in a call from the optimized program, as a trace."""

from __future__ import annotations

from typing import Any

from stagec.backends.compilation import Hardware
from stagec.bundle.description import Description
from stagec.costs import hlo
from stagec.costs.links import Seconds
from stagec_insight import traces
from stagec_insight.schedule import COMPUTE, COPIES, LINKS, Event, Rates, schedule

_TRACKS = (COMPUTE, LINKS, COPIES)


def of(name: str, program: str, description: Description, hardware: Hardware) -> str:
    """Return the trace of a call on one device; docs/gates.md lists the assumptions.

    name: of the executable. program: the optimized HLO as a string. If the device's rates are not known the trace has
    no events, and says so.
    """
    if not hardware.flops or not hardware.bandwidth:
        return traces.to_json(f"NO ESTIMATE of {name}: the peak rates of {hardware.device_kind} are not known", (), ())
    mesh, devices = description.device_assignment, description.nr_devices
    events, seconds = schedule(
        hlo.parse(program),
        devices,
        Seconds(hardware.links, devices, mesh.coords if mesh else ()),
        Rates(hardware.flops, hardware.bandwidth),
    )
    process = f"ESTIMATE of {name} on one {hardware.device_kind}, by peak rates: {seconds * 1e3:.3f} ms"
    rows = [
        traces.slice_of(event.name, event.kind, _TRACKS.index(event.track), event.at, event.seconds, _about(event), 4)
        for event in events
    ]
    return traces.to_json(process, [f"{track} (estimate)" for track in _TRACKS], rows)


def _about(event: Event) -> dict[str, Any]:
    details = {"operation": event.model_name or None, "flops": event.flops, "bytes": event.bytes, "turns": event.turns}
    return {name: value for name, value in details.items() if value}
