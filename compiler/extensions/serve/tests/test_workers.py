"""Servers of several processes: they take changes together, one that dies is started again, and numbers are of all.

Modules: `stagec_serve/workers.py`, `stagec_serve/metrics.py`, `stagec_serve/server.py`.
"""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from safetensors.numpy import load_file, save_file

from compiler.extensions.serve.tests.processes import INFER, REQUEST, Clients, Server, inputs, refused, serving, until
from stagec_serve import server as module
from stagec_serve.metrics import Metrics, summed
from tests.building import build
from tests.bundles import edited_index, only

MANY = ("--workers", "2", "--probe-port", "0")


@pytest.fixture(scope="module")
def predict(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle with one function alone, which loads soon."""
    place = tmp_path_factory.mktemp("predict") / "models.aot"
    only(served, place, "predict")
    return place


def workers(server: Server) -> list[int]:
    return [*map(int, Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text("utf-8").split())]


def probes(server: Server) -> Any:
    """What asks the port for probes."""
    port = int(re.findall(r"probes on http://.*:(\d+)", server.told)[0])

    def ask(path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(server.host, port, timeout=60)
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    return ask


def digests(server: Server, count: int = 40) -> Counter[str]:
    """The digests of answers over connections of their own: the kernel spreads them over the workers."""
    seen: Counter[str] = Counter()
    for _ in range(count):
        connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
        connection.request("POST", INFER, json.dumps(REQUEST))
        answer = connection.getresponse()
        answer.read()
        connection.close()
        seen[str(answer.getheader("stagec-digest") or answer.status)] += 1
    return seen


def test_numbers_are_of_all_workers(served: Path) -> None:
    """And what keeps a state in one process is not offered."""
    with serving(served, *MANY, "--grpc-port", "0") as server:
        assert "add: left out: it keeps total for a sequence, in one process: start the server without --workers" in (
            server.told
        )
        assert re.findall("^predict 1.2.0: gathered", server.told, re.MULTILINE) == ["predict 1.2.0: gathered"]
        for _ in range(10):  # a channel is one connection, so several are asked
            with triton.InferenceServerClient(server.grpc) as client:
                client.infer("predict", inputs())
        digests(server, 30)
        counted = 'stagec_requests_total{model="predict",status="200"} 40.0'
        assert counted in probes(server)("/metrics")[1]
        text = server.ask("GET", "/metrics")[1]
        assert counted in text
        assert len(re.findall(r'^stagec_model{.*model="predict".*} 1.0$', text, re.MULTILINE)) == 1
        assert server.counted('stagec_loads_total{outcome="loaded"}') == 1
        assert "stagec_call_rows_sum" in text
        (row,) = server.ask("GET", "/v2/models/predict/stats")[1]["model_stats"]
        assert row["inference_stats"]["success"]["count"] == 40
        assert row["inference_count"] == 120
        assert [batch["batch_size"] for batch in row["batch_stats"]] == [3]
        with triton.InferenceServerClient(server.grpc) as client:
            assert client.get_inference_statistics("predict").model_stats[0].inference_count == 120
        busy = [pid for pid in workers(server) if cpu(pid) > 0]
        assert len(busy) == 2
    assert server.errors.count("Traceback") == 0, server.errors


def cpu(pid: int) -> float:
    return float(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[11])


def test_answers_do_not_wait_for_others() -> None:
    """asyncio sets TCP_NODELAY on connections of sockets that say that they are TCP; without it, each waited 40 ms."""
    for listener in module.listeners(2, "127.0.0.1", 0):
        with listener:
            assert listener.proto == socket.IPPROTO_TCP


def test_metrics_are_summed() -> None:
    first, second = Metrics(), Metrics()
    for metrics, count in ((first, 2), (second, 3)):
        for _ in range(count):
            metrics.ran("m", "batch = 8", 5, 0.25)
        metrics.waiting.labels("m").set(count)
        metrics.loads.labels("loaded").inc()
        metrics.offered([("m", "1", "d", "cpu", "executable")])
    text = summed([first.as_text().decode()], [second.as_text().decode()])
    for line in (
        'stagec_calls_total{bucket="batch = 8",model="m"} 5.0',
        'stagec_call_rows_sum{model="m"} 25.0',
        'stagec_call_seconds_bucket{le="0.5",model="m"} 5.0',
        'stagec_waiting_requests{model="m"} 2.0',  # who is gone has none that wait
        'stagec_loads_total{outcome="loaded"} 1.0',
        'stagec_model{digest="d",kind="executable",model="m",target="cpu",version="1"} 1.0',
    ):
        assert f"{line}\n" in text, line
    both = summed([first.as_text().decode(), second.as_text().decode()], [])
    assert 'stagec_waiting_requests{model="m"} 5.0\n' in both
    assert summed([both], []).splitlines() == both.splitlines()


def test_all_take_a_bundle_or_none(served: Path, predict: Path, tmp_path: Path) -> None:
    """Under load, also weights, by whoever gets the request, and what clients unload."""
    place = tmp_path / "models.aot"
    shutil.copy(predict, place)
    arrays = load_file(served.parent.parent / "source" / "weights.safetensors")
    save_file({name: 2 * array for name, array in arrays.items()}, tmp_path / "b.safetensors")
    with serving(place, *MANY, "--watch", "--control") as server:

        def change(what: str, **parameters: str) -> tuple[int, Any]:
            body = {"parameters": parameters} if parameters else None
            return server.ask("POST", f"/v2/repository/models/predict/{what}", body)

        first = digests(server)
        assert len(first) == 1
        with Clients(server) as clients:
            edited_index(predict, tmp_path / "new", lambda index: index.update(version="1.3.0"))
            (tmp_path / "new").replace(place)
            until(lambda: server.ask("GET", "/v2/models/predict")[1]["versions"] == ["1.3.0"])
            second = digests(server)
            assert len(second) == 1
            assert second != first
            (tmp_path / "damaged").write_bytes(predict.read_bytes()[:-1000])
            (tmp_path / "damaged").replace(place)
            until(lambda: server.counted('stagec_loads_total{outcome="failed"}') == 1)
            assert digests(server) == second
            status, answer = change("load")
            assert (status, str(place) in answer["error"]) == (503, True)
            assert change("load", weights="b.safetensors") == (200, {})
            assert len(third := digests(server)) == 1
            assert third != second
            assert change("load", weights="none.safetensors")[0] == 503
            assert change("load", other="b.safetensors")[0] == 400
            assert digests(server) == third
        assert clients.answered.keys() == {200}
        assert change("unload") == (200, {})
        assert digests(server) == {"503": 40}
        assert change("load") == (200, {})
        assert digests(server) == third
        errors = server.end(signal.SIGINT)
    assert errors.count(f"the models stay as they are: {place}: ") == 1
    assert "Traceback" not in errors


def test_a_worker_that_dies_is_started_again(served: Path, predict: Path, tmp_path: Path) -> None:
    """With what the others have; until then the server is not ready, and requests of the others are answered."""
    place = tmp_path / "models.aot"
    shutil.copy(predict, place)
    arrays = load_file(served.parent.parent / "source" / "weights.safetensors")
    save_file({name: 2 * array for name, array in arrays.items()}, tmp_path / "b.safetensors")
    with serving(place, *MANY, "--control") as server:
        body = {"parameters": {"weights": "b.safetensors"}}
        assert server.ask("POST", "/v2/repository/models/predict/load", body)[0] == 200
        before, ask = digests(server), probes(server)
        counted = server.counted("stagec_requests_total{")
        dead, other = workers(server)
        os.kill(dead, signal.SIGSTOP)  # so that nothing is in its hands
        os.kill(dead, signal.SIGKILL)
        until(lambda: ask("/v2/health/ready") == (503, '{"ready":false,"loading":"1 of 2 workers are ready"}'))
        assert ask("/v2/health/live")[0] == 200
        until(lambda: ask("/v2/health/ready")[0] == 200)
        assert other in workers(server)
        assert dead not in workers(server)
        assert digests(server) == before
        assert server.counted("stagec_requests_total{") == counted + 40
        # One that starts when the file is another one by now: all take that.
        edited_index(predict, tmp_path / "new", lambda index: index.update(version="1.3.0"))
        (tmp_path / "new").replace(place)
        os.kill(other, signal.SIGKILL)
        until(lambda: other not in workers(server) and ask("/v2/health/ready")[0] == 200)
        after = digests(server)
        assert len(after) == 1
        assert after != before
        assert {server.ask("GET", "/v2/models/predict")[1]["versions"][0] for _ in range(20)} == {"1.3.0"}
        errors = server.end(signal.SIGINT)
    assert f"worker 0 (process {dead}) ended with status -9; another one starts" in errors
    assert "Traceback" not in errors


def test_a_worker_that_cannot_start_again_stops_nobody(predict: Path, tmp_path: Path) -> None:
    """The others go on with the tokens that they read, and it starts when its file is right again."""
    file = tmp_path / "tokens"
    file.write_text("0123456789abcdef\n")
    with serving(predict, *MANY, "--token-file", str(file)) as server:
        dead = workers(server)[0]
        file.write_text("")
        os.kill(dead, signal.SIGKILL)
        until(lambda: probes(server)("/v2/health/ready")[0] == 503)
        time.sleep(1)
        file.write_text("0123456789abcdef\n")
        until(lambda: probes(server)("/v2/health/ready")[0] == 200)
        errors = server.end(signal.SIGINT)
    assert "a worker cannot start: " in errors
    assert "Traceback" not in errors


def test_nothing_is_lost_when_all_end(predict: Path) -> None:
    server = Server(predict, *MANY)
    with Clients(server) as clients:
        until(lambda: clients.answered[200] > 100)
        server.send(signal.SIGTERM)
        until(lambda: probes(server)("/v2/health/ready")[0] == 503)
        server.end()
    assert server.status == 0
    assert clients.answered.keys() == {200}, clients.answered


def test_workers_end_with_the_first_process(predict: Path) -> None:
    server = Server(predict, *MANY)
    started = workers(server)
    server.send(signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() and state(pid) != "Z" for pid in started))
    with contextlib.suppress(AssertionError):
        server.end(signal.SIGKILL)


def state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    return "Z"


def test_what_cannot_start_is_said_once(served: Path, predict: Path, tmp_path: Path) -> None:
    only(served, tmp_path / "only.aot", "turned")
    said = refused(tmp_path / "only.aot", *MANY)
    assert said.count("nothing can be served: turned: z is c64[4], and the Open Inference Protocol has no") == 1
    with serving(predict, *MANY) as server:
        taken = f"{server.host}:{server.port}: cannot listen there: Address already in use"
        assert taken in refused(predict, *MANY, "--port", str(server.port))
        assert taken in refused(predict, *MANY, "--grpc-port", str(server.port))


def test_weights_are_in_memory_once(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    (source / "large.py").write_text('def large(w, x):\n    return x @ w["w"]\n')
    save_file({"w": np.ones((2048, 2048), np.float32)}, source / "w.safetensors")
    (source / "large.toml").write_text(
        '[manifest]\nname = "large"\nversion = "1"\n[targets.cpu]\nplatform = "cpu"\nisa = "AVX2"\n'
        '[functions.large]\nentry = "large:large"\nargs = ["safetensors:w.safetensors", "f32[2048]"]\n'
        'bind = { w = "w.safetensors" }\ntargets = ["cpu"]\n'
    )
    place = build("large.toml", out, source)
    with serving(place, *MANY) as server:
        tensor = {"name": "x", "shape": [2048], "datatype": "FP32", "data": [1] * 2048}
        for _ in range(20):
            assert server.ask("POST", "/v2/models/large/infer", {"inputs": [tensor]})[0] == 200
        time.sleep(0.1)
        for pid in workers(server):
            maps = Path(f"/proc/{pid}/smaps").read_text("utf-8")
            mapped = re.findall(rf"{re.escape(str(place.parent))}\S*\nSize:.*?(?=VmFlags)", maps, re.DOTALL)
            shared = re.findall(r"Shared_(?:Clean|Dirty):\s+(\d+) kB", "".join(mapped))
            assert sum(map(int, shared)) >= 2**24 >> 10, mapped
