"""Builds on 1, 2 and 4 machines of a cluster of remote execution, against local ones: time, CPU, and what moves.

All machines are this one, so more of them do not end a build earlier than its cores allow. What an action takes of CPUs
besides its own work, and what it moves, is what it costs in a cluster of any size.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks import models
from benchmarks.measuring import Options, Row, ratio
from benchmarks.workspace import NO_WORKER, Workspace, workspace
from tests.clusters import Cluster, cluster_problem

COUNT, MACHINES = 200, (1, 2, 4)
_ONCE = "1 round"


def measure(options: Options) -> list[Row]:
    """Return the time of a build on each number of machines, the CPU seconds of its actions, and what they move.

    Each is measured once, for a build is thousands of processes. There are no rows where `tools/cluster` cannot run.
    """
    if problem := cluster_problem():
        print(f"remote: {problem}", file=sys.stderr)
        return []
    count = min(COUNT, options.sizes[-1])
    folder = Path(tempfile.mkdtemp(prefix="stagec-cluster-", dir="/tmp"))  # sockets have short paths
    folder.chmod(0o755)
    cluster = Cluster(folder)
    with workspace(options.folder / "remote", models.small(count), {"small": "SSE4_2"}) as built:
        try:
            cluster("start", "1")
            return _rows(built, cluster, count)
        finally:
            cluster("remove")


def _rows(built: Workspace, cluster: Cluster, count: int) -> list[Row]:
    server = [int(built.run("info", "server_pid").stdout)]
    seconds = {"local": [built.clean_build()]}
    before = _cpu(server)
    seconds["sandbox"] = [built.clean_build(*NO_WORKER)]
    cpu = {"sandbox": [(_cpu(server) - before) / built.actions]}
    remote = (*cluster.options(), "--noremote_accept_cached", "--spawn_strategy=remote", "--jobs=8")
    moved = {}
    for machines in MACHINES:
        name = f"{machines} machine{'s' * (machines > 1)}"
        for number in range(2, machines + 1):
            if f"worker{number} runs" not in cluster("status"):
                cluster("add-worker", str(number))
        built.clean_build(*remote)  # then each machine has the packages
        before, bytes_before = _cpu([*server, *cluster.processes()]), _moved(cluster)
        seconds[name] = [built.clean_build(*remote)]
        cpu[name] = [(_cpu([*server, *cluster.processes()]) - before) / built.actions]
        moved[name] = [
            (here - there) / built.actions for here, there in zip(_moved(cluster), bytes_before, strict=True)
        ]
    what = f"remote build of {count:,} functions"
    rows = []
    for name in moved:
        times = {one: seconds[one] for one in ("local", name)}
        rows.append(Row(f"{what}, {name}", "a local build", ratio(seconds, name, "local"), None, times, note=_ONCE))
    for name, (clients, workers) in moved.items():
        works = {one: cpu[one] for one in ("sandbox", name)}
        rows += [
            Row(
                f"CPU of an action, {name}", "in a local sandbox", ratio(cpu, name, "sandbox"), None, works, note=_ONCE
            ),
            Row(f"moved by an action, {name}, to and from Bazel", "", clients / 2**20, None, {}, "MiB", _ONCE),
            Row(f"moved by an action, {name}, to and from machines", "", workers / 2**20, None, {}, "MiB", _ONCE),
        ]
    return rows


def _moved(cluster: Cluster) -> tuple[int, int]:
    """Return the bytes that went to and from Bazel, and to and from machines, of the calls that nginx has logged."""
    logs = (cluster.folder / "logs" / f"{name}.calls" for name in ("clients", "workers"))
    clients, workers = (sum(map(int, re.findall(r" (?:in|out)=(\d+)", log.read_text()))) for log in logs)
    return clients, workers


def _cpu(roots: Iterable[int]) -> float:
    """Return the CPU seconds of processes, and of all that they have started."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
        ticks[int(path.parent.name)] = sum(map(int, fields[11:15]))
    found, left = set[int](), set(roots)
    while left:
        found |= left
        left = {pid for root in left for pid in children.get(root, ())} - found
    return sum(ticks.get(pid, 0) for pid in found) / os.sysconf("SC_CLK_TCK")
