"""Check the limits of an executable, and find the arrays that take the memory.

A limit is the manifest's, or the memory of the device. It decides whether there is an executable, never what is in it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stagec.backends.analysis import KERNEL_METRICS, UNKNOWN, Buffer, buffers, of_kernels
from stagec.backends.compilation import DoesNotFit, Hardware
from stagec.bundle.description import Description
from stagec.core.builds import naming
from stagec.core.builds.specs import ExecutableSpec
from stagec.core.messages.errors import Problem
from stagec.core.sizes.avals import Aval, num_bytes

if TYPE_CHECKING:
    from stagec.stages.compiled import Compiled

_LARGEST = 8
"""How many arrays a message lists."""
_REASONS = 3
"""How many reasons a message lists."""
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def exceeded(
    compiled: Compiled, hardware: Hardware, names: Callable[[], Sequence[str]], spec: ExecutableSpec
) -> Iterator[Problem]:
    """Yield the costs over a limit of `spec`, or over the memory of the device.

    names: returns those of the arguments that it takes.
    A metric that is not known is over its limit, unless that is allowed, and within the memory of the device.
    """
    description, program = compiled.description, compiled.as_text()
    limits, analysis = spec.limits, description.analysis
    peak = analysis["peak_bytes"]
    # The manifest does not set the memory of a device, so it cannot allow an unknown peak: then there is no check.
    if hardware.memory is not None and peak != UNKNOWN and peak > hardware.memory:
        most = in_bytes(hardware.memory)
        what = f"peak memory {in_bytes(peak)} is over the {most} that one {hardware.device_kind} has"
        yield Problem(spec.manifest, spec.key, what, _table(description, program, names()), _about(spec))
    wanted = {name: limit for name in _KNOWN if (limit := getattr(limits, name)) is not None}
    for key, metric, limit in compared(wanted, description, compiled.kernels):
        at = f"{limits.key}.{key}"
        name = _NAMES.get(key, key.rpartition(".")[2])
        if metric == UNKNOWN and limits.allow_unknown:
            continue
        # Over the limit: a limit that passes because nobody could count protects nobody.
        if metric == UNKNOWN:
            counted = [] if key == "peak_memory" else analysis["unknown"]
            if key in KERNEL_METRICS:
                counted = [f"kernel {kernel['name']}" for kernel in compiled.kernels if kernel[key] == UNKNOWN]
            why = f"it depends on {_listed(counted)}" if counted else "XLA does not say it of this program"
            what = f"{name} is unknown: {why}"
            write = "leave the limit out, or write allow_unknown = true beside it"
        elif metric > limit:
            what = f"{name} {' is over the limit of '.join(_pair(key, metric, limit))}"
            write = _table(description, program, names()) if key == "peak_memory" else ""
            write = _moved(description) if key.startswith("collectives") else write
            write = _kernels(key, compiled.kernels) if key in KERNEL_METRICS else write
        else:
            continue
        yield Problem(spec.manifest, at, what, write, _about(spec))


def compared(
    limits: Mapping[str, Any], description: Description, kernels: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Any, float]]:
    """Yield the name of each limit, the executable's cost, and the limit; `collectives.KIND` for each limited kind."""
    analysis = description.analysis
    counts = {kind: row["count"] for kind, row in analysis["collectives"].items()}
    metrics = {
        "peak_memory": analysis["peak_bytes"],
        "flops": analysis["flops"],
        "bytes_accessed": analysis["bytes_accessed"],
        "executable_size": description.executable_bytes,
        "collectives": UNKNOWN if UNKNOWN in counts.values() else sum(counts.values()),
        **of_kernels(kernels),
    }
    for name, limit in limits.items():
        if isinstance(limit, Mapping):
            yield from ((f"{name}.{kind}", counts.get(kind, 0), most) for kind, most in limit.items())
        else:
            yield name, metrics.get(name, UNKNOWN), limit


def _listed(reasons: Sequence[str]) -> str:
    """The first of some reasons, and the number of the others."""
    more = [f"{len(reasons) - _REASONS} more"] if len(reasons) > _REASONS else []
    return ", ".join([*reasons[:_REASONS], *more])


def _pair(key: str, metric: float, limit: float) -> tuple[str, str]:
    """Both numbers as strings, in full if they would look alike."""
    short = in_bytes(metric), in_bytes(limit)
    in_full = f"{metric:,.0f}", f"{limit:,.0f}"
    return short if key in IN_BYTES and short[0] != short[1] else in_full


def advice(spec: ExecutableSpec, seconds: float) -> Problem | None:
    """Return a warning about the time of compiling; None when it is within the limit. It is not a mistake."""
    limit = spec.limits.compile_time
    if limit is None or seconds <= limit:
        return None
    what = f"warning: compiling took {seconds:.1f} s, the limit is {limit:g} s"
    return Problem(spec.manifest, f"{spec.limits.key}.compile_time", what)


def does_not_fit(
    error: DoesNotFit, names: Sequence[str], avals: Sequence[Aval], nr_devices: int, spec: ExecutableSpec
) -> Problem:
    """Return the problem of a program that XLA itself finds too large for the device.

    XLA's table of buffers gets the names of arguments for their numbers. Where it gives none there are no sizes on one
    device, so arguments are listed whole. names, avals: of the arguments that the program takes.
    """

    def named(match: re.Match[str]) -> str:
        index = int(match[1])
        return f"{match[0]} ({names[index]})" if index < len(names) else match[0]

    write = re.sub(r"\bArgument (\d+)\b", named, error.write)
    if not write:
        largest = sorted(zip(avals, names, strict=True), key=lambda pair: -num_bytes(pair[0]))[:_LARGEST]
        rows = [(in_bytes(num_bytes(aval)), "argument", f"{name} {aval}") for aval, name in largest]
        head = "largest, on all devices together:" if nr_devices > 1 else "largest:"
        write = "\n".join([head, *_rows(rows)])
    return Problem(spec.manifest, spec.key, str(error), write, _about(spec))


def in_bytes(size: float) -> str:
    """Return a number of bytes as a person reads it: "3.1 GiB"."""
    scale = 0
    while size >= 1024 and scale < len(_UNITS) - 1:
        size, scale = size / 1024, scale + 1
    return f"{size:,.1f} {_UNITS[scale]}" if scale else f"{size:,.0f} bytes"


_KNOWN = ("peak_memory", "flops", "bytes_accessed", "executable_size", "collectives", *KERNEL_METRICS)
"""Limits that need the executable."""
IN_BYTES = ("peak_memory", "bytes_accessed", "executable_size", "shared_memory", "spills")
"""Metrics that are numbers of bytes."""
_NAMES = {
    "peak_memory": "peak memory",
    "bytes_accessed": "bytes accessed",
    "executable_size": "size of the executable",
    "registers": "registers of a thread",
    "shared_memory": "shared memory of a block",
    "spills": "spilled registers of all kernels",
}


def _about(spec: ExecutableSpec) -> str:
    """Name the executable, because limits hold for all buckets and variants."""
    name = f"{naming.artifact(spec.function, spec.variant)} for {spec.target.name}"
    return ", ".join(filter(None, (name, naming.bucket(spec.bucket))))


def _table(description: Description, program: str, names: Sequence[str]) -> str:
    """The largest arrays on one device, each with its argument or result."""
    analysis = description.analysis
    sums = [
        f"{name} {analysis[key] if analysis[key] == UNKNOWN else in_bytes(analysis[key])}"
        for name, key in (
            ("arguments", "argument_bytes"),
            ("temporaries", "temporary_bytes"),
            ("outputs", "output_bytes"),
        )
    ]
    if analysis["alias_bytes"] not in (0, UNKNOWN):
        sums[-1] += f" ({in_bytes(analysis['alias_bytes'])} of them in the memory of arguments)"
    largest = named(buffers(program)[:_LARGEST], description, names)
    rows = [(in_bytes(buffer.bytes), buffer.kind, f"{buffer.name} {buffer.type}".strip()) for buffer in largest]
    return "\n".join([", ".join(sums), "largest, on each device:", *_rows(rows)])


def named(arrays: Sequence[Buffer], description: Description, names: Sequence[str]) -> Iterator[Buffer]:
    """Yield buffers with the names of arguments and results, as a person knows them. names: as for `exceeded`."""
    arguments = dict(enumerate(names))
    results = dict(enumerate(description.out_tree.paths("result")))
    for buffer in arrays:
        table = {"argument": arguments, "result": results}.get(buffer.kind, {})
        yield dataclasses.replace(buffer, name=table.get(buffer.index, buffer.name))


def _rows(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Lines of a table: size, kind and name."""
    width = max((len(size) for size, _, _ in rows), default=0)
    return [f"{size:>{width}}  {kind:<9}  {what}" for size, kind, what in rows]


def _kernels(key: str, kernels: Sequence[Mapping[str, Any]]) -> str:
    """The kernels that take most of something."""
    most = sorted((kernel for kernel in kernels if kernel[key]), key=lambda kernel: -kernel[key])[:_LARGEST]
    rows = [(in_bytes(row[key]) if key in IN_BYTES else f"{row[key]:,}", "kernel", row["name"]) for row in most]
    return "\n".join(["the most:", *_rows(rows)])


def _moved(description: Description) -> str:
    collectives = description.analysis["collectives"].items()
    every = ((kind, entry) for kind, entry in collectives if UNKNOWN not in entry.values())
    return ", ".join(f"{entry['count']:,} {kind} of {in_bytes(entry['bytes'])} in all" for kind, entry in every)
