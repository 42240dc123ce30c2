"""A server under load for `STAGEC_SOAK_SECONDS` (4): nothing leaks, and nothing is lost when it is ended or killed.

Modules: `serving/server.py`, `serving/batching.py`.
"""

import os
import signal
import time
from pathlib import Path

from tests.serving.processes import CLIENTS, Clients, Server, until

SECONDS = float(os.environ.get("STAGEC_SOAK_SECONDS", "4"))


def test_a_soak(served: Path) -> None:
    server = Server(served)
    with Clients(server) as clients:
        time.sleep(SECONDS / 2)  # allocators and caches have what they keep
        memory, opened, asked = server.memory(), server.descriptors(), clients.answered.total()
        time.sleep(SECONDS / 2)
        count = clients.answered.total() - asked
        grown = server.memory() - memory
        assert clients.answered.keys() == {200}
        assert count > SECONDS
        assert server.descriptors() <= opened + CLIENTS
        assert grown < 2**21, f"{grown >> 10} KiB after {count} requests"
        server.end(signal.SIGTERM)
        assert server.status == 0
    assert clients.answered.keys() == {200}, clients.answered
    assert len(clients.seen) <= 3  # one for each bucket


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
