"""A server under load for `STAGEC_SOAK_SECONDS` (4): nothing leaks, and nothing is lost when it is ended or killed.

Modules: `stagec_serve/server.py`, `stagec_serve/batching.py`.
"""

import functools
import itertools
import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from compiler.extensions.serve.tests.processes import CLIENTS, INFER, Clients, Server, serving, threads, until
from stagec_serve import messages

SECONDS = float(os.environ.get("STAGEC_SOAK_SECONDS", "4"))


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
            ask(name, 8)
            memory = server.memory()
            ask(name, 40)
            grown = server.memory() - memory
            assert grown < 2**24, f"{name}: {grown >> 20} MiB after 80 requests: {asked}"
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
