"""The CPU time of a request of a small model: `stagec serve` beside a bare server, and with two processes.

Clients take a share of the machine, so where it has two cores, nobody sees what a second process brings. CPU time shows
it: who takes as much for a request, and splits requests evenly, answers twice as many where each process has a core.
Where wrk is installed, a client that takes a tenth of two cores, both are also asked for all that they can answer.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from benchmarks import serving
from benchmarks.measuring import Options, Row, ratio
from tests.building import ROOT

SERVERS = ("bare", "bare XLA", "stagec", "workers")
CLIENTS, SECONDS = (1, 64), 2
"""Two processes get twice as many clients: a process answers those together that it has."""


def measure(options: Options) -> list[Row]:
    """Return the rows, of requests with bytes and with JSON."""
    numbers: dict[str, list[float]] = {}
    bundle = serving.bundle("small", options.folder)
    with ExitStack() as servers:
        started = {
            each: servers.enter_context(serving.started(each, "small", bundle, options.folder)) for each in SERVERS
        }
        files = {}
        for kind in ("bytes", "JSON"):
            files[kind] = options.folder / kind
            files[kind].write_bytes(serving.request_of("small", "stagec", as_json=kind == "JSON"))
        for port, _ in started.values():
            serving.first_answer(port, files["bytes"].read_bytes())
        for _, kind, clients, server in itertools.product(range(options.rounds), files, CLIENTS, SERVERS):
            port, process = started[server]
            before = serving.cpu_seconds(process)
            count = clients * 2 if server == "workers" else clients
            words = ["-m", "benchmarks.clients", str(port), str(count), str(SECONDS), str(files[kind])]
            command = [*serving.first_in_line(), sys.executable, *words]
            told = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
            if told["failed"]:
                raise RuntimeError(f"{server}: {told['failed']} requests failed")
            used = [after - before.get(of, 0) for of, after in serving.cpu_seconds(process).items()]
            numbers.setdefault(f"{server} {kind} {clients}", []).append(sum(used) / told["answers"])
            if server == "workers":
                numbers.setdefault(f"half {kind} {clients}", []).append(sum(used) / 2)
                numbers.setdefault(f"busier {kind} {clients}", []).append(max(used))
    return [*_rows(numbers), *(_answered(bundle, options) if shutil.which("wrk") else [])]


def _answered(bundle: Path, options: Options) -> Iterator[Row]:
    """Yield how many requests a second two processes answer on two cores, beside one that has one of the cores."""
    request = serving.request_of("small", "stagec")
    head, body = request.split(b"\r\n\r\n", 1)
    first, *headers = (line.decode() for line in head.split(b"\r\n") if not line.startswith((b"host", b"content-l")))
    lines = ['wrk.method = "POST"', f'wrk.body = "{"".join(f"{chr(92)}{byte:03d}" for byte in body)}"']
    lines += [f'wrk.headers["{name}"] = "{value}"' for name, value in (header.split(": ") for header in headers)]
    script = options.folder / "request.lua"
    script.write_text("\n".join(lines))
    many: dict[str, list[float]] = {}
    for _, server in itertools.product(range(options.rounds), ("workers", "stagec")):
        with serving.started(server, "small", bundle, options.folder) as (port, process):
            serving.first_answer(port, request)
            if server == "stagec":
                subprocess.run(["taskset", "-a", "-p", "-c", "0", str(process)], check=True, capture_output=True)
            clients = CLIENTS[-1] * (2 if server == "workers" else 1)
            url = f"http://127.0.0.1:{port}{first.split()[1]}"
            wrk = [*serving.first_in_line(), "wrk", "-t1", f"-c{clients}", f"-d{2 * SECONDS}s", "-s", str(script), url]
            told = [subprocess.run(wrk, check=True, capture_output=True, text=True).stdout for _ in range(2)][-1]
            if "Non-2xx" in told:
                raise RuntimeError(told)
            many.setdefault(server, []).append(1 / float(re.findall(r"Requests/sec: +([\d.]+)", told)[0]))
    yield Row("seconds between answers of two processes", "one on one core", ratio(many, *many), 0.5, many, note="wrk")


def _rows(numbers: Mapping[str, list[float]]) -> Iterator[Row]:
    for kind, clients in itertools.product(("bytes", "JSON"), CLIENTS):
        of = f"{kind}, {clients} client{'s' if clients > 1 else ''}"
        pairs: list[tuple[str, str, str, float | None]] = [
            ("CPU seconds of a request", "stagec", "bare", 1.5),
            ("CPU seconds of a request, of a server that calls the executable too", "stagec", "bare XLA", None),
        ]
        if clients > 1:
            pairs += [
                ("CPU seconds of a request with two processes", "workers", "stagec", 1.1),
                ("CPU seconds of the busier process of two", "busier", "half", None),
            ]
        for what, ours, other, target in pairs:
            both = {f"{each} {kind} {clients}": numbers[f"{each} {kind} {clients}"] for each in (ours, other)}
            measured = ratio(both, *both)
            yield Row(f"{what}: {of}", other, measured, target, both, note=f"{len(next(iter(both.values())))} rounds")
