"""A server of a bundle beside servers that a person would write, and beside the calls alone.

Each round starts every server, and then asks them in turn, for a second each, with 1, 16 and 64 clients: so what else
the machine does meets all of them. Clients take a share of the machine.

Where the kernel allows it, as it does for root, servers and clients have real-time priority. On a machine with other
work, a server that calls XLA from 40 threads gets more of the cores than one that calls it from two: it answered 2.5
times as many requests of ViT for the same CPU seconds. With that priority, other work does not take part.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import numpy as np

import stagec
from benchmarks import served_models
from benchmarks.measuring import Options, Row, ratio
from stagec.bundle import safetensors
from stagec.core.sizes.avals import Aval
from tests.building import COMPILER, EXTENSIONS, ROOT, build

CLIENTS = (1, 16, 64)
SECONDS, TURNS = 1, 3
"""Of each load, and how often each server has its turn in a round. A load with few answers takes longer."""
SERVERS = {
    "mlp": ("stagec", "workers", "jax", "onnx"),
    "vit": ("stagec", "workers", "jax", "onnx"),
    "decode": ("stagec", "jax"),
}
"""What serves each model: `workers` is stagec with two processes, which keep no state of sequences."""
BUCKETS = {"mlp": [1, 8, 32, 64], "vit": [1, 4, 8], "small": [1, 8, 32]}
_DECODE = """
[functions.decode]
entry = "benchmarks.served_models:decode"
args = ["safetensors:decode.safetensors", {{ keys = "{cache}", values = "{cache}", length = "i32" }}, "i32[1]"]
bind = {{ params = "decode.safetensors" }}
donate_argnames = ["cache"]
targets = ["cpu-avx2"]
serve.state = {{ cache = {{ argument = "cache", result = "result[1]" }} }}
"""
_FUNCTION = """
[functions.{name}]
entry = "benchmarks.served_models:{name}"
args = ["safetensors:{name}.safetensors", "f32[{sizes}]"]
bind = {{ params = "{name}.safetensors" }}
buckets = {{ batch = {buckets} }}
padding = {{ batch = {{ fill = 0 }} }}
targets = ["cpu-avx2"]
"""
_PACKAGES = Path(__file__).with_name("serving.lock")


def measure(options: Options) -> list[Row]:
    """Return the rows of all models. FastAPI and onnxruntime are installed into the options' folder."""
    folder = options.folder
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--requirement"]
    subprocess.run([*pip, str(_PACKAGES), "--target", str(folder / "packages")], check=True)
    rows: list[Row] = []
    for model in SERVERS:
        served = bundle(model, folder)
        rounds = [_round(model, served, folder) for _ in range(options.rounds)]
        measured = {key: [numbers[key] for numbers in rounds] for key in rounds[0]}
        rows += _rows(model, measured, options.rounds)
    return rows


def _rows(model: str, measured: Mapping[str, list[float]], rounds: int) -> Iterator[Row]:
    """Yield the rows of a model. measured: a number for each round, by what it is: `stagec 64 p99`."""

    def row(name: str, ours: str, other: str, target: float | None, note: str = "") -> Row:
        of = {ours: measured[ours], other: measured[other]}
        return Row(f"{model}: {name}", other, ratio(of, ours, other), target, of, note=note or f"{rounds} rounds")

    note = f"{rounds} rounds; raw: a loop of calls{'' if first_in_line() else '; not with real-time priority'}"
    yield row("seconds of a request, 64 clients", "stagec 64", "raw", 1.3, note)
    yield row("CPU seconds of a request, 64 clients", "stagec 64 cpu", "raw cpu", 1.3, note)
    if "workers" in SERVERS[model]:  # on a machine whose cores servers and clients fill
        yield row("seconds of a request of two workers, 64 clients", "workers 64", "stagec 64", 0.5)
    for rival in SERVERS[model][1:]:
        for clients in CLIENTS:
            with_clients = f"{clients} client{'s' if clients > 1 else ''}"
            target = 1.0 if rival == "jax" else None
            yield row(f"seconds of a request, {with_clients}", f"stagec {clients}", f"{rival} {clients}", None)
            cpu = f"CPU seconds of a request, {with_clients}"
            yield row(cpu, f"stagec {clients} cpu", f"{rival} {clients} cpu", None)
            yield row(f"p50, {with_clients}", f"stagec {clients} p50", f"{rival} {clients} p50", None)
            yield row(f"p99, {with_clients}", f"stagec {clients} p99", f"{rival} {clients} p99", target)
        yield row("start to first answer", "stagec start", f"{rival} start", target)


def bundle(model: str, folder: Path) -> Path:
    """Build the bundle of a model in a folder of its own there."""
    root = folder / model
    (root / "benchmarks").mkdir(parents=True)
    (root / "benchmarks" / "served_models.py").write_text(Path(served_models.__file__).read_text("utf-8"))
    weights = {
        name: safetensors.Tensor(Aval("f32", array.shape), array.tobytes())
        for name, array in served_models.weights(model).items()
    }
    with (root / f"{model}.safetensors").open("wb") as file:
        file.writelines(safetensors.parts(weights))
    if model == "decode":
        function = _DECODE.format(cache=f"f32[{','.join(map(str, (*served_models.CACHE, served_models.HEAD)))}]")
    else:
        sizes = ",".join(["batch", *map(str, served_models.SHAPES[model])])
        function = _FUNCTION.format(name=model, sizes=sizes, buckets=BUCKETS[model])
    (root / "served.toml").write_text(f'[manifest]\nname = "served"\nversion = "1"\n{function}')
    return build("served.toml", root, root)


def _round(model: str, served: Path, folder: Path) -> dict[str, float]:
    """Return seconds by what they are of."""
    measured: dict[str, float] = {}
    turns: dict[str, list[float]] = {}
    with ExitStack() as servers:
        loaded = servers.enter_context(stagec.load(served, policy="executable_only"))
        requests, ports, processes = {}, {}, {}
        for server in SERVERS[model]:
            requests[server] = [folder / f"{model}.{server}.{which}" for which in ("request", "first")]
            for file, first in zip(requests[server], (False, True), strict=True):
                file.write_bytes(request_of(model, server, first))
            ports[server], processes[server] = servers.enter_context(started(server, model, served, folder))
            measured[f"{server} start"] = first_answer(ports[server], requests[server][1].read_bytes())
        for _ in range(TURNS):
            for name, seconds in zip(("raw", "raw cpu"), _raw(loaded[model], model), strict=True):
                turns.setdefault(name, []).append(seconds)
            for clients, server in itertools.product(CLIENTS, SERVERS[model]):
                words = ["-m", "benchmarks.clients", str(ports[server]), str(clients), str(SECONDS)]
                command = [*first_in_line(), sys.executable, *words, *map(str, requests[server])]
                before = sum(cpu_seconds(processes[server]).values())
                told = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
                if told["failed"]:
                    raise RuntimeError(f"{server}: {told['failed']} requests failed")
                used = (sum(cpu_seconds(processes[server]).values()) - before) / told["answers"]
                turns.setdefault(f"{server} {clients} cpu", []).append(used)
                turns.setdefault(f"{server} {clients}", []).append(1 / told["per_second"])
                for part in ("p50", "p99"):
                    turns.setdefault(f"{server} {clients} {part}", []).append(told[part])
    return measured | {name: median(seconds) for name, seconds in turns.items()}


def cpu_seconds(process: int) -> dict[int, float]:
    """Return what a process and its workers computed, by number: what else the machine does changes it least."""
    fields = Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()
    workers = Path(f"/proc/{process}/task/{process}/children").read_text("utf-8").split()
    own = {process: (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")}
    return functools.reduce(operator.or_, (cpu_seconds(int(worker)) for worker in workers), own)


def _raw(call: stagec.Function, model: str) -> tuple[float, float]:
    """Return the seconds of a call of one row, in a loop, and the CPU seconds."""
    x = np.zeros((1, *served_models.SHAPES[model]), served_models.DTYPES[model])
    state = [stagec.device_put(served_models.empty_cache())] if model == "decode" else []

    def once() -> None:
        result = call(*state, x)
        if state:
            result, state[0] = result
        np.asarray(result)

    once()
    count, began, computed = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() < began + SECONDS:
        once()
        count += 1
    return (time.perf_counter() - began) / count, (time.process_time() - computed) / count


def request_of(model: str, server: str, first: bool = False, as_json: bool = False) -> bytes:
    """Return all bytes of a request with one row.

    first: of a client, whose number replaces `@@@@@@`. as_json: for `stagec`, no bytes.
    """
    dtype = served_models.DTYPES[model]
    x = np.random.default_rng(0).standard_normal((1, *served_models.SHAPES[model])).astype(dtype)
    if server not in ("stagec", "workers"):
        path = "/predict?sequence=@@@@@@" if model == "decode" else "/predict"
        head = f"POST {path} HTTP/1.1\r\nhost: here\r\ncontent-length: {x.nbytes}\r\n\r\n"
        return head.encode() + x.tobytes()
    name = {"vit": "images", "decode": "tokens"}.get(model, "x")
    values = {"data": x.ravel().tolist()} if as_json else {"parameters": {"binary_data_size": x.nbytes}}
    datatype = "INT32" if dtype == np.int32 else "FP32"
    inputs = [{"name": name, "shape": x.shape, "datatype": datatype, **values}]
    if as_json:
        body = json.dumps({"inputs": inputs}).encode()
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: here\r\ncontent-length: {len(body)}\r\n\r\n"
        return head.encode() + body
    sequence = {"sequence_id": "@@@@@@", "sequence_start": first} if model == "decode" else {}
    told = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True, **sequence}}).encode()
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: here\r\ninference-header-content-length: {len(told)}\r\n"
    return f"{head}content-length: {len(told) + x.nbytes}\r\n\r\n".encode() + told + x.tobytes()


@functools.cache
def first_in_line() -> list[str]:
    """Return the words before a command that give it real-time priority; none where nobody may."""
    words = ["chrt", "--rr", "1"]
    if not shutil.which("chrt"):
        return []
    done = subprocess.run([*words, "true"], check=False, stderr=subprocess.DEVNULL)
    return [] if done.returncode else words


@contextmanager
def started(server: str, model: str, served: Path, folder: Path) -> Iterator[tuple[int, int]]:
    """Give the port of a server, and the number of its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    if server in ("stagec", "workers"):
        words = ["-m", "stagec", "serve", str(served), "--port", str(port), "--drain", "0", "--sequences", "100"]
        words += ["--workers", "2"] if server == "workers" else []
    elif server in ("bare", "bare XLA"):
        words = ["-m", "benchmarks.bare", str(port), *([str(served)] if server == "bare XLA" else [])]
    else:
        words = ["-m", "benchmarks.rivals", server, model, str(port)]
    paths = [str(COMPILER), *EXTENSIONS, str(ROOT), *sys.path, str(folder / "packages")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [*first_in_line(), sys.executable, *words]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(timeout=60)


def first_answer(port: int, request: bytes) -> float:
    """Return the seconds until a server that was just started answers."""
    began = time.perf_counter()
    while time.perf_counter() < began + 120:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.sendall(request)
                if connection.recv(100).startswith(b"HTTP/1.1 200"):
                    return time.perf_counter() - began
        except OSError:
            time.sleep(0.01)
    raise RuntimeError("the server does not answer")
