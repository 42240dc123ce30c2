"""The kernels of an executable for GPUs, for people: the resources of each, and its PTX and SASS.

The resources come from the machine code, without a vendor's tools. nvdisasm prints the SASS, and ptxas makes machine
code from PTX.
"""

from __future__ import annotations

import base64
import re
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stagec.backends.analysis import UNKNOWN, of_kernels
from stagec.backends.gpu import container, kernels
from stagec.backends.gpu.kernels import Kernel
from stagec.building.limits import in_bytes
from stagec.bundle.archive import Archive
from stagec.bundle.description import Description
from stagec.core.builds.platforms import GPUS
from stagec.core.data import child, reading
from stagec.core.messages.errors import StagecError, blaming
from stagec.hardware import gpu_devices
from stagec.pjrt import compatibility, packages

FIGURES = ("registers", "shared_memory", "spills", "occupancy", "blocks", "threads")
"""The figures of a kernel to compare."""
_PROGRAMS = ("nvidia.cu13.bin", "nvidia.cuda_nvcc.bin")
_TOOLS = {"ptxas": "compiler/cuda.lock", "nvdisasm": "compiler/cuda_tools.lock"}
"""NVIDIA's programs, and the lock that has each."""
_SECONDS = 300
_NAMES, _LONGEST = 100, 200
"""How many names of kernels a message has, and how many characters of each."""
_VERSION = re.compile(r"^\s*\.version\b", re.MULTILINE)
_TARGET = re.compile(r"^\s*\.target\s+(sm_\d+[af]?)", re.MULTILINE)
_ENTRY = re.compile(r"\.entry\s+([\w$.]+)")
_FUNCTION = re.compile(r"^//-+ \.text\.(\S+) +-+$", re.MULTILINE)
"""The first line of a function in nvdisasm's output."""


def of_executable(data: bytes, description: Description, timed: bool = False) -> list[Kernel]:
    """Return the kernels of an executable (`backends.gpu.kernels.of`); none for another platform.

    timed: add the bound of each. A child process reads the executable (`core.data.child`).
    Raises ValueError when the bytes are not an executable for GPUs, or its description does not name the
    device.
    """
    platform = description.target.platform
    if platform not in GPUS:
        return []
    settings: Mapping[str, Any] = description.target.settings
    return list(child.call(rows, data, platform, settings.get("figures", {}), description.nr_devices, timed))


def rows(data: bytes, platform: str, figures: Mapping[str, Any], devices: int, timed: bool) -> list[Kernel]:
    """Do that in this process, which may end, or take long, if the bytes are somebody else's.

    figures: of the device. devices: their number.
    """
    try:
        device = gpu_devices.read(platform, figures)
    except StagecError as error:
        raise ValueError(f"its description has no device: {error}") from error
    return kernels.of(data, device, _optimized(data) if timed else "", devices)


def _optimized(data: bytes) -> str:
    """Return the optimized HLO of an executable as a string. Raises ValueError; jaxlib may end the process."""
    module = next(part for name, part, _ in container.layers(data) if name == "optimized HLO")
    return str(compatibility.hlo().HloModule.from_serialized_hlo_module_proto(module).to_string()) if module else ""


def of_code(code: bytes) -> list[Kernel]:
    """Return the functions of machine code in the same form; the figures of launches are unknown."""
    return [
        {
            **dict.fromkeys(("blocks", "runs", "seconds", "bound", "occupancy", "limited_by"), UNKNOWN),
            "name": name,
            "instructions": [],
            "threads": function.threads or UNKNOWN,
            "registers": function.registers,
            "shared_memory": function.shared,
            "spills": function.spills,
            "stack": function.stack,
        }
        for name, function in kernels.functions(code).items()
    ]


def figures(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures to compare, by the name of the kernel."""
    return {row["name"]: {name: row[name] for name in FIGURES} for row in rows}


def in_bundle(archive: Archive, executable: Mapping[str, Any], description: Description) -> list[Kernel]:
    """Return the kernels of an executable, an entry of a bundle's index. Raises StagecError, naming the bundle."""
    if description.target.platform not in GPUS:
        return []
    with blaming(archive.path, what=f"{executable['executable']}: "):
        return of_executable(archive.read(executable["executable"], reading.LARGEST), description)


def in_file(path: str, description: Description) -> list[Kernel]:
    """Return the kernels of the executable in a file. Raises StagecError, naming it."""
    with blaming(path, what="not the executable that its description is of: "):
        return of_executable(reading.whole(path), description)


def changes(first: Iterable[Mapping[str, Any]], second: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the differences: "kernel", "figure" of `FIGURES`, and its value in the "first" and "second"; None: none."""
    before, after = figures(first), figures(second)
    for name in {**before, **after}:
        for figure in FIGURES:
            old, new = before.get(name, {}).get(figure), after.get(name, {}).get(figure)
            if old != new:
                yield {"kernel": name, "figure": figure, "first": old, "second": new}


def summary(rows: Sequence[Kernel]) -> str:
    """Return a line about all kernels."""
    taken = of_kernels(rows)
    spills = "no spills" if taken["spills"] == 0 else f"spills of {_bytes(taken['spills'])}"
    most = f"at most {taken['registers']} registers and {_bytes(taken['shared_memory'])} of shared memory, {spills}"
    return f"{len(rows)} kernel{'s' * (len(rows) != 1)}: {most}" if rows else "no kernels"


def in_all(rows: Sequence[Kernel]) -> float | None:
    """Return the least seconds of a call if its kernels run one after the other; None: not known."""
    pairs = [(row["runs"], row["seconds"]) for row in rows]
    return None if any(UNKNOWN in pair for pair in pairs) else sum(runs * seconds for runs, seconds in pairs)


def lines(rows: Sequence[Kernel]) -> Iterator[str]:
    """Yield a table for a person."""
    table = [("", "runs", "blocks x threads", "registers", "shared", "spills", "occupancy", "at least", "bound by")]
    for row in rows:
        occupancy = row["occupancy"]
        if occupancy != UNKNOWN:
            occupancy = f"{occupancy:.0%} ({row['limited_by']})"
        sizes = f"{_count(row['blocks'])} x {_count(row['threads'])}"
        seconds = row["seconds"] if row["seconds"] == UNKNOWN else f"{row['seconds'] * 1e6:,.3g} us"
        figure = [_count(row[name]) for name in ("registers", "shared_memory", "spills")]
        table.append((row["name"], _count(row["runs"]), sizes, *figure, occupancy, seconds, row["bound"]))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for name, *cells in table:
        row_text = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
        yield "  ".join([f"{name:<{widths[0]}}", *row_text])


def code_of(data: bytes, name: str) -> bytes:
    """Return the machine code of a kernel of an executable, which a child process reads.

    Raises ValueError when it is something else, or has no such kernel.
    """
    return base64.b64decode(child.call(encoded, data, name))


def encoded(data: bytes, name: str) -> str:
    """Do that in this process, which may take long if the bytes are somebody else's; return the code in base64."""
    code: dict[str, bytes] = {}
    for launch in container.launches(data):
        if launch.code is not None:
            names = [launch.function] if launch.function else list(kernels.functions(launch.code))
            code |= dict.fromkeys(names, launch.code)
    if name not in code:
        raise ValueError(no_kernel(name, code))
    return base64.b64encode(code[name]).decode()


def no_kernel(name: str, names: Collection[str]) -> str:
    """Say that it has no code of a kernel, and name the kernels that it has code of."""
    first, more = [*names][:_NAMES], len(names) - _NAMES
    listed = ", ".join([*(known[:_LONGEST] for known in first), *([f"and {more:,} more"] if more > 0 else [])])
    return f'it has no code of a kernel "{name}"; it has {listed or "none"}'


def modules(ptx: str) -> dict[str, str]:
    """Return the modules of PTX, by the name of the first kernel in each. Raises ValueError if there is none."""
    starts = [match.start() for match in _VERSION.finditer(ptx)]
    parts = [ptx[start:end].strip() + "\n" for start, end in zip(starts, [*starts, None][1:], strict=False)]
    named = {match[1]: part for part in parts if (match := _ENTRY.search(part))}
    if not named:
        raise ValueError("it has no kernel in PTX")
    return named


def assemble(module: str) -> bytes:
    """Return the machine code that ptxas makes of a module of PTX, for the device that it names. Raises ValueError."""
    target = _TARGET.search(module)
    if target is None:
        raise ValueError("the PTX does not say for which device it is: it has no .target sm_90 or the like")
    with tempfile.TemporaryDirectory(prefix="stagec-") as scratch:
        Path(scratch, "kernel.ptx").write_text(module)
        _run(scratch, "ptxas", f"-arch={target[1]}", "kernel.ptx", "-o", "kernel.cubin")
        return Path(scratch, "kernel.cubin").read_bytes()


def sass(code: bytes, name: str) -> str:
    """Return the instructions of a kernel as nvdisasm prints them. Raises ValueError if it cannot."""
    with tempfile.TemporaryDirectory(prefix="stagec-") as scratch:
        Path(scratch, "kernel.cubin").write_bytes(code)
        text = _run(scratch, "nvdisasm", "-c", "kernel.cubin")
    _, *pairs = _FUNCTION.split(text)
    functions = dict(zip(pairs[::2], pairs[1::2], strict=True))
    if name not in functions:
        raise ValueError(f"nvdisasm shows no kernel {name}")
    return functions[name].strip("\n") + "\n"


def _run(where: str, tool: str, *arguments: str) -> str:
    """Run a program of NVIDIA's in a folder. Raises ValueError if there is none, or it fails."""
    program = next(filter(None, (packages.file(package, tool) for package in _PROGRAMS)), None)
    if program is None:
        raise ValueError(f"{tool} is not installed: pip install --no-deps -r {_TOOLS[tool]}, of a clone of stagec")
    try:
        done = subprocess.run(
            [program.absolute(), *arguments],
            cwd=where,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{tool} did not end within {_SECONDS} seconds") from None
    except OSError as error:
        raise ValueError(f"{tool} cannot be run: {error.strerror}") from error
    if done.returncode:
        first = next(iter((done.stderr or done.stdout).strip().splitlines()), f"exit status {done.returncode}")
        raise ValueError(f"{tool} refuses it: {first}")
    return done.stdout


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _bytes(value: Any) -> str:
    return value if value == UNKNOWN else in_bytes(value)
