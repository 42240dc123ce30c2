"""A server of a bundle beside servers that a person would write, and beside the calls alone.

Each round starts every server, and then asks them in turn, for a second each, with 1, 16 and 64 clients: so what else
the machine does meets all of them. Clients take a share of the machine.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import numpy as np
from safetensors.numpy import save_file

import stagec
from benchmarks import served_models
from benchmarks.measuring import Options, Row, ratio
from tests.building import COMPILER, ROOT, build

CLIENTS = (1, 16, 64)
SECONDS, TURNS = 1, 3
"""Of each load, and how often each server has its turn in a round. A load with few answers takes longer."""
SERVERS = ("stagec", "jax", "onnx")
BUCKETS = {"mlp": [1, 8, 32, 64], "vit": [1, 4, 8]}
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
    for model in served_models.SHAPES:
        bundle = _bundle(model, folder)
        rounds = [_round(model, bundle, folder) for _ in range(options.rounds)]
        measured = {key: [one[key] for one in rounds] for key in rounds[0]}
        rows += _rows(model, measured, options.rounds)
    return rows


def _rows(model: str, measured: Mapping[str, list[float]], rounds: int) -> Iterator[Row]:
    """Yield the rows of a model. measured: a number for each round, by what it is: `stagec 64 p99`."""

    def row(name: str, one: str, other: str, target: float | None, note: str = "") -> Row:
        of = {one: measured[one], other: measured[other]}
        return Row(f"{model}: {name}", other, ratio(of, one, other), target, of, note=note or f"{rounds} rounds")

    note = f"{rounds} rounds; raw: a loop of calls"
    yield row("seconds of a request, 64 clients", "stagec 64", "raw", 1.3, note)
    yield row("CPU seconds of a request, 64 clients", "stagec 64 cpu", "raw cpu", 1.3, note)
    for rival in ("jax", "onnx"):
        for clients in CLIENTS:
            with_clients = f"{clients} client{'s' if clients > 1 else ''}"
            target = 1.0 if rival == "jax" else None
            yield row(f"seconds of a request, {with_clients}", f"stagec {clients}", f"{rival} {clients}", None)
            cpu = f"CPU seconds of a request, {with_clients}"
            yield row(cpu, f"stagec {clients} cpu", f"{rival} {clients} cpu", None)
            yield row(f"p50, {with_clients}", f"stagec {clients} p50", f"{rival} {clients} p50", None)
            yield row(f"p99, {with_clients}", f"stagec {clients} p99", f"{rival} {clients} p99", target)
        yield row("start to first answer", "stagec start", f"{rival} start", target)


def _bundle(model: str, folder: Path) -> Path:
    root = folder / model
    (root / "benchmarks").mkdir(parents=True)
    (root / "benchmarks" / "served_models.py").write_text(Path(served_models.__file__).read_text("utf-8"))
    save_file(served_models.weights(model), root / f"{model}.safetensors")
    sizes = ",".join(["batch", *map(str, served_models.SHAPES[model])])
    function = _FUNCTION.format(name=model, sizes=sizes, buckets=BUCKETS[model])
    (root / "served.toml").write_text(f'[manifest]\nname = "served"\nversion = "1"\n{function}')
    return build("served.toml", root, root)


def _round(model: str, bundle: Path, folder: Path) -> dict[str, float]:
    """Return seconds by what they are of."""
    measured: dict[str, float] = {}
    turns: dict[str, list[float]] = {}
    with ExitStack() as servers:
        loaded = servers.enter_context(stagec.load(bundle, policy="executable_only"))
        requests, ports, processes = {}, {}, {}
        for server in SERVERS:
            requests[server] = folder / f"{model}.{server}.request"
            requests[server].write_bytes(request_of(model, server))
            ports[server], processes[server] = servers.enter_context(_serving(server, model, bundle, folder))
            measured[f"{server} start"] = _first_answer(ports[server], requests[server].read_bytes())
        for _ in range(TURNS):
            for name, seconds in zip(("raw", "raw cpu"), _raw(loaded[model], model), strict=True):
                turns.setdefault(name, []).append(seconds)
            for clients, server in itertools.product(CLIENTS, SERVERS):
                words = ["-m", "benchmarks.clients", str(ports[server]), str(clients), str(SECONDS)]
                command = [sys.executable, *words, str(requests[server])]
                before = _cpu_seconds(processes[server])
                told = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
                if told["failed"]:
                    raise RuntimeError(f"{server}: {told['failed']} requests failed")
                used = (_cpu_seconds(processes[server]) - before) / told["answers"]
                turns.setdefault(f"{server} {clients} cpu", []).append(used)
                turns.setdefault(f"{server} {clients}", []).append(1 / told["per_second"])
                for part in ("p50", "p99"):
                    turns.setdefault(f"{server} {clients} {part}", []).append(told[part])
    return measured | {name: median(seconds) for name, seconds in turns.items()}


def _cpu_seconds(process: int) -> float:
    """Return the seconds that all threads of a process have computed: what else the machine does changes them least."""
    fields = Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _raw(call: stagec.Function, model: str) -> tuple[float, float]:
    """Return the seconds of a call of one row, in a loop, and the CPU seconds."""
    x = np.zeros((1, *served_models.SHAPES[model]), np.float32)
    call(x)
    count, began, computed = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() < began + SECONDS:
        np.asarray(call(x))
        count += 1
    return (time.perf_counter() - began) / count, (time.process_time() - computed) / count


def request_of(model: str, server: str) -> bytes:
    """Return all bytes of a request with one row."""
    x = np.random.default_rng(0).standard_normal((1, *served_models.SHAPES[model])).astype(np.float32)
    if server != "stagec":
        head = f"POST /predict HTTP/1.1\r\nhost: here\r\ncontent-length: {x.nbytes}\r\n\r\n"
        return head.encode() + x.tobytes()
    name = "images" if model == "vit" else "x"
    size = {"binary_data_size": x.nbytes}
    inputs = [{"name": name, "shape": x.shape, "datatype": "FP32", "parameters": size}]
    told = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: here\r\ninference-header-content-length: {len(told)}\r\n"
    return f"{head}content-length: {len(told) + x.nbytes}\r\n\r\n".encode() + told + x.tobytes()


@contextmanager
def _serving(server: str, model: str, bundle: Path, folder: Path) -> Iterator[tuple[int, int]]:
    """Give the port of a server, and the number of its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    if server == "stagec":
        words = ["-m", "stagec", "serve", str(bundle), "--port", str(port), "--drain", "0"]
    else:
        words = ["-m", "benchmarks.rivals", server, model, str(port)]
    paths = [str(COMPILER), str(ROOT), *sys.path, str(folder / "packages")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        [sys.executable, *words], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(timeout=60)


def _first_answer(port: int, request: bytes) -> float:
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
