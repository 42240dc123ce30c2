"""Server processes, and clients that ask them without a pause.

Importing takes 1.2 of the 1.4 CPU seconds of a start, so processes are forks of one that has imported all, but JAX: a
server needs none. What starts a server as people do is in test_serving_page.py.
"""

import contextlib
import functools
import http.client
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import tritonclient.grpc as triton

X = np.random.default_rng(1).standard_normal((3, 16)).astype(np.float32)
INPUT = {"name": "x", "shape": [3, 16], "datatype": "FP32"}
REQUEST = {"inputs": [{**INPUT, "data": X.ravel().tolist()}]}
INFER = "/v2/models/predict/infer"
# The server needs no JAX: here nobody can import it.
PROGRAM = "import sys; sys.modules['jax'] = None; from stagec.cli import main; sys.exit(main())"
CLIENTS = 8
_HEADER = json.dumps(
    {
        "inputs": [{**INPUT, "parameters": {"binary_data_size": X.nbytes}}],
        "parameters": {"binary_data_output": True},
    }
).encode()
_FORKS = multiprocessing.get_context("forkserver")
_IMPORTED = ["stagec_serve.commands.serve", "stagec.loader.load", "stagec_grpc.rpc", "stagec_serve.server"]


@functools.cache
def _start_to_fork() -> None:
    # Python 3.11 gives the process that forks the variables of this one, and not sys.path.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        _FORKS.set_forkserver_preload(_IMPORTED)
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _run(words: list[str], printed: Connection, said: Connection, program: str) -> None:
    sys.modules["jax"] = None  # type: ignore[assignment]
    for number, pipe in enumerate((printed, said), 1):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    from stagec.cli import main

    status: Any = 0
    if program:
        sys.argv[1:] = words
        try:
            exec(program, {})
        except SystemExit as error:
            status = error.code
    else:
        status = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Server:
    """A process of `stagec serve`.

    told: what it has printed until it listens. When it has ended, rest: what it has printed since then; errors: what it
    wrote on stderr; status: the number of a signal is negative.
    """

    def __init__(self, bundle: Path, *options: str, program: str = "") -> None:
        """Raises AssertionError with what it says, where it does not start.

        program: Python that does what the command line says, as sys.argv has it; "": `stagec` itself.
        """
        _start_to_fork()
        (read, printed), (read_errors, said) = _FORKS.Pipe(duplex=False), _FORKS.Pipe(duplex=False)
        words = ["serve", str(bundle), "--port", "0", "--drain", "1", *options]
        self._process = _FORKS.Process(target=_run, args=(words, printed, said, program), daemon=True)
        self._process.start()
        for pipe in (printed, said):
            pipe.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.output, self._errors = (os.fdopen(os.dup(pipe.fileno())) for pipe in (read, read_errors))
        self.told = self.rest = self.errors = self.grpc = ""
        for line in self.output:
            self.told += line
            if match := re.search(r"grpc://(\S+)", line):
                self.grpc = match[1]
            if match := re.search(r"https?://(.*?):(\d+)", line):
                self.host, self.port = match[1], int(match[2])
            if re.search(r"listening on http|\"address\"", line):
                return
        raise AssertionError(self.end())

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def status(self) -> int | None:
        return self._process.exitcode

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Return the status and the JSON, or text, of an answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=600)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        connection.request(method, path, data, given)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        is_json = answer.getheader("content-type") == "application/json"
        return answer.status, json.loads(text) if is_json and text else text

    def counted(self, pattern: str) -> float:
        """Return the sum of the metrics that a pattern describes."""
        _, text = self.ask("GET", "/metrics")
        return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(pattern, line))

    def waiting(self, count: int) -> None:
        """Wait until that many requests of `predict` are in the queue."""
        until(lambda: self.counted("stagec_waiting_requests{.*predict") == count)

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=60)

    def seconds(self) -> float:
        """Return what the server's process took of a CPU."""
        user, system = Path(f"/proc/{self.pid}/stat").read_text("utf-8").rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Return the bytes of memory that the process has."""
        status = Path(f"/proc/{self.pid}/status").read_text("utf-8")
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024

    def descriptors(self) -> int:
        return len([*Path(f"/proc/{self.pid}/fd").iterdir()])

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self, number: int = signal.SIGTERM) -> str:
        """Signal the process, and return what it wrote on stderr when it has ended."""
        if not self._errors.closed:
            self.send(number)
            self._process.join(120)
            if self.status is None:
                self.send(signal.SIGKILL)
                raise AssertionError("the server does not end")
            with self.output, self._errors as errors:
                self.rest, self.errors = self.output.read(), errors.read()
        return self.errors


def inputs(x: Any = X, name: str = "x") -> list[Any]:
    tensor = triton.InferInput(name, list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    return [tensor]


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate of 127.0.0.1 that nobody else has signed, and its key."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "stagec")])
    day = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    places = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, day, day.replace(year=2120))
    signed = builder.add_extension(places, critical=False).sign(key, hashes.SHA256())
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for file, data in (("cert.pem", signed.public_bytes(encoding)), ("key.pem", private)):
        (folder / file).write_bytes(data)
    return folder / "cert.pem", folder / "key.pem"


@contextlib.contextmanager
def serving(bundle: Path, *options: str, program: str = "") -> Iterator[Server]:
    server = Server(bundle, *options, program=program)
    try:
        yield server
    finally:
        server.end(signal.SIGINT)
    assert server.status == 0


def refused(bundle: Path, *options: str, program: str = "") -> str:
    """Return what a server says that does not start."""
    server = None
    with pytest.raises(AssertionError) as error:
        server = Server(bundle, *options, program=program)
    assert server is None
    assert "Traceback" not in str(error.value)
    return str(error.value)


def until(check: Callable[[], object]) -> None:
    """Wait until a function returns something true."""
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def threads(*targets: Callable[[], None]) -> Iterator[None]:
    """Run functions in threads of their own; wait for them after a block that succeeds, and for none after another.

    Raises what the first of them raises that fails.
    """
    errors: list[BaseException] = []

    def run(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:  # noqa: BLE001  # it is raised below
            errors.append(error)

    started = [threading.Thread(target=run, args=(target,), daemon=True) for target in targets]
    for thread in started:
        thread.start()
    yield
    for thread in started:
        thread.join(120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


class Clients:
    """Threads that ask, JSON and bytes in turn, while a block runs.

    answered: how many have each status; "refused" where nobody listened, "lost" where a request that was sent had no
    answer. seen: the bytes of results.
    """

    def __init__(self, server: Server, pause: float = 0) -> None:
        """pause: seconds between two requests of a client."""
        self.answered: Counter[object] = Counter()
        self.seen: set[bytes] = set()
        self._server, self._pause, self._ended = server, pause, threading.Event()
        self._asking = threads(*[lambda turn=turn: self._ask(turn) for turn in range(CLIENTS)])

    def __enter__(self) -> Self:
        self._asking.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._asking.__exit__(None, None, None)

    def _ask(self, turn: int) -> None:
        connection = None
        while not self._ended.wait(self._pause):
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
        body = _HEADER + X.tobytes() if is_binary else json.dumps(REQUEST).encode()
        headers = {"inference-header-content-length": str(len(_HEADER))} if is_binary else {}
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
