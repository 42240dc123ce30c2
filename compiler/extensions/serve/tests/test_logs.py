"""The log of a server: nothing waits for its readers, and equal lines end; and its log of requests."""

import contextlib
import http.client
import io
import json
import logging
import os
import re
import resource
import signal
import time
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from compiler.extensions.serve.tests.processes import INFER, INPUT, REQUEST, inputs, serving, until
from stagec_serve import logs


def logger_to(stream: io.TextIOBase, as_json: bool = False) -> tuple[logging.Logger, logs.Handler]:
    handler = logs.Handler(stream)  # type: ignore[arg-type]
    handler.addFilter(logs.Alike())
    if as_json:
        handler.setFormatter(logs._Json())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    return logger, handler


def test_equal_lines_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    logger, handler = logger_to(stream)
    for number in range(1000):
        logger.error("no descriptor for %d", number)
        logger.error(f"another {number}")
    now[0] = 11
    logger.error("no descriptor for %d", 1000)
    until_written(handler)
    lines = stream.getvalue().splitlines()
    alike = [line for line in lines if line.startswith("no")]
    assert alike[:20] == [f"no descriptor for {number}" for number in range(20)]
    assert alike[20:] == ["no descriptor for 1000 (980 more like this were not logged)"]
    assert len(lines) == 1021


def until_written(handler: logs.Handler) -> None:
    while handler._lines.unfinished_tasks:
        pass


def test_a_pipe_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MOST_WAITING", 100)
    read, write = os.pipe()
    with contextlib.suppress(BrokenPipeError), os.fdopen(write, "w") as stream:
        logger, handler = logger_to(stream, as_json=True)
        began = time.monotonic()
        for number in range(2000):
            logger.error(f"{number} {'x' * 1000}")
        assert time.monotonic() - began < 20
        with os.fdopen(read) as reader:
            rows = [json.loads(reader.readline())]
            while handler._lines.unfinished_tasks > 1:
                rows.append(json.loads(reader.readline()))
    dropped = [row for row in rows if "were dropped: nobody read the log" in row["message"]]
    assert dropped
    assert {row["level"] for row in dropped} == {"WARNING"}
    assert any(row["message"].startswith("0 xxx") for row in rows)
    assert len(rows) < 1000


def test_a_server_whose_log_nobody_reads_answers(served: Path) -> None:
    """The pipe of the tests is read at the end alone."""
    with serving(served) as server:
        for number in range(600):  # 2 lines and a half, for a pipe of 64 KiB
            connection = server.connect()
            connection.sendall(f"{'x' * 200}{number}\r\n\r\n".encode())
            connection.close()
        for _ in range(3):
            assert server.ask("POST", INFER, REQUEST)[0] == 200
        soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        assert soft == hard
        until(lambda: server.descriptors() < 60)
        lines = server.end(signal.SIGINT).splitlines()
    assert 10 < len([line for line in lines if "Invalid HTTP request received." in line]) < 200


TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_a_line_for_each_request(served: Path) -> None:
    """Both protocols, also what is refused; more of them than equal lines may be."""
    given = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-request-id": "mine"}
    with serving(served, "--access-log", "--json-logs", "--grpc-port", "0") as server:
        connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
        connection.request("POST", INFER, json.dumps({**REQUEST, "id": "a b"}), given)
        answer = connection.getresponse()
        answer.read()
        assert answer.headers["x-request-id"] == "mine"
        connection.close()
        for _ in range(30):
            server.ask("GET", "/v2/health/live")
        server.ask("POST", INFER, {"inputs": []})
        server.ask("GET", "/none%0Ahere")
        large = {"inputs": [{**INPUT, "shape": [40, 16], "data": [1] * 640}]}
        server.ask("POST", INFER, large)
        with triton.InferenceServerClient(server.grpc) as client:
            client.infer("predict", inputs(), request_id="7", headers=given)
            with pytest.raises(InferenceServerException):
                client.get_model_metadata("none")
        lines = [json.loads(line) for line in server.end(signal.SIGINT).splitlines()]
    rows = [line for line in lines if line["logger"] == logs.REQUESTS.name]
    assert len(rows) == 36
    for row in rows:
        assert set(row) - {"time", "level", "logger", "request"} <= {*logs.FIELDS}
        assert 0 <= row["ms"] < 60_000
    first, *lives, refused, none, parts, rpc, rpc_none = rows
    shown = {"status": 200, "request_id": "mine", "id": "a b", "trace": TRACE, "model": "predict", "rows": 3}
    assert first.items() >= {"request": f"POST {INFER}", **shown, "batch": 3}.items()
    assert first["client"].startswith("127.0.0.1:")
    assert {(row["request"], row["status"]) for row in lives} == {("GET /v2/health/live", 200)}
    assert len({row["request_id"] for row in lives}) == 30
    assert refused.items() >= {"status": 400, "model": "predict"}.items()
    assert none.items() >= {"status": 404, "request": "GET /none\nhere"}.items()
    assert parts.items() >= {"rows": 40, "batch": 8}.items()  # of the last part
    assert rpc.items() >= {"request": "ModelInfer", **shown, "status": "OK", "id": "7", "batch": 3}.items()
    assert rpc_none.items() >= {"request": "ModelMetadata", "status": "NOT_FOUND"}.items()


def test_lines_as_text_are_lines(served: Path) -> None:
    with serving(served, "--access-log") as server:
        server.ask("GET", "/none%0Ahere", None, x_request_id="a status=200")
        log = server.end(signal.SIGINT)
    (line,) = [line for line in log.splitlines() if logs.REQUESTS.name in line]
    pattern = (
        r".* INFO stagec_serve.access: 'GET /none\\nhere' status=404 ms=\S+ client=127.0.0.1:\d+ "
        r"request_id='a status=200'"
    )
    assert re.fullmatch(pattern, line), line


def test_there_is_no_such_line_unless_it_is_asked_for(served: Path) -> None:
    with serving(served) as server:
        server.ask("GET", "/v2/health/live")
        assert logs.REQUESTS.name not in server.end(signal.SIGINT)
