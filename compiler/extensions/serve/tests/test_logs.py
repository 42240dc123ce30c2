"""The log of a server: nothing waits for its readers, and equal lines end."""

import contextlib
import io
import json
import logging
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from compiler.extensions.serve.tests.processes import INFER, REQUEST, serving, until
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
