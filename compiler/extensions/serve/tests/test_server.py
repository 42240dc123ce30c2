"""A server process, with clients as people have them: what it answers, refuses and survives, and how it ends.

Modules: `stagec_serve/commands/serve.py`, `stagec_serve/metrics.py`, `stagec_serve/refusal.py`,
`stagec_serve/rest.py`, `stagec_serve/server.py`, `stagec_serve/service.py`.
"""

import contextlib
import functools
import gzip
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

import stagec
from compiler.extensions.serve.tests.processes import (
    INFER,
    INPUT,
    PROGRAM,
    REQUEST,
    Server,
    X,
    refused,
    serving,
    threads,
    until,
)
from stagec.core.builds.version import VERSION
from stagec_serve import server as module
from tests.building import checked
from tests.bundles import only
from tests.signed import write_keys, write_provenance


@pytest.fixture(scope="module")
def server(served: Path) -> Iterator[Server]:
    with serving(served) as started:
        yield started


def inputs(x: Any = X, binary: bool = True) -> list[Any]:
    tensor = triton.InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x, binary_data=binary)
    return [tensor]


def expected(bundle: stagec.Bundle, x: Any, size: int) -> Any:
    """What rows give alone in a bucket."""
    padded = np.zeros((size, 16), np.float32)
    padded[: len(x)] = x
    return bundle["predict"](padded)["logits"][: len(x)]


@pytest.mark.parametrize("binary_in", [False, True])
@pytest.mark.parametrize("binary_out", [False, True])
def test_tritonclient(server: Server, bundle: stagec.Bundle, binary_in: bool, binary_out: bool) -> None:
    with triton.InferenceServerClient(server.address) as client:
        wanted = [triton.InferRequestedOutput("result['logits']", binary_data=binary_out)]
        answer = client.infer("predict", inputs(binary=binary_in), outputs=wanted, request_id="a 7")
        np.testing.assert_array_equal(answer.as_numpy("result['logits']"), expected(bundle, X, 8), strict=True)
        assert answer.as_numpy("result['label']") is None
        assert answer.get_response()["id"] == "a 7"
        answer = client.infer("predict", inputs(binary=binary_in))
        np.testing.assert_array_equal(answer.as_numpy("result['label']"), bundle["predict"](X)["label"], strict=True)


def test_tritonclient_knows_all_about_the_server(server: Server) -> None:
    with triton.InferenceServerClient(server.address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("predict")
        assert client.is_model_ready("predict", "1.2.0")
        assert not client.is_model_ready("turned")
        assert not client.is_model_ready("predict", "2")
        assert client.get_server_metadata()["version"] == VERSION
        assert client.get_model_metadata("predict", "1.2.0") == {
            "name": "predict",
            "versions": ["1.2.0"],
            "platform": "stagec_aot",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}],
            "outputs": [
                {"name": "result['label']", "datatype": "INT32", "shape": [-1]},
                {"name": "result['logits']", "datatype": "FP32", "shape": [-1, 5]},
            ],
        }
        states = {row["name"]: (row["state"], row["reason"]) for row in client.get_model_repository_index()}
        assert states["raised-cube"] == ("READY", "")
        why = "z is c64[4], and the Open Inference Protocol has no such datatype"
        assert states["turned"] == ("UNAVAILABLE", why)
        with pytest.raises(triton.InferenceServerException, match="this server does not load models") as error:
            client.load_model("predict")
        assert error.value.status() == "501"


def test_every_datatype_goes_both_ways(server: Server, bundle: stagec.Bundle) -> None:
    from ml_dtypes import bfloat16

    given = {
        "half": np.array([1, 2, 3], np.float16),
        "brain": np.array([1, 2, 3], bfloat16),
        "byte": np.array([1, 255], np.uint8),
        "flag": np.array([True, False]),
    }
    datatypes = ("FP16", "BF16", "UINT8", "BOOL")
    results = bundle["narrow"](*given.values())
    tensors = [
        {"name": name, "shape": list(array.shape), "datatype": datatype, "data": array.tolist()}
        for (name, array), datatype in zip(given.items(), datatypes, strict=True)
    ]
    status, answer = server.ask("POST", "/v2/models/narrow/infer", {"inputs": tensors})
    assert status == 200, answer
    for told, datatype, array in zip(answer["outputs"], datatypes, results, strict=True):
        assert (told["datatype"], told["data"]) == (datatype, array.tolist())


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl(server: Server, bundle: stagec.Bundle) -> None:
    command = ["curl", "-sS", "--fail", f"http://{server.address}{INFER}", "-d", json.dumps(REQUEST)]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert answer["model_name"] == "predict"
    np.testing.assert_array_equal(
        np.float32(answer["outputs"][1]["data"]).reshape(3, 5), expected(bundle, X, 8), strict=True
    )


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/v2/health/live", 200, '{"live": true}'),
        ("GET", "/v2/health/ready", 200, '{"ready": true}'),
        ("HEAD", "/v2/health/ready", 200, ""),
        ("GET", "/v2/models/predict/ready", 200, '{"name": "predict", "ready": true}'),
        ("POST", "/v2/health/live", 405, '{"error": "the method is POST; expected GET or HEAD"}'),
        ("GET", INFER, 405, '{"error": "the method is GET; expected POST"}'),
        ("GET", "/v2/models/predict/versions/2", 404, '{"error": "predict has version 1.2.0 and no other"}'),
        ("GET", "/", 404, '{"error": "there is nothing at "}'),
        ("GET", "/v2/models/../secrets", 404, '{"error": "there is nothing at /v2/models/../secrets"}'),
        ("POST", "/v2/models/turned/infer", 503, '{"error": "z is c64[4], and the Open Inference Protocol has no '),
        ("POST", "/v2/models/none/infer", 404, '{"error": "there is no model none; the models are '),
        ("POST", "/v2/repository/models/predict/unload", 501, '{"error": "predict: this server does not unload '),
    ],
)
def test_every_path(server: Server, method: str, path: str, status: int, text: str) -> None:
    given, answer = server.ask(method, path, b"" if method == "POST" else None)
    assert given == status
    shown = answer if isinstance(answer, str) else json.dumps(answer)
    assert shown.startswith(text), shown


def test_a_body_in_chunks(server: Server) -> None:
    data = json.dumps(REQUEST).encode()
    assert server.ask("POST", INFER, iter([data[:100], data[100:]]))[0] == 200


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_a_compressed_body(server: Server, bundle: stagec.Bundle, algorithm: str) -> None:
    with triton.InferenceServerClient(server.address) as client:
        answer = client.infer("predict", inputs(), request_compression_algorithm=algorithm)
        np.testing.assert_array_equal(answer.as_numpy("result['logits']"), expected(bundle, X, 8), strict=True)
    body = gzip.compress(json.dumps(REQUEST).encode())
    for given, encoded, status, text in (
        (body, "br", 415, "the encoding of a body is gzip, deflate or identity"),
        (body[:-9], "gzip", 400, "the body ends before its compressed data"),
        (body + b"x", "gzip", 400, "bytes follow the body's compressed data"),
        (b"\x1f\x8b" + body, "gzip", 400, "the body is not what its encoding says: "),
    ):
        told, answer = server.ask("POST", INFER, given, content_encoding=encoded)
        assert (told, answer["error"][: len(text)]) == (status, text)


def test_what_a_compressed_body_becomes_is_limited(served: Path) -> None:
    bomb = gzip.compress(bytes(2**28))  # 256 KiB
    for options, status in ((("--body", "16"), 413), (("--memory", "16"), 429)):
        with serving(served, *options) as server:
            memory = server.memory()
            for _ in range(3):
                assert server.ask("POST", INFER, bomb, content_encoding="gzip")[0] == status
            assert server.memory() - memory < 2**26
            assert server.ask("POST", INFER, REQUEST)[0] == 200


def test_parameters_of_requests(served: Path, server: Server) -> None:
    def ask(of: Server, **parameters: object) -> tuple[int, Any]:
        return of.ask("POST", INFER, {**REQUEST, "parameters": parameters})

    assert ask(server, priority=1, timeout=10**7, other="x")[0] == 200
    assert ask(server, timeout=1) == (504, {"error": "predict took over 1e-06 seconds"})
    assert ask(server, priority="x") == (400, {"error": "priority is 'x'; expected a whole number"})
    with serving(served, "--strict") as strict:
        assert ask(strict, priority=1)[0] == 200
        assert ask(strict, other="x") == (501, {"error": "the request: no parameter 'other' is supported"})


def test_clients_share_calls_and_nobody_sees_it(server: Server, bundle: stagec.Bundle) -> None:
    before = server.counted(r"stagec_calls_total{.*predict"), server.counted("stagec_requests_total{.*predict")

    def client(number: int) -> None:
        generator = np.random.default_rng(number)
        with triton.InferenceServerClient(server.address) as mine:
            for turn in range(10):
                count = 70 if turn == 5 else generator.integers(1, 5)
                x = generator.standard_normal((count, 16)).astype(np.float32)
                logits = mine.infer("predict", inputs(x)).as_numpy("result['logits']")
                # Which bucket a request runs in depends on the others; the bits depend on the bucket alone.
                for start in range(0, len(x), 32):
                    part, given = x[start : start + 32], logits[start : start + 32].tobytes()
                    sizes = [size for size in (1, 8, 32) if size >= len(part)]
                    assert given in [expected(bundle, part, size).tobytes() for size in sizes]

    with threads(*(functools.partial(client, number) for number in range(16))):
        pass
    after = server.counted(r"stagec_calls_total{.*predict"), server.counted("stagec_requests_total{.*predict")
    assert after[1] - before[1] == 160
    assert after[0] - before[0] < 160
    assert server.counted("stagec_waiting_requests{.*predict") == 0


def test_nothing_is_lost_when_the_server_ends(served: Path, bundle: stagec.Bundle) -> None:
    """Every request that was sent is answered, until the server says that it closes the connection."""
    server = Server(served)
    outcomes: Counter[str] = Counter()
    want = expected(bundle, X, 8).tobytes(), expected(bundle, X, 32).tobytes()
    body = json.dumps({**REQUEST, "outputs": [{"name": "result['logits']"}]}).encode()

    def client() -> None:
        connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
        while True:
            try:
                connection.request("POST", INFER, body)
                answer = connection.getresponse()
                data = json.loads(answer.read())
            except OSError as error:
                outcomes[f"lost: {error!r}"] += 1
                return
            right = np.float32(data["outputs"][0]["data"]).tobytes() in want
            outcomes["answered" if answer.status == 200 and right else f"{answer.status}: {data}"] += 1
            if answer.getheader("connection") == "close":
                return

    with threads(*[client] * 16):
        until(lambda: outcomes["answered"] > 32)
        server.send(signal.SIGTERM)
        until(lambda: server.ask("GET", "/v2/health/ready") == (503, {"ready": False}))
        assert server.ask("GET", "/v2/health/live") == (200, {"live": True})
    server.end()
    assert server.status == 0
    assert outcomes.keys() == {"answered"}, outcomes
    with pytest.raises(ConnectionRefusedError):
        server.connect()


def test_connections_that_wait_are_accepted_before_the_end(served: Path) -> None:
    """Each gets an answer or is refused; none is reset."""
    outcomes: Counter[str] = Counter()
    server = Server(served, "--drain", "0")

    def client() -> None:
        while True:
            try:
                connection = server.connect()
            except ConnectionRefusedError:
                return
            with connection:
                connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                try:
                    outcomes[b"".join(iter(lambda: connection.recv(2**12), b"")).decode()[:12]] += 1  # noqa: B023
                except OSError as error:
                    outcomes[repr(error)] += 1

    with threads(*[client] * 8):
        time.sleep(0.5)
        server.end()
    assert outcomes.keys() == {"HTTP/1.1 200"}, outcomes
    assert server.status == 0


def test_a_request_under_way_is_answered_after_the_drain(served: Path) -> None:
    server = Server(served, "--drain", "0", "--delay", "1500")
    answers: list[Any] = []
    with threads(lambda: answers.append(server.ask("POST", INFER, REQUEST))):
        server.waiting(1)
        server.end()
    assert server.status == 0
    assert answers[0][0] == 200


def test_slow_clients_are_cut_off(served: Path) -> None:
    with serving(served, "--timeout", "1") as server:
        silent, half_headers, half_body = server.connect(), server.connect(), server.connect()
        half_headers.sendall(b"POST /v2 HTTP/1.1\r\nHost: a\r\n")
        half_body.sendall(f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{{".encode())
        began = time.monotonic()
        assert silent.recv(1000) == half_headers.recv(1000) == b""
        answer = b"".join(iter(lambda: half_body.recv(1000), b""))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert answer.endswith(b'{"error":"the body took over 1 seconds"}')
        assert time.monotonic() - began < 20
        half_headers = server.connect()  # the second request of a connection
        half_headers.sendall(b"GET /v2 HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += half_headers.recv(1000)
        assert answer.startswith(b"HTTP/1.1 200 ")
        half_headers.sendall(b"GET /v2 HTTP/1.1\r\nHost")
        assert half_headers.recv(1000) == b""
        status, answer_ = server.ask("POST", INFER, REQUEST)
        assert status == 200, answer_


def test_a_client_that_does_not_read_its_answer(served: Path) -> None:
    asked = json.dumps(
        {
            "inputs": [{"name": "x", "shape": [], "datatype": "FP32", "data": [7]}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    request = (
        f"POST /v2/models/filled/infer HTTP/1.1\r\nHost: a\r\nContent-Length: {len(asked)}\r\n\r\n".encode() + asked
    )
    with serving(served, "--timeout", "2") as server, socket.socket() as connection:
        before = server.descriptors()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((server.host, server.port))
        connection.settimeout(60)
        connection.sendall(request)
        until(lambda: server.descriptors() > before)
        until(lambda: server.descriptors() == before)
        data = b""
        with contextlib.suppress(ConnectionResetError):
            data = b"".join(iter(lambda: connection.recv(2**16), b""))
        assert data.startswith(b"HTTP/1.1 200 ")
        assert len(data) < 24 * 10**6  # the part that the kernel had
        with server.connect() as reading:  # read, it is a whole answer
            reading.sendall(request)
            data = b""
            while len(data) < 32 * 10**6:
                part = reading.recv(2**20)
                assert part
                data += part


def test_an_answer_that_takes_too_long(served: Path) -> None:
    with serving(served, "--timeout", "0.5", "--delay", "60000") as server:
        status, answer = server.ask("POST", INFER, REQUEST)
        assert (status, answer) == (504, {"error": "predict took over 0.5 seconds"})
        assert server.counted("stagec_waiting_requests{.*predict") == 0  # it does not wait any longer


def test_a_client_that_is_gone_leaves_the_queue(served: Path) -> None:
    with serving(served, "--delay", "60000") as server:
        connection = http.client.HTTPConnection(server.host, server.port)
        connection.request("POST", INFER, json.dumps(REQUEST))
        server.waiting(1)
        connection.close()
        server.waiting(0)
        assert server.counted('stagec_requests_total{.*"predict",status="499"') == 1


def test_limits_of_bodies(served: Path) -> None:
    with serving(served, "--body", "1", "--memory", "1") as server:
        status, answer = server.ask("POST", INFER, bytes(2**20 + 1))
        assert (status, answer) == (413, {"error": "a body of 1048577 bytes is over the limit of 1,048,576"})
        status, answer = server.ask("POST", INFER, iter([bytes(2**19)] * 3))  # in chunks, without a length
        assert (status, answer) == (413, {"error": "the body is over the limit of 1,048,576 bytes"})
        holding = server.connect()
        holding.sendall(
            f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n".encode() + bytes(900_000)
        )
        time.sleep(0.5)
        status, answer = server.ask("POST", INFER, bytes(2**18))
        assert status == 429
        assert answer == {"error": "the server holds as many bytes of requests as it may; try again later"}
        holding.close()
        time.sleep(0.5)
        assert server.ask("POST", INFER, bytes(2**18))[0] == 400


def test_more_connections_than_allowed(served: Path) -> None:
    with serving(served, "--connections", "3") as server:
        held = [server.connect() for _ in range(4)]
        time.sleep(0.2)
        refusal = {"error": "the server has as many connections as it may; try again later"}
        assert server.ask("GET", "/v2") == (503, refusal)
        assert server.ask("GET", "/v2/health/ready")[0] == 200  # a probe of a server that works
        assert server.counted("stagec_crowded_requests_total") == 1
        for connection in held:
            connection.close()
        time.sleep(0.2)
        assert server.ask("GET", "/v2")[0] == 200


def test_no_bytes_end_the_server(served: Path) -> None:
    """Requests that were changed at random: each gets an answer of HTTP or an end, and memory stays."""
    chance = random.Random(0)
    header = json.dumps({"inputs": [{**INPUT, "parameters": {"binary_data_size": X.nbytes}}]}).encode()
    body = header + X.tobytes()
    head = (
        f"POST {INFER} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nInference-Header-Content-Length: {len(header)}\r\n"
    )
    whole = head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    statuses: Counter[bytes] = Counter()
    with serving(served, "--timeout", "1", "--keep-alive", "1") as server:
        before = server.memory()
        for _ in range(2):
            sent = []
            for turn in range(400):
                connection = server.connect()
                with contextlib.suppress(OSError):
                    connection.sendall(changed(whole, chance) if turn else whole)
                sent.append(connection)
            for connection in sent:
                with connection, contextlib.suppress(ConnectionError):
                    answer = b"".join(iter(lambda: connection.recv(2**16), b""))  # noqa: B023
                    assert not answer or answer.startswith(b"HTTP/1.1 ")
                    statuses[answer[9:12]] += 1
        assert statuses[b"200"] > 20
        assert statuses[b"400"] > 200
        assert statuses[b"408"] > 20
        assert b"500" not in statuses
        assert server.memory() - before < 2**25
        assert server.ask("POST", INFER, REQUEST)[0] == 200
        assert "Traceback" not in server.end(signal.SIGINT)


def changed(whole: bytes, chance: random.Random) -> bytes:
    data = bytearray(whole)
    for _ in range(chance.randrange(1, 4)):
        place = chance.randrange(len(data))
        match chance.randrange(4):
            case 0:
                data[place] = chance.randrange(256)
            case 1:
                data[place:place] = chance.choice([b"9999999999", b"-", b"[[[[", b'"', b"\r\n", b"\0", b"e308"])
            case 2:
                del data[place : place + chance.randrange(1, 20)]
            case 3:
                data[place : place + 1] = data[place : place + 1] * chance.randrange(2, 200)
    return bytes(data)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--key", "{folder}/none.pem"], "none.pem"),
        (["--host", "256.0.0.1"], "256.0.0.1:0: cannot listen there"),
        (["--port", "{port}"], "cannot listen there: Address already in use"),
        (["--target", "other"], "no target 'other'"),
    ],
)
def test_what_cannot_start(served: Path, server: Server, tmp_path: Path, options: list[str], text: str) -> None:
    assert text in refused(served, *(word.format(folder=tmp_path, port=server.port) for word in options))


def test_options_of_the_environment(served: Path, tmp_path: Path) -> None:
    """And of a file; what a command line says comes after them."""
    bundle, file = tmp_path / "predict.aot", tmp_path / "serve.args"
    only(served, bundle, "predict")
    file.write_text("--body\n1\n--own-ids\n")
    words = [sys.executable, "-c", PROGRAM, "serve", str(bundle), f"@{file}", "--timeout", "7"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def refused_with(**more: str) -> str:
        done = subprocess.run(words, env={**environment, **more}, capture_output=True, text=True)
        assert done.returncode == 2, done.stderr
        return done.stderr.strip()

    assert refused_with(STAGEC_SERVE_PROT="0").endswith(
        'no option of the environment variable STAGEC_SERVE_PROT: did you mean "STAGEC_SERVE_PORT"?'
    )
    assert refused_with(STAGEC_SERVE_PORT="x").endswith("argument --port: write a whole number, 0 or more, not 'x'")
    assert refused_with(STAGEC_SERVE_WATCH="yes").endswith("STAGEC_SERVE_WATCH is 'yes': write 1 or 0")
    assert "\na.pem: cannot be read" in refused_with(STAGEC_SERVE_KEY="a.pem\nb.pem", STAGEC_SERVE_PORT="0")
    given = {"PORT": "0", "TIMEOUT": "50", "DRAIN": "0", "OWN_IDS": "0", "STRICT": "1", "JSON": "1"}
    more = {f"STAGEC_SERVE_{name}": text for name, text in given.items()}
    process = subprocess.Popen(words, env={**environment, **more}, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")["address"]
        body = json.dumps({**REQUEST, "parameters": {"x": 1}}).encode()
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(urllib.request.Request(f"{address}{INFER}", body))
        assert error.value.code == 501  # it is strict
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 0


def test_the_start_says_what_is_served(server: Server) -> None:
    assert "predict 1.2.0: gathered along batch to 32: its rows are independent, as is proven\n" in server.told
    assert "draw 1.2.0: not gathered: the manifest declares no padding of batch\n" in server.told
    assert "turned: left out: z is c64[4], " in server.told


def test_the_start_as_json(served: Path) -> None:
    with serving(served, "--json", "--gather", "") as server:
        rest = iter(server.output.readline, "}\n")
        told = json.loads(server.told + "".join(rest) + "}")
        assert told["address"] == f"http://{server.address}"
        alone = "no dimension is named to gather along"
        wanted = {"version": "1.2.0", "gathered": "", "trust": "", "largest": 1, "alone": alone}
        assert told["models"]["predict"] == wanted
        assert list(told["left_out"]) == ["turned"]
        assert server.ask("POST", INFER, REQUEST)[0] == 200


def test_a_key_lets_only_signed_bundles_in(served: Path, tmp_path: Path) -> None:
    private, public = write_keys(tmp_path, "release")
    unsigned = refused(served, "--key", str(public))
    assert unsigned.endswith("served.aot.dsse.json: no such file: the bundle has no signature\n")
    bundle = shutil.copy(served, tmp_path / "zoo.aot")
    statement, _ = write_provenance(bundle)
    checked("sign", bundle, "--statement", statement, "--key", private)
    with serving(bundle, "--key", str(public)) as server:
        assert server.ask("POST", INFER, REQUEST)[0] == 200


def test_an_extra_that_is_not_installed(served: Path) -> None:
    program = "import sys; sys.modules['uvicorn'] = None; from stagec.cli import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, "serve", str(served)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    what = "stagec serve needs the package uvicorn, which is not installed: pip install uvicorn\n"
    assert done.stderr == what


def test_calls_at_a_time_follow_the_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has the machine's cores and a part of their time."""
    cores = len(os.sched_getaffinity(0))
    places = Path("/proc/self/cgroup").read_text("utf-8").splitlines()
    monkeypatch.setattr(module, "_CGROUPS", tmp_path)
    assert module.cores() == cores
    for line in places:
        _, controllers, place = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = (tmp_path / "cpu" if controllers else tmp_path) / place.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for quota, wanted in (("50000", 1), ("100000", 1), (str(100_000 * cores * 2), cores), ("max", cores)):
            if controllers:
                (folder / "cpu.cfs_quota_us").write_text(quota.replace("max", "-1"))
                (folder / "cpu.cfs_period_us").write_text("100000")
            else:
                (folder / "cpu.max").write_text(f"{quota} 100000\n")
            assert module.cores() == wanted, (line, quota)


def test_probes_have_a_port_and_a_thread_of_their_own(served: Path) -> None:
    """They are answered while the server has more JSON than it can read and write at once."""
    values = ",".join(["0.125"] * 2**19)
    body = f'{{"inputs":[{{"name":"x","shape":[{2**15},16],"datatype":"FP32","data":[{values}]}}]}}'.encode()
    with serving(served, "--probe-port", "0", "--memory", "1000") as server:
        (port,) = re.findall(r"probes on http://127.0.0.1:(\d+)\n", server.told)
        slowest, statuses = 0.0, Counter[int]()

        def ask() -> None:
            statuses[server.ask("POST", INFER, body)[0]] += 1

        with threads(*[ask] * 4):
            for path in ("/v2/health/live", "/v2/health/ready", "/metrics") * 10:
                began = time.monotonic()
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
                    assert answer.status == 200
                slowest = max(slowest, time.monotonic() - began)
                time.sleep(0.05)
        assert statuses == {200: 4}
        assert slowest < 3
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2")


def said(server: Server, request: bytes) -> tuple[bytes, bytes]:
    """Return head and body of the answer to bytes, after which the connection ends."""
    with server.connect() as connection:
        connection.sendall(request)
        head, _, body = b"".join(iter(lambda: connection.recv(2**16), b"")).partition(b"\r\n\r\n")
    return head, body


def test_two_lengths_of_a_body(server: Server) -> None:
    both = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    head, body = said(server, b"POST /v2/repository/index HTTP/1.1\r\nHost: a\r\n" + both)
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in head
    assert json.loads(body) == {"error": "Invalid HTTP request received."}


def test_bytes_that_are_not_http_beside_requests(served: Path) -> None:
    """After a request, its answer comes first; in its body, there is no answer to it."""
    wrong = b"HTTP/1.1 400 Bad Request\r\n"
    with serving(served, "--delay", "300") as server:
        data = json.dumps(REQUEST).encode()
        head = f"POST {INFER} HTTP/1.1\r\nHost: a\r\n".encode()
        whole = head + f"Content-Length: {len(data)}\r\n\r\n".encode() + data
        answer, body = said(server, whole + whole + b"\0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
        first, second, refused = body.split(b"HTTP/1.1 ")
        assert json.loads(first)["model_name"] == "predict"
        assert second.startswith(b"200 ")
        assert refused.startswith(b"400 ")
        for after in (
            b"no number\r\n",
            b"1\r\n{\r\n0\r\n" + b"A: a\r\n" * 99_999,
            b"1\r\n{\r\n0\r\nA: " + b"a" * 700_000,
        ):
            answer, body = said(server, head + b"Transfer-Encoding: chunked\r\n\r\n" + after)
            assert (answer + b"\r\n").startswith(wrong), after[:20]
            assert "error" in json.loads(body)
        # Behind another request, its body waits for that one's answer.
        answer, body = said(server, whole + head + b"Transfer-Encoding: chunked\r\n\r\nno number\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert wrong in body
        assert server.ask("POST", INFER, REQUEST)[0] == 200
        assert "Traceback" not in server.end(signal.SIGINT)


def test_too_many_headers_and_bytes_that_are_not_http(server: Server) -> None:
    begin = b"GET /v2 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    assert said(server, begin + b"A: " + b"a" * 60_000 + b"\r\n\r\n")[0].startswith(b"HTTP/1.1 200 ")
    for size in (65_536, 200_000):
        head, body = said(server, begin + b"A: " + b"a" * size + b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert "error" in json.loads(body)
    head, body = said(server, b"\0\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    assert json.loads(body) == {"error": "Invalid HTTP request received."}


def test_an_answer_without_a_body_is_sent(server: Server) -> None:
    """And the server goes on with that connection, and is idle after it."""
    with server.connect() as connection:
        for _ in range(2):
            connection.sendall(b"HEAD /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n")
            assert connection.recv(10_000).startswith(b"HTTP/1.1 200 ")
        before = server.seconds()
        time.sleep(1)
        assert server.seconds() - before < 0.5
    answer, body = said(server, b"HEAD /v2 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert (answer.partition(b"\r\n")[0], body) == (b"HTTP/1.1 200 OK", b"")


def test_a_client_that_reads_nothing_of_two_answers_is_left(served: Path) -> None:
    """A request that waits behind an answer that nobody reads ends with it, and so does the server."""
    with serving(served, "--timeout", "1") as server, server.connect() as connection:
        connection.settimeout(1)
        with contextlib.suppress(TimeoutError):
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 10_000)
        time.sleep(3)
        began = time.monotonic()
        assert "Traceback" not in server.end(signal.SIGINT)
        assert time.monotonic() - began < 20


def test_connections_are_kept(served: Path) -> None:
    for options, ends in (([], False), (["--keep-alive", "1"], True), (["--timeout", "1"], False)):
        with serving(served, *options) as server, server.connect() as connection:
            connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n")
            data = b""
            while not data.endswith(b"}"):
                data += connection.recv(1000)
            connection.settimeout(3)
            try:
                assert (connection.recv(1000) == b"") == ends
            except TimeoutError:
                assert not ends
                for part in (b"GET /v2/health/live HTTP/1.1\r\n", b"Host: a\r\n\r\n"):
                    connection.sendall(part)
                    time.sleep(0.3)
                assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_the_index_of_what_is_ready(server: Server) -> None:
    status, rows = server.ask("POST", "/v2/repository/index", {"ready": True})
    assert status == 200
    assert {row["state"] for row in rows} == {"READY"}
    every = server.ask("POST", "/v2/repository/index", {})[1]
    assert {row["name"] for row in every} - {row["name"] for row in rows} == {"turned"}
    for wrong in ({"ready": 1}, {"parameters": {}}):
        assert server.ask("POST", "/v2/repository/index", wrong)[0] == 400
    assert server.ask("POST", "/v2/repository/index")[1] == every
