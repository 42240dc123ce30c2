"""A server under load for `STAGEC_SOAK_SECONDS` (4): nothing leaks, and nothing is lost when it is ended or killed.

Modules: `stagec_serve/server.py`, `stagec_serve/batching.py`.
"""

import functools
import gzip
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from safetensors.numpy import save_file

from compiler.extensions.serve.tests.processes import CLIENTS, INFER, Clients, Server, serving, threads, until
from stagec_grpc import messages
from tests.bundles import edited_index

SECONDS = float(os.environ.get("STAGEC_SOAK_SECONDS", "4"))
SLOWER = float(os.environ.get("STAGEC_SOAK_SLOWER", "1"))
"""How many times as long clients pause, on a machine that has other work."""


def watch(server: Server, clients: Clients, seconds: float) -> None:
    """Wait, and print at the start of each minute what the server has."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        counts = f"{clients.answered.total()} answers, {server.descriptors()} descriptors"
        print(f"{time.strftime('%H:%M:%S')}: {server.memory() >> 10} KiB, {counts}", flush=True)
        time.sleep(min(60, left))


def test_a_soak(served: Path) -> None:
    """Both protocols, and sequences that begin and end."""
    server = Server(served, "--grpc-port", "0", "--idle", "10")
    ended, answered = threading.Event(), Counter[str]()

    def in_sequences(number: int) -> None:
        ones = np.ones(3, np.float32)
        tensor = triton.InferInput("x", [3], "FP32")
        tensor.set_data_from_numpy(ones)
        with triton.InferenceServerClient(server.grpc) as client:
            for sequence in itertools.count(number * 10**9 + 1):
                for step in range(3):
                    # Each other one is left to its time limit.
                    where = {"sequence_start": step == 0, "sequence_end": step == 2 and sequence % 2 == 0}
                    doubled = client.infer("add", [tensor], sequence_id=sequence, **where).as_numpy("doubled")
                    answered["right" if doubled.tolist() == [2 * step] * 3 else "wrong"] += 1
                if ended.wait(0.5):
                    return

    with threads(*(functools.partial(in_sequences, number) for number in range(2))), Clients(server) as clients:
        watch(server, clients, SECONDS / 2)  # allocators and caches have what they keep
        memory, opened, asked = server.memory(), server.descriptors(), clients.answered.total()
        watch(server, clients, SECONDS / 2)
        count = clients.answered.total() - asked
        grown = server.memory() - memory
        ended.set()
        assert clients.answered.keys() == {200}
        assert count > SECONDS
        assert server.descriptors() <= opened + CLIENTS
        print(f"{grown >> 10} KiB more after {count} requests; {server.descriptors()} descriptors, before {opened}")
        assert grown < 2**22, f"{grown >> 10} KiB after {count} requests"
        server.end(signal.SIGTERM)
        assert server.status == 0
    assert clients.answered.keys() == {200}, clients.answered
    assert len(clients.seen) <= 3  # one for each bucket
    assert answered.keys() == {"right"}


# What is in a cycle of references stays until Python collects garbage, for which it counts objects and not bytes.
WITHOUT_COLLECTOR = "import gc, sys; gc.disable(); from stagec.cli import main; sys.exit(main())"


@pytest.mark.parametrize("options", [(), ("--memory", "1"), ("--timeout", "0.02")])
def test_no_request_stays_in_memory(served: Path, options: tuple[str, ...]) -> None:
    """Neither one that is answered nor one that is refused, over both protocols: 1 MiB each, with no collector."""
    x = np.ones((2**14, 16), np.float32)  # 1 MiB
    bodies, asked = {}, Counter[object]()
    for name in ("x", "y"):  # y is not an input
        tensor = {"name": name, "datatype": "FP32", "shape": x.shape}
        message = messages.classes()["ModelInferRequest"](
            model_name="predict", inputs=[tensor], raw_input_contents=[x.tobytes()]
        )
        tensor = {**tensor, "shape": list(x.shape), "parameters": {"binary_data_size": x.nbytes}}
        header = json.dumps({"inputs": [tensor]}).encode()
        length = {"inference_header_content_length": str(len(header))}
        bodies[name] = message.SerializeToString(), header + x.tobytes(), length
    with (
        serving(served, "--grpc-port", "0", *options, program=WITHOUT_COLLECTOR) as server,
        grpc.insecure_channel(server.grpc) as channel,
    ):
        call = channel.unary_unary(f"/{messages.service().full_name}/ModelInfer")

        def ask(name: str, count: int) -> None:
            message, body, length = bodies[name]
            for number in range(count):
                future = call.future(message, timeout=60)
                if number % 4 == 3:  # a client that goes
                    time.sleep(0.02)
                    future.cancel()
                else:
                    asked["grpc", name, future.code().name] += 1
                status, _ = server.ask("POST", INFER, body, **length)
                asked["http", name, status] += 1

        for name in bodies:
            ask(name, 4)
            memory = server.memory()
            ask(name, 20)
            grown = server.memory() - memory
            assert grown < 2**24, f"{name}: {grown >> 20} MiB after 40 requests: {asked}"
        if options == ():
            assert {key[2] for key in asked} == {"OK", 200, "INVALID_ARGUMENT", 400}, asked
        else:
            assert not {key[2] for key in asked} & {"OK", 200}, asked


def test_killed_and_started_again(served: Path) -> None:
    server = Server(served)
    with Clients(server) as clients:
        until(lambda: clients.answered[200])
        server.end(signal.SIGKILL)
        again = Server(served, "--port", str(server.port))
        before = clients.answered[200]
        until(lambda: clients.answered[200] > before + 10 * CLIENTS)
    again.end(signal.SIGINT)
    assert clients.answered["lost"] <= 2 * CLIENTS  # those that ran, and those that the kernel had taken
    assert clients.answered.keys() <= {200, "refused", "lost", 503}  # 503: it loads


def test_a_mixed_load(served: Path, tmp_path: Path) -> None:
    """Small requests, 16 MB of JSON, refusals, and swaps of weights and bundles: `live` is soon there, memory stays."""
    place, ended, bomb = tmp_path / "models.aot", threading.Event(), gzip.compress(bytes(2**27))
    shutil.copy(served, place)
    for number in (2, 3):
        draw = np.random.default_rng(number).standard_normal
        shapes = {"w1": (16, 24), "b1": (24,), "w2": (24, 5)}
        save_file(
            {name: draw(shape).astype(np.float32) for name, shape in shapes.items()},
            tmp_path / f"v{number}.safetensors",
        )
    outcomes: Counter[tuple[str, int]] = Counter()
    seconds: dict[str, list[float]] = {"main port": [], "probe port": []}
    options = ("--grpc-port", "0", "--probe-port", "0", "--watch", "--control", "--memory", "256", "--timeout", "600")
    with serving(place, *options) as server:
        probes = int(re.findall(r"probes on http://.*:(\d+)", server.told)[0])

        def repeatedly(pause: float, step: Callable[[int], None]) -> Callable[[], None]:
            def run() -> None:
                for turn in itertools.count():
                    step(turn)
                    if ended.wait(pause * SLOWER):
                        return

            return run

        def live(_: int) -> None:
            for which, port in (("main port", server.port), ("probe port", probes)):
                began = time.monotonic()
                connection = http.client.HTTPConnection(server.host, port, timeout=60)
                connection.request("GET", "/v2/health/live")
                outcomes[f"live at the {which}", connection.getresponse().status] += 1
                connection.close()
                seconds[which].append(time.monotonic() - began)

        def large(_: int) -> None:
            x = np.random.default_rng(1).standard_normal((45_000, 16)).astype(np.float32)
            body = {"inputs": [{"name": "x", "shape": x.shape, "datatype": "FP32", "data": x.ravel().tolist()}]}
            outcomes["large JSON", server.ask("POST", INFER, body)[0]] += 1

        def wrong(turn: int) -> None:
            x = {"name": "x", "shape": [], "datatype": "FP32", "data": [1]}
            bodies = [b"[]," * 2**20, bomb, {"inputs": [{**x, "shape": [3, 16]}]}, b"\x00" * 1000]
            coding = {"content_encoding": "gzip"} if turn % 4 == 1 else {}
            outcomes[f"wrong {turn % 4}", server.ask("POST", INFER, bodies[turn % 4], **coding)[0]] += 1
            filled = server.ask("POST", "/v2/models/filled/infer", {"inputs": [x]})
            outcomes["JSON of 8,000,000 numbers", filled[0]] += 1

        def swap(turn: int) -> None:
            body = {"parameters": {"weights": f"v{2 + turn % 2}.safetensors"}}
            outcomes["weights", server.ask("POST", "/v2/repository/models/predict/load", body)[0]] += 1
            if turn % 4 == 3:
                edited_index(served, tmp_path / "new", lambda index: index.update(version=f"1.3.{turn}"))
                (tmp_path / "new").replace(place)

        steps = [(0.05, live), (0.5, large), (0.2, wrong), (1, swap)]
        with threads(*(repeatedly(*each) for each in steps)), Clients(server, (SLOWER - 1) / 20) as clients:
            watch(server, clients, SECONDS / 2)
            memory, opened, asked = server.memory(), server.descriptors(), clients.answered.total()
            watch(server, clients, SECONDS / 2)
            grown, count = server.memory() - memory, clients.answered.total() - asked
            for which, took in seconds.items():
                ordered = sorted(took)
                marks = ((part, ordered[int(part * (len(took) - 1))] * 1000) for part in (0.5, 0.99, 1))
                print(f"live at the {which}: {len(took)}", *(f"{part:.0%} {ms:.1f} ms" for part, ms in marks))
            print(f"{outcomes}; {clients.answered}; {server.descriptors()} descriptors, before {opened}")
            print(f"{grown >> 10} KiB more after {count} requests", flush=True)
            ended.set()
        assert clients.answered.keys() == {200}
        expected = {"large JSON": 200, "wrong 0": 413, "wrong 1": 413, "wrong 2": 400, "wrong 3": 400, "weights": 200}
        expected |= {"JSON of 8,000,000 numbers": 406, "live at the main port": 200, "live at the probe port": 200}
        assert {*outcomes} <= {*expected.items()}, outcomes
        assert server.descriptors() <= opened + 2 * CLIENTS
        # In its first minutes the server takes what `--memory` allows, and keeps it; and some of few probes are late.
        most, percent = (2**26, 99) if SECONDS >= 300 * SLOWER else (2**28, 50)
        assert grown < most, f"{grown >> 10} KiB after {count} requests"
        assert sorted(seconds["probe port"])[len(seconds["probe port"]) * percent // 100] < 1
