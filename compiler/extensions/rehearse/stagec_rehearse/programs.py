"""The programs of a rehearsal: `programs.toml`, and a file for each program's key, which has its StableHLO."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from stagec.backends.analysis import UNKNOWN
from stagec.building.inventory import METRIC
from stagec.building.limits import in_bytes
from stagec.core.data import reading, strict_json
from stagec.core.messages.errors import Problem, StagecError, blaming
from stagec.core.trees import json_shapes
from stagec.jaxcache import jax_entries, jax_misses
from stagec.jaxcache.jax_entries import Entry, Key
from stagec.jaxcache.jax_misses import Lookup
from stagec.manifest import toml, values

NAME = "programs.toml"
FORMAT = 1


def key_file(digest: str) -> str:
    """Return the path of a key's file, from the folder of programs.toml. digest: SHA-256 of its content, in hex."""
    return f"programs/{digest}.key"


@dataclass(frozen=True)
class Program:
    """A program that JAX compiled.

    name: of its module. line: the user's line that made JAX compile it. arguments, results: avals.
    donated: positions of arguments. shardings: of arguments, by position, as StableHLO says them; mesh likewise.
    settings: JAX's, where they are not the default. options: of `jax.jit(compiler_options=...)`.
    devices: how many run it. runs: how often they did. compiled: how often JAX compiled it.
    constants: those of more than a megabyte that are part of it, each with its aval and bytes.
    file: the digest of its key's file; "" if its key is not known.
    seconds, bytes, flops: what its compilation took here, and XLA's own figures; no part of programs.toml.
    hits: how often JAX found it in a folder that was built, where one was given; no part either.
    not_run: what it calls that a virtual device lacks, so a program of zeros ran instead; "" if it ran.
    not_kept: why it is not built; "" for all others.
    zeros: why its results were zeros, where values were asked for; "" for all others. No part either.
    error: the first line of what XLA said where it could not compile it.
    """

    name: str
    line: str
    arguments: Sequence[str] = ()
    results: Sequence[str] = ()
    donated: Sequence[int] = ()
    shardings: Mapping[str, str] = field(default_factory=dict)
    mesh: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    devices: int = 1
    runs: int = 0
    compiled: int = 1
    constants: Sequence[Mapping[str, Any]] = ()
    file: str = ""
    seconds: float = 0.0
    bytes: int = 0
    flops: float = 0.0
    hits: int = 0
    not_run: str = ""
    not_kept: str = ""
    zeros: str = ""
    error: str = ""


_MEASURED = ("seconds", "bytes", "flops", "hits", "zeros")
_KEPT = [each.name for each in fields(Program) if each.name not in _MEASURED]
_KINDS: dict[str, type] = {
    name: {"str": str, "int": int, "Map": dict, "Seq": list}[str(each.type)[:3]]
    for each in fields(Program)
    if (name := each.name) in _KEPT
}


@dataclass(frozen=True)
class Rehearsal:
    """A run of a program: each process's virtual devices, the versions, and what it compiled, by name, line and key."""

    device: str
    devices: int
    versions: Mapping[str, str]
    programs: Sequence[Program]
    budget: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1


def observed(folder: Path) -> tuple[list[Program], dict[str, bytes]]:
    """Read what the processes of a program wrote; return the programs, sorted, and their keys' files by digest."""
    listed: dict[tuple[str, str, str], Program] = {}
    files: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.rows")):
        runs = path.with_suffix(".runs").read_bytes()
        zeros = json.loads(unvalued.read_text("utf-8")) if (unvalued := path.with_suffix(".zeros")).exists() else {}
        for index, text in enumerate(path.read_text("utf-8").splitlines()):
            try:
                row = json.loads(text)
            except ValueError:
                continue  # the process was ended while it wrote
            data = bytes.fromhex(row.pop("hex", ""))
            row["file"] = hashlib.sha256(data).hexdigest() if data else ""
            if data:
                files[row["file"]] = data
            row["name"] = row.get("name", "unknown")
            row["zeros"] = zeros.get(str(index), "")
            unknown = row.pop("unknown", "")
            program = Program(**{**row, "error": row.get("error", unknown)})
            (count,) = struct.unpack_from("<Q", runs, 8 * index) if 8 * index < len(runs) else (0,)
            program = replace(program, runs=count)
            where = (program.name, program.line, program.file or text)
            if before := listed.get(where):
                program = replace(
                    before,
                    runs=before.runs + count,
                    compiled=before.compiled + 1,
                    seconds=before.seconds + program.seconds,
                    hits=before.hits + program.hits,
                )
            listed[where] = program
    return [listed[where] for where in sorted(listed)], files


def to_toml(rehearsal: Rehearsal) -> str:
    """Return the text of programs.toml. The same run gives the same text, on any machine."""
    lines = [
        "# What a program compiled in a rehearsal; stagec rehearse writes it. Keep it beside your code, and compare.",
        f"format = {FORMAT}",
        f"device = {_value(rehearsal.device)}",
        f"devices = {rehearsal.devices}",
        *([f"processes = {rehearsal.processes}"] if rehearsal.processes > 1 else []),
        "",
        "[versions]",
        *(f"{name} = {_value(version)}" for name, version in sorted(rehearsal.versions.items())),
    ]
    if rehearsal.budget:
        lines += ["", "[budget]", *(f"{name} = {_value(value)}" for name, value in rehearsal.budget.items())]
    for program in rehearsal.programs:
        lines += ["", "[[programs]]"]
        plain = {field.name: field.default for field in fields(Program)}
        for name in _KEPT:
            value = getattr(program, name)
            if value != plain[name] and value not in ([], {}):
                lines.append(f"{name} = {_value(value)}")
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case Mapping():
            return "{ " + ", ".join(f"{_value(name)} = {_value(held)}" for name, held in value.items()) + " }"
        case list() | tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
    return str(value)


def read(path: str) -> Rehearsal:
    """Read a programs.toml. Raises StagecError, naming the file and the key, for anything else."""
    with blaming(path):
        data = toml.parse(reading.whole(path, toml.LARGEST).decode("utf-8"))
    if data.get("format") != FORMAT:
        write = f"let stagec rehearse write it again; this stagec reads format {FORMAT}"
        raise StagecError(Problem(path, "format", f"{data.get('format')!r} is not a format of programs", write))
    rows = data.get("programs", [])
    kinds = {
        "format": int,
        "device": str,
        "devices": int,
        "processes": int,
        "versions": dict,
        "budget": dict,
        "programs": list,
    }
    faults = [*_faults(data, kinds, ("device", "devices", "versions"), "")]
    for number, row in enumerate(rows if isinstance(rows, list) else ()):
        faults += _faults(row, _KINDS, ("name", "line"), f"programs[{number}].") if isinstance(row, dict) else ()
    if faults:
        write = "let stagec rehearse write it again; only the table budget is yours"
        raise StagecError(*(Problem(path, key, what, write) for key, what in faults))
    listed = [Program(**row) for row in rows]
    budget, processes = data.get("budget", {}), data.get("processes", 1)
    return Rehearsal(data["device"], data["devices"], data["versions"], listed, budget, processes)


def _faults(
    row: Mapping[str, Any], kinds: Mapping[str, type], needed: Sequence[str], where: str
) -> Iterator[tuple[str, str]]:
    for name in needed:
        if name not in row:
            yield f"{where}{name}", "missing key"
    for name, value in row.items():
        if name not in kinds:
            yield f"{where}{name}", "unknown key"
        elif not isinstance(value, kinds[name]) or isinstance(value, bool):
            yield f"{where}{name}", f"{value!r} is not {_SAY[kinds[name]]}"
        elif name == "file" and not _DIGEST.fullmatch(str(value)):  # it becomes part of a path
            yield f"{where}{name}", f"{value!r} is not a SHA-256 in hex"


_DIGEST = re.compile("[0-9a-f]{64}")
_SAY = {str: "a string", int: "a whole number", list: "an array", dict: "a table"}


def entries(folder: str) -> list[Entry]:
    """Read the index of a folder for JAX's compilation cache. Raises StagecError if stagec did not write it."""
    path = str(Path(folder, jax_entries.INDEX))
    with blaming(path, "name the folder that aot_programs built"):
        return jax_entries.read(reading.whole(path).decode("utf-8"))


def costs(path: str) -> dict[str, Any]:
    """Read what `building.for_jax.costs` says of a program. Raises StagecError, naming the file, for anything else."""
    with blaming(path, "let stagec action jax-compile write it again", "not the costs of a program: "):
        data = strict_json.parse(reading.whole(path), reading.LARGEST)
        _COSTS(data)
    return dict(data)


_COSTS = json_shapes.shape(
    {
        "size": int,
        "avoided": {...: str},
        "peak_bytes": METRIC,
        "flops": METRIC,
        "roofline": json_shapes.either(
            'a roofline or "unknown"', {"seconds": float, "bound": str, ...: object}, UNKNOWN
        ),
        ...: object,
    }
)


def misses(rehearsal: Rehearsal, keys: Mapping[str, bytes], index: Sequence[Entry]) -> list[str]:
    """Return what JAX did not find in a folder, a line each, and why. keys: as `observed` returns them."""
    told = []
    for program in rehearsal.programs:
        if program.hits == program.compiled or program.not_kept:
            continue
        why = program.error
        if program.file in keys:
            (key,) = Key.read(keys[program.file])
            parts = {name: hashlib.sha256(part).hexdigest() for name, part in key.parts.items()}
            miss = jax_misses.explain(Lookup(key.module, parts=parts, looked=True), index)
            why = "; ".join(f"{part}: {reason}" if part else reason for part, reason in miss.reasons)
        told.append(f"{_shown(program)}: {why}")
    return told


def storms(rehearsal: Rehearsal, most: int = 3) -> Iterator[tuple[Program, int, str]]:
    """Yield what JAX compiled more than `most` times for one line: one of the programs, how often, and the reason.

    Each process compiles a program for a TPU of its own, so of several each may be once among `programs`.
    """
    groups: dict[tuple[str, str], list[Program]] = {}
    for program in rehearsal.programs:
        groups.setdefault((program.name, program.line), []).append(program)
    for group in groups.values():
        if len(group) > most * rehearsal.processes:
            yield group[0], len(group), _reason(group)


def _reason(group: Sequence[Program]) -> str:
    counts = Counter(len(each.arguments) for each in group)
    if len(counts) > 1:
        return f"it has {min(counts)} to {max(counts)} arguments"
    differ = [
        (position, avals)
        for position, avals in enumerate(zip(*(each.arguments for each in group), strict=True))
        if len(set(avals)) > 1
    ]
    if differ:
        position, avals = max(differ, key=lambda each: len(set(each[1])))
        distinct = sorted(set(avals), key=lambda aval: (len(aval), aval))
        shown = ", ".join(distinct[:3]) + (", ..." if len(distinct) > 3 else "")
        return f"argument {position} is another aval each time: {shown}"
    return "its arguments are the same, so a static argument or a constant in it differs"


def changes(before: Rehearsal, now: Rehearsal) -> list[str]:
    """Return what is new, gone and changed, a line each."""
    lines = [
        f"{name} was {old!r}, and is {new!r}"
        for name, old, new in (
            ("device", before.device, now.device),
            ("devices", before.devices, now.devices),
            ("processes", before.processes, now.processes),
            *((name, before.versions.get(name), version) for name, version in now.versions.items()),
        )
        if old != new
    ]
    old, new = _by_place(before.programs), _by_place(now.programs)
    for place in sorted({*old, *new}):
        were, are = old.get(place, []), new.get(place, [])
        gone = [each for each in were if each.file not in {other.file for other in are}]
        come = [each for each in are if each.file not in {other.file for other in were}]
        pairs = list(zip(gone, come, strict=False))
        lines += [f"changed: {_shown(now_)}: {_difference(before_, now_)}" for before_, now_ in pairs]
        lines += [f"gone: {_shown(each)}" for each in gone[len(pairs) :]]
        lines += [f"new: {_shown(each)}" for each in come[len(pairs) :]]
    return lines


def _by_place(programs: Iterable[Program]) -> dict[tuple[str, str], list[Program]]:
    places: dict[tuple[str, str], list[Program]] = {}
    for program in programs:
        places.setdefault((program.name, program.line.rpartition(":")[0]), []).append(program)
    return places


def _shown(program: Program) -> str:
    return f"{program.name} ({program.line})"


def _difference(before: Program, now: Program) -> str:
    told = []
    for name in ("arguments", "results", "donated", "shardings", "mesh", "settings", "options", "devices"):
        was, is_now = asdict(before)[name], asdict(now)[name]
        if list(was) != list(is_now) if isinstance(was, tuple | list) else was != is_now:
            told.append(f"{name} were {was}, and are {is_now}")
    return "; ".join(told) or "its operations, or its constants"


def faults(rehearsal: Rehearsal) -> list[str]:
    """Return where a rehearsal is over its budget. Raises StagecError for a budget that says something else."""
    told = []
    for name, allowed in rehearsal.budget.items():
        match name:
            case "programs" if isinstance(allowed, int):
                if len(rehearsal.programs) > allowed:
                    told.append(f"{len(rehearsal.programs)} programs, and the budget has {allowed}")
            case "memory":
                with blaming(NAME, what="budget.memory: "):
                    most = values.read_bytes(allowed)
                told += [
                    f"{_shown(program)} takes {in_bytes(program.bytes)}, and the budget has {allowed}"
                    for program in rehearsal.programs
                    if program.bytes > most
                ]
            case _:
                what = f"{allowed!r} is not a budget"
                write = 'write programs = 40, or memory = "70GiB" for each program'
                raise StagecError(Problem(NAME, f"budget.{name}", what, write))
    return told
