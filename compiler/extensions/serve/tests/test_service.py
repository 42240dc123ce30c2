"""Models that change while a server runs: another bundle in the file's place, and clients that load and unload."""

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from compiler.extensions.serve.tests.processes import (
    INFER,
    PROGRAM,
    REQUEST,
    Server,
    X,
    inputs,
    refused,
    serving,
    threads,
    until,
)
from stagec_serve.batching import Batcher
from stagec_serve.metrics import Metrics
from stagec_serve.model import Model
from stagec_serve.repository import Repository
from stagec_serve.sequences import Sequences
from stagec_serve.service import Service, maybe_in_thread
from tests.bundles import edited_index, only


def put(served: Path, place: Path, version: str) -> None:
    """Put a bundle of another version into a file's place, as a release does: by a rename."""
    edited_index(served, place.with_suffix(".new"), lambda index: index.update(version=version))
    place.with_suffix(".new").replace(place)


def version_of(server: Server) -> str:
    return str(server.ask("GET", "/v2/models/predict")[1]["versions"][0])


def deleted(server: Server) -> set[str]:
    """The inodes of deleted bundles that a server still maps. One bundle may have several mappings."""
    maps = Path(f"/proc/{server.pid}/maps").read_text("utf-8").splitlines()
    return {line.split()[4] for line in maps if re.search(r"models\.(?:aot|new) \(deleted\)$", line)}


def test_a_bundle_is_swapped_under_load(served: Path, tmp_path: Path) -> None:
    """Over both protocols, without an error; one that is damaged is not taken; the old ones are closed."""
    place = tmp_path / "models.aot"
    shutil.copy(served, place)
    outcomes: Counter[str] = Counter()
    ending = threading.Event()
    with serving(place, "--watch", "--grpc-port", "0") as server:

        def over_http() -> None:
            while not ending.is_set():
                status, answer = server.ask("POST", INFER, REQUEST)
                outcomes[f"{status} {answer.get('model_version', answer)}"] += 1

        def over_grpc() -> None:
            with triton.InferenceServerClient(server.grpc) as client:
                while not ending.is_set():
                    answer = client.infer("predict", inputs())
                    outcomes[f"200 {answer.get_response().model_version}"] += 1

        with threads(*[over_http, over_grpc] * 3):
            files = server.descriptors()
            for version in ("1.3.0", "1.4.0"):
                put(served, place, version)
                until(lambda version=version: version_of(server) == version)  # type: ignore[misc]
            (tmp_path / "damaged").write_bytes(served.read_bytes()[:-1000])
            (tmp_path / "damaged").replace(place)
            time.sleep(2.5)
            assert version_of(server) == "1.4.0"
            ending.set()
        assert {*outcomes} == {"200 1.2.0", "200 1.3.0", "200 1.4.0"}, outcomes
        assert sum(outcomes.values()) > 100
        until(lambda: server.descriptors() <= files + 1)
        until(lambda: len(deleted(server)) <= 1)  # the one that is served
        errors = server.end(signal.SIGINT)
        assert f"the models stay as they are: {place}: " in errors
        assert "Traceback" not in errors


def flipped(bundle: Path, out: Path, member: str) -> None:
    """Write a bundle in which one bit of a member is another one."""
    data = bytearray(bundle.read_bytes())
    with zipfile.ZipFile(bundle) as archive:
        content = archive.read(member)
    data[data.index(content) + len(content) // 2] ^= 1
    out.write_bytes(data)


def test_a_bundle_that_lacks_a_served_model_is_not_taken(served: Path, tmp_path: Path) -> None:
    """Of a model with a flipped bit, and of one that is left out: all stay as they are, and one error says why."""
    place = tmp_path / "models.aot"
    shutil.copy(served, place)
    with serving(place, "--watch", "--control") as server:
        flipped(served, tmp_path / "damaged", "scaled.cpu.batch4_length8.xla")
        (tmp_path / "damaged").replace(place)
        until(lambda: server.counted('stagec_loads_total{outcome="failed"}') == 1)
        without(served, tmp_path / "less", "predict")
        (tmp_path / "less").replace(place)
        until(lambda: server.counted('stagec_loads_total{outcome="failed"}') == 2)
        assert server.ask("POST", INFER, REQUEST)[0] == 200
        assert server.ask("GET", "/v2/models/scaled/ready")[0] == 200
        status, answer = server.ask("POST", "/v2/repository/models/scaled/load")
        assert (status, answer["error"]) == (
            503,
            "the new bundle cannot serve what the old one serves: predict: it has none",
        )
        assert server.ask("POST", "/v2/repository/models/predict/unload")[0] == 200  # now nobody needs it
        assert server.ask("POST", "/v2/repository/models/scaled/load")[0] == 200
        assert server.ask("POST", INFER, REQUEST)[0] == 404
        errors = [line for line in server.end(signal.SIGINT).splitlines() if " ERROR " in line]
    first, second = errors
    assert "the models stay as they are: the new bundle cannot serve what the old one serves: scaled: " in first
    assert second.endswith("serves: predict: it has none")


def without(bundle: Path, out: Path, function: str) -> None:
    edited_index(bundle, out, lambda index: index["functions"].pop(function))


def test_nothing_to_serve_does_not_start(served: Path, tmp_path: Path) -> None:
    """Also where all that there is fails to load."""
    place, damaged = tmp_path / "only.aot", tmp_path / "damaged.aot"
    only(served, place, "scaled")
    for length in (2, 8):
        for batch in (1, 4):
            flipped(place, damaged, f"scaled.cpu.batch{batch}_length{length}.xla")
            damaged.replace(place)
    assert "nothing can be served: scaled: " in refused(place)
    only(served, place, "turned")
    assert "nothing can be served: turned: z is c64[4], and the Open Inference Protocol has no" in refused(place)


def test_a_server_is_live_and_not_ready_while_it_loads(served: Path, tmp_path: Path) -> None:
    """It listens at once, says how far it is, and ends after a signal."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    def ask(path: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())
        except urllib.error.URLError:
            return 0, None

    # It begins to load when the file is there, so that no machine is too fast or too slow.
    begin = tmp_path / "begin"
    waiting = f"""
import pathlib, time
from stagec.loader import load
before = load.load
def late(*args, **options):
    while not pathlib.Path({str(begin)!r}).exists():
        time.sleep(0.01)
    return before(*args, **options)
load.load = late
"""
    words = [sys.executable, "-c", waiting + PROGRAM, "serve", str(served), "--port", str(port), "--drain", "0"]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for is_waited_for in (True, False):
        begin.unlink(missing_ok=True)
        with subprocess.Popen(words, env=path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                until(lambda: ask("/v2/health/live") == (200, {"live": True}))
                told = r"the server is not ready: (nothing is loaded|.* is read|\d+ of \d+ models are loaded)"
                status, answer = ask("/v2/models/predict")
                assert (status, bool(re.fullmatch(told, answer["error"]))) == (503, True), answer
                status, answer = ask("/v2/health/ready")
                assert (status, answer["ready"], "loading" in answer) == (503, False, True)
                if is_waited_for:
                    begin.touch()
                    until(lambda: ask("/v2/health/ready") == (200, {"ready": True}))
                    assert ask("/v2/models/predict")[0] == 200
                process.send_signal(signal.SIGTERM)
                output, errors = process.communicate(timeout=60)
            finally:
                process.kill()
            assert (process.returncode, "listening on http" in output) == (0, is_waited_for), errors
            assert "Traceback" not in errors


def test_clients_load_and_unload(served: Path, tmp_path: Path) -> None:
    place = tmp_path / "models.aot"
    shutil.copy(served, place)
    with (
        serving(place, "--control", "--grpc-port", "0") as server,
        triton.InferenceServerClient(server.grpc) as client,
    ):
        assert server.ask("POST", "/v2/repository/models/predict/unload") == (200, {})
        unloaded = {"error": "predict was unloaded by a client"}
        assert server.ask("POST", INFER, REQUEST) == (503, unloaded)
        assert not client.is_model_ready("predict")
        rows = {row["name"]: row for row in server.ask("POST", "/v2/repository/index")[1]}
        assert (rows["predict"]["state"], rows["predict"]["reason"]) == ("UNAVAILABLE", "was unloaded by a client")
        client.load_model("predict")
        assert server.ask("POST", INFER, REQUEST)[0] == 200
        put(served, place, "2.0.0")
        assert version_of(server) == "1.2.0"  # nobody has asked for it
        client.load_model("predict")
        assert version_of(server) == "2.0.0"
        client.unload_model("scaled")
        put(served, place, "3.0.0")
        assert server.ask("POST", "/v2/repository/models/predict/load") == (200, {})
        assert not client.is_model_ready("scaled")  # nobody has asked for it
        client.load_model("scaled")
        assert client.is_model_ready("scaled")  # of the new bundle
        status, answer = server.ask("POST", "/v2/repository/models/none/load")
        assert (status, answer["error"][:24]) == (404, "there is no model none; ")
        with pytest.raises(triton.InferenceServerException, match="there is no model none; "):
            client.unload_model("none")
        place.unlink()
        status, answer = server.ask("POST", "/v2/repository/models/predict/load")
        assert (status, answer) == (503, {"error": f"{place}: no such file"})
        assert server.ask("POST", INFER, REQUEST)[0] == 200


def test_after_kill_9_it_starts_again(served: Path) -> None:
    """On the same ports: nothing that a server leaves behind is in the way."""
    server = Server(served, "--grpc-port", "0")
    address, port = server.grpc, server.port
    answers: list[Any] = []

    def client() -> None:
        with triton.InferenceServerClient(address) as mine:
            try:
                for _ in range(10_000):
                    mine.infer("predict", inputs(np.repeat(X, 5, axis=0)))
            except triton.InferenceServerException as error:
                answers.append(error.status())

    with threads(client):
        time.sleep(0.3)
        server.end(signal.SIGKILL)
    assert (server.status, answers) == (-9, ["StatusCode.UNAVAILABLE"])
    with serving(served, "--port", str(port), "--grpc-port", address.rpartition(":")[2]) as server:
        assert (server.port, server.grpc) == (port, address)
        assert server.ask("POST", INFER, REQUEST)[0] == 200


def test_an_error_of_ours_counts_as_one(models: dict[str, Model]) -> None:
    """And not as a client that left."""
    metrics, options = Metrics(), argparse.Namespace(body=1, memory=1)
    service = Service(metrics, options, Repository, Sequences(1, 1, metrics))
    service.loading = ""
    with ThreadPoolExecutor(1) as threads:
        service.repository.batchers = {
            "predict": Batcher(models["predict"], None, 1, asyncio.Semaphore(), threads, metrics)
        }
    with pytest.raises(ZeroDivisionError), service.counted("predict", None):
        1 / 0  # noqa: B018
    assert 'stagec_requests_total{model="predict",status="500"} 1.0' in metrics.as_text().decode()


def test_work_that_outlives_its_request_is_counted() -> None:
    async def work() -> None:
        ending, given_back, held = threading.Event(), asyncio.Event(), contextlib.ExitStack()
        held.callback(given_back.set)
        request = asyncio.create_task(maybe_in_thread(2**20, held, ending.wait))
        await asyncio.sleep(0.05)
        request.cancel()
        with held, contextlib.suppress(asyncio.CancelledError):
            await request
        assert request.cancelled()
        assert not given_back.is_set()
        ending.set()
        async with asyncio.timeout(60):
            await given_back.wait()

    asyncio.run(work())
