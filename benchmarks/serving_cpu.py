"""The CPU time of a request of a small model: `stagec serve` beside a bare server, and with two processes.

Clients take a share of the machine, so where it has two cores, nobody sees what a second process brings. CPU time shows
it: who takes as much for a request, and splits requests evenly, answers twice as many where each process has a core.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

from benchmarks import serving
from benchmarks.measuring import Options, Row, ratio
from tests.building import ROOT

SERVERS = ("bare", "stagec", "workers")
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
    return [*_rows(numbers)]


def _rows(numbers: Mapping[str, list[float]]) -> Iterator[Row]:
    for kind, clients in itertools.product(("bytes", "JSON"), CLIENTS):
        of = f"{kind}, {clients} client{'s' if clients > 1 else ''}"
        pairs: list[tuple[str, str, str, float | None]] = [("CPU seconds of a request", "stagec", "bare", 1.5)]
        if clients > 1:
            pairs += [
                ("CPU seconds of a request with two processes", "workers", "stagec", 1.1),
                ("CPU seconds of the busier process of two", "busier", "half", None),
            ]
        for what, ours, other, target in pairs:
            both = {f"{each} {kind} {clients}": numbers[f"{each} {kind} {clients}"] for each in (ours, other)}
            measured = ratio(both, *both)
            yield Row(f"{what}: {of}", other, measured, target, both, note=f"{len(next(iter(both.values())))} rounds")
