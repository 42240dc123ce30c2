"""Builds on 1, 2 and 4 machines of a cluster of remote execution, against local ones: time, CPU, and what moves.

All machines are this one, so more of them do not end a build earlier than its cores allow. What an action takes of CPUs
besides its own work, and what it moves, is what it costs in a cluster of any size. The projection follows from that.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

from benchmarks import models
from benchmarks.measuring import Options, Row, ratio
from benchmarks.workspace import NO_WORKER, Workspace, workspace
from tests.clusters import Cluster, cluster_problem

COUNT, MACHINES, PROJECTED = 200, (1, 2, 4), (2, 8, 32)
_CORES = 2
_ONCE = "1 round"


def measure(options: Options) -> list[Row]:
    """Return the time of a build on each number of machines, what an action costs, and what larger clusters take.

    It costs CPU seconds, of which some are overhead, and bytes that move. Each is measured once, for a build is
    thousands of processes. There are no rows where `tools/cluster` cannot run.
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
    sandbox = (_cpu(server) - before) / built.actions
    remote = (*cluster.options(), "--noremote_accept_cached", "--spawn_strategy=remote", "--jobs=8")
    some = [f"//models:models.f{number:04}" for number in range(min(count, 4 * MACHINES[-1]))]
    spent = {}
    for machines in MACHINES:
        name = f"{machines} machine{'s' * (machines > 1)}"
        for number in range(2, machines + 1):
            if f"worker{number} runs" not in cluster("status"):
                cluster("add-worker", str(number))
        built.run("clean")
        warmed = built.run("build", *some, *remote)  # then each machine has the packages
        if warmed.returncode:
            raise RuntimeError(warmed.stderr)
        before_it = _Spent.so_far(server, cluster)
        seconds[name] = [built.clean_build(*remote)]
        spent[name] = _Spent.so_far(server, cluster).of_an_action(before_it, built.actions)
    what = f"remote build of {count:,} functions"
    rows = []
    for name in spent:
        times = {way: seconds[way] for way in ("local", name)}
        rows.append(Row(f"{what}, {name}", "a local build", ratio(seconds, name, "local"), None, times, note=_ONCE))
    for name, cost in spent.items():
        cpu = cost.bazel + cost.engine + cost.machines
        works = {"sandbox": [sandbox], "bazel": [cost.bazel], "engine": [cost.engine], "machines": [cost.machines]}
        rows += [
            Row(f"CPU of an action, {name}", "in a local sandbox", cpu / sandbox, None, works, note=_ONCE),
            Row(f"overhead of an action, {name}", "", cpu - sandbox, None, {}, "s", _ONCE),
            Row(f"moved by an action, {name}, to and from Bazel", "", cost.clients / 2**20, None, {}, "MiB", _ONCE),
            Row(f"moved by an action, {name}, to and from machines", "", cost.workers / 2**20, None, {}, "MiB", _ONCE),
        ]
    return [*rows, *_projection(spent[name], built.actions, seconds["local"][0], what)]


def _projection(spent: _Spent, actions: int, local: float, what: str) -> list[Row]:
    """Return what a build would take where Bazel, the engine and each machine have two cores of their own.

    The slowest of them sets the time. spent: by an action, with as many machines as were measured.
    """
    rows = []
    for machines in PROJECTED:
        seconds = actions / _CORES * max(spent.bazel, spent.engine, spent.machines / machines)
        name = f"{what}, projected for {machines} machines of {_CORES} cores"
        rows.append(Row(name, "a local build", seconds / local, None, {"local": [local], "projected": [seconds]}))
    return rows


@dataclass(frozen=True)
class _Spent:
    """CPU seconds of Bazel, of the engine (BuildGrid, PostgreSQL, nginx) and of the machines; and bytes that moved.

    clients, workers: to and from Bazel, and to and from machines, of the calls that nginx has logged.
    """

    bazel: float
    engine: float
    machines: float
    clients: float
    workers: float

    @classmethod
    def so_far(cls, server: list[int], cluster: Cluster) -> _Spent:
        """Return all that was spent until now."""
        numbers = {path.stem: int(path.read_text()) for path in (cluster.folder / "run").glob("*.pid")}
        machines = [number for name, number in numbers.items() if name.startswith("worker")]
        engine = [number for name, number in numbers.items() if not name.startswith("worker")]
        return cls(_cpu(server), _cpu(engine), _cpu(machines), *_moved(cluster))

    def of_an_action(self, before: _Spent, actions: int) -> _Spent:
        """Return what an action has spent since then."""
        both = zip(astuple(self), astuple(before), strict=True)
        return _Spent(*((now - then) / actions for now, then in both))


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
    processes, left = set[int](), set(roots)
    while left:
        processes |= left
        left = {pid for root in left for pid in children.get(root, ())} - processes
    return sum(ticks.get(pid, 0) for pid in processes) / os.sysconf("SC_CLK_TCK")
