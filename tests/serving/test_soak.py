"""A server under load for `STAGEC_SOAK_SECONDS` (4): nothing leaks, and nothing is lost when it is ended or killed.

Modules: `serving/server.py`, `serving/batching.py`.
"""

import functools
import itertools
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton

from tests.serving.processes import CLIENTS, Clients, Server, threads, until

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
    assert clients.answered.keys() <= {200, "refused", "lost"}
