"""A server under load for `STAGEC_SOAK_SECONDS` (20): nothing leaks, and nothing is lost when it is ended or killed.

Modules: `serving/server.py`, `serving/batching.py`.
"""

import http.client
import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

from tests.serving.test_server import INFER, REQUEST, Server, X

SECONDS = float(os.environ.get("STAGEC_SOAK_SECONDS", "20"))
CLIENTS = 8
BINARY = {"binary_data_size": X.nbytes}
HEADER = json.dumps(
    {
        "inputs": [{"name": "x", "shape": [3, 16], "datatype": "FP32", "parameters": BINARY}],
        "parameters": {"binary_data_output": True},
    }
).encode()


class Clients:
    """Threads that ask without a pause, JSON and bytes in turn.

    answered: how many have each status; "refused" where nobody listened, "lost" where a request that was sent had no
    answer. seen: the bytes of results.
    """

    def __init__(self, server: Server) -> None:
        self.answered: Counter[object] = Counter()
        self.seen: set[bytes] = set()
        self._server, self._ended = server, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, turn: int) -> None:
        connection = None
        while not self._ended.is_set():
            turn += 1
            if connection is None:
                connection = http.client.HTTPConnection(self._server.host, self._server.port, timeout=60)
                try:
                    connection.connect()
                except OSError:
                    self.answered["refused"] += 1
                    connection = None
                    time.sleep(0.05)
                    continue
            connection = self._answered(connection, is_binary=turn % 2 == 0)

    def _answered(self, connection: http.client.HTTPConnection, is_binary: bool) -> http.client.HTTPConnection | None:
        """Send one request; return the connection, if another request can be sent over it."""
        body = HEADER + X.tobytes() if is_binary else json.dumps(REQUEST).encode()
        headers = {"inference-header-content-length": str(len(HEADER))} if is_binary else {}
        try:
            connection.request("POST", INFER, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException):
            self.answered["lost"] += 1
            return None
        self.answered[answer.status] += 1
        if is_binary and answer.status == 200:
            self.seen.add(data[int(answer.headers["inference-header-content-length"]) :])
        if answer.headers.get("connection") == "close":  # the server ends: a load balancer asks another one
            self._ended.wait()
        return connection


def test_a_soak(served: Path) -> None:
    server = Server(served, "--drain", "1")
    clients = Clients(server)
    descriptors = Path(f"/proc/{server.process.pid}/fd")
    try:
        time.sleep(SECONDS / 4)  # allocators and caches have what they keep
        memory, opened, asked = server.memory(), len([*descriptors.iterdir()]), sum(clients.answered.values())
        time.sleep(SECONDS / 2)
        count = sum(clients.answered.values()) - asked
        grown = server.memory() - memory
        assert clients.answered.keys() == {200}
        assert count > SECONDS
        assert len([*descriptors.iterdir()]) <= opened + CLIENTS
        print(f"{grown >> 10} KiB more after {count} requests")
        assert grown < 2**21, f"{grown >> 10} KiB after {count} requests"
        server.end(signal.SIGTERM)
        assert server.process.returncode == 0
    finally:
        clients.end()
        server.end(signal.SIGKILL)
    assert clients.answered.keys() == {200}, clients.answered
    assert len(clients.seen) <= 3  # one for each bucket


def test_killed_and_started_again(served: Path) -> None:
    server = Server(served)
    clients = Clients(server)
    port = server.port
    try:
        time.sleep(1)
        server.end(signal.SIGKILL)
        again = Server(served, "--port", str(port))
        try:
            before = clients.answered[200]
            deadline = time.monotonic() + 30
            while clients.answered[200] < before + 10 * CLIENTS:
                assert time.monotonic() < deadline, clients.answered
                time.sleep(0.05)
        finally:
            clients.end()
            again.end(signal.SIGINT)
    finally:
        clients.end()
        server.end(signal.SIGKILL)
    assert clients.answered["lost"] <= 2 * CLIENTS  # those that ran, and those that the kernel had taken
    assert clients.answered.keys() <= {200, "refused", "lost"}
