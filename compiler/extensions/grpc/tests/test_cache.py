"""A cache that speaks the Remote Execution API: what is asked, and servers that do everything wrong.

test_buildgrid.py has a server that does all of it right.
"""

import contextlib
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from compiler.extensions.serve.tests.processes import certificate
from stagec.core.data import wire
from stagec.core.messages.errors import StagecError
from stagec.local import remote
from stagec.local.remote import Remote
from stagec.local.store import Made, Store
from stagec_grpc import cache as client

KEY = "0" * 64
SOURCE = {"f.py": "1" * 64}
CONTENTS = {"small": b"an executable" * 100, "large": b"weights" * 10_000, "empty": b""}
FILES = {path: (hashlib.sha256(content).hexdigest(), len(content)) for path, content in CONTENTS.items()}
BATCH = 20_000
Fault = Callable[[bytes, Any], Iterator[bytes]]
message = client._message


class Server(grpc.GenericRpcHandler):  # type: ignore[misc]  # it has no types
    """A cache in memory, with the protocol's methods. faults: what answers in place of one, by its name."""

    def __init__(self, credentials: Any = None) -> None:
        self.results: dict[bytes, bytes] = {}
        self.blobs: dict[bytes, bytes] = {}
        self.asked: list[str] = []
        self.headers: dict[str, Any] = {}
        self.faults: dict[str, Fault] = {}
        self.capabilities = message((1, message((1, b"\x01"), (2, message((1, 1))), (4, BATCH))), *_versions(2, 2))
        self.grpc = grpc.server(ThreadPoolExecutor(4), options=[("grpc.max_send_message_length", -1)])
        self.grpc.add_generic_rpc_handlers((self,))
        if credentials:
            self.url = f"grpcs://127.0.0.1:{self.grpc.add_secure_port('127.0.0.1:0', credentials)}"
        else:
            self.url = f"grpc://127.0.0.1:{self.grpc.add_insecure_port('127.0.0.1:0')}"

    def service(self, details: Any) -> Any:
        method = details.method.rpartition("/")[2]
        self.headers = dict(details.invocation_metadata)

        def answer(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            self.asked.append(method)
            if method in self.faults:
                yield from self.faults[method](next(requests), context)
            else:
                yield from getattr(self, method)(requests, context)

        return grpc.stream_stream_rpc_method_handler(answer)

    def GetCapabilities(self, _: object, __: object) -> Iterator[bytes]:  # noqa: N802
        yield self.capabilities

    def GetActionResult(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:  # noqa: N802
        request = next(requests)
        name, inline = next(wire.find(request, [2, 1])), next(wire.find(request, [3]), b"\0") == b"\1"
        if name not in self.results:
            context.abort(grpc.StatusCode.NOT_FOUND, "")
        yield self.results[name] if inline else wire.without(self.results[name], [5])  # as servers may

    def UpdateActionResult(self, requests: Iterator[bytes], _: object) -> Iterator[bytes]:  # noqa: N802
        request = next(requests)
        self.results[next(wire.find(request, [2, 1]))] = content = next(wire.find(request, [3]))
        yield content

    def FindMissingBlobs(self, requests: Iterator[bytes], _: object) -> Iterator[bytes]:  # noqa: N802
        digests = list(wire.find(next(requests), [2]))
        yield message(*((2, digest) for digest in digests if next(wire.find(digest, [1])) not in self.blobs))

    def BatchReadBlobs(self, requests: Iterator[bytes], _: object) -> Iterator[bytes]:  # noqa: N802
        digests = list(wire.find(next(requests), [2]))
        blobs = [self.blobs.get(next(wire.find(digest, [1]))) for digest in digests]
        yield message(
            *(
                (1, message((1, digest), (2, blob or b""), (3, message((1, 5 if blob is None else 0)))))
                for digest, blob in zip(digests, blobs, strict=True)
            )
        )

    def BatchUpdateBlobs(self, requests: Iterator[bytes], _: object) -> Iterator[bytes]:  # noqa: N802
        answers = []
        for blob in wire.find(next(requests), [2]):
            digest, data = next(wire.find(blob, [1])), next(wire.find(blob, [2]))
            self.blobs[next(wire.find(digest, [1]))] = data
            answers.append((1, message((1, digest))))
        yield message(*answers)

    def Read(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:  # noqa: N802
        folder, digest, size = next(wire.find(next(requests), [1])).split(b"/")
        assert folder == b"blobs"
        if digest not in self.blobs:
            context.abort(grpc.StatusCode.NOT_FOUND, "")
        assert int(size) == len(self.blobs[digest])
        for at in range(0, int(size), 30_000):
            yield message((10, self.blobs[digest][at : at + 30_000]))

    def Write(self, requests: Iterator[bytes], _: object) -> Iterator[bytes]:  # noqa: N802
        name, content, finished = b"", b"", b"\0"
        for request in requests:
            name = name or next(wire.find(request, [1]))
            assert next(wire.find(request, [2])) == wire.write_varint(len(content))
            content += next(wire.find(request, [10]))
            finished = next(wire.find(request, [3]))
        assert finished == b"\1"
        self.blobs[name.split(b"/")[-2]] = content
        yield message((1, len(content)))


def _versions(low: int, high: int) -> list[tuple[int, bytes]]:
    return [(4, message((1, low))), (5, message((1, high)))]


@contextlib.contextmanager
def _serving(credentials: Any = None) -> Iterator[Server]:
    server = Server(credentials)
    server.grpc.start()
    try:
        yield server
    finally:
        server.grpc.stop(0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with the result of an action, which read a source."""
    made, root = Store(tmp_path / "first"), tmp_path / "root"
    root.mkdir()
    for path, content in CONTENTS.items():
        (root / path).write_bytes(content)
    made.keep(KEY, root, [*CONTENTS], SOURCE)
    return made


@pytest.fixture
def server(store: Store) -> Iterator[Server]:
    """A server that has what the store has."""
    with _serving() as started:
        assert _send(started.url, store) == ""
        started.asked.clear()
        yield started


def _send(url: str, store: Store) -> str:
    """Send what the store has; return what a user reads of it."""
    with Remote(url, store) as cache:
        cache.keep(KEY, store.find(KEY)[0], reads_sources=True)
    return cache.said


def _find(server: Server, folder: Path) -> tuple[Made | None, str, Store]:
    """Return what another machine gets, what it tells, and its store."""
    store = Store(folder / "second")
    with Remote(server.url, store) as cache:
        made = cache.find(KEY, [*CONTENTS], SOURCE.__getitem__)
        asked = len(server.asked)
        if cache.said:  # it is not asked again
            assert cache.find(KEY, [*CONTENTS], SOURCE.__getitem__) is None
            assert len(server.asked) == asked
    return made, cache.said, store


def test_another_machine_takes_what_one_made(server: Server, tmp_path: Path) -> None:
    assert set(server.blobs) == {digest.encode() for digest, _ in FILES.values()}
    made, said, store = _find(server, tmp_path)
    assert said == ""
    assert made is not None
    assert made.outputs == FILES
    assert {path: store.read(digest) for path, (digest, _) in FILES.items()} == CONTENTS
    results = ["GetCapabilities", "GetActionResult", "GetActionResult"]
    assert server.asked == [*results, "BatchReadBlobs", "Read", "BatchReadBlobs"]
    with Remote(server.url, store) as cache:
        assert cache.find(KEY, [*CONTENTS], {"f.py": "2" * 64}.__getitem__) is None  # another content
        assert cache.find("1" * 64, [*CONTENTS], SOURCE.__getitem__) is None
    assert cache.said == ""


def test_only_what_is_missing_is_sent(server: Server, store: Store) -> None:
    del server.blobs[FILES["large"][0].encode()]
    assert _send(server.url, store) == ""
    assert [name for name in server.asked if name in ("BatchUpdateBlobs", "Write")] == ["Write"]
    assert server.blobs[FILES["large"][0].encode()] == CONTENTS["large"]


@pytest.mark.parametrize("path", ["small", "large"])
def test_a_file_that_was_evicted_is_a_miss(path: str, server: Server, tmp_path: Path) -> None:
    del server.blobs[FILES[path][0].encode()]
    assert _find(server, tmp_path)[:2] == (None, "")


def test_a_server_without_a_limit_is_sent_no_large_messages(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_BATCH", 1000)
    with _serving() as server:
        server.capabilities = message((1, message((1, 1), (2, message((1, 1))))), *_versions(1, 3))
        assert _send(server.url, store) == ""
        assert server.asked.count("Write") == 2


def _status(code: str) -> Fault:
    def act(_: bytes, context: Any) -> Iterator[bytes]:
        context.abort(getattr(grpc.StatusCode, code), "the password is secret \x1b[31m")
        yield b""

    return act


def _endless(_: bytes, __: object) -> Iterator[bytes]:
    while True:
        yield message((10, b"x" * 10_000))


def _endless_of_nothing(_: bytes, __: object) -> Iterator[bytes]:
    while True:
        yield b""


def _dripping(_: bytes, __: object) -> Iterator[bytes]:
    for _ in range(100):
        yield message((10, b"x"))
        time.sleep(0.1)


def _silent(_: bytes, __: object) -> Iterator[bytes]:
    time.sleep(3)
    yield b""


def _bomb(_: bytes, context: Any) -> Iterator[bytes]:
    context.set_compression(grpc.Compression.Gzip)
    yield bytes(20 << 20)


def _message(content: bytes) -> Fault:
    return lambda _, __: iter([content])


UNARY = ("GetCapabilities", "GetActionResult", "BatchReadBlobs")
FAULTS: dict[str, tuple[Fault, str]] = {
    "INTERNAL": (_status("INTERNAL"), "it answers INTERNAL to METHOD\n"),
    "UNAUTHENTICATED": (_status("UNAUTHENTICATED"), "it answers UNAUTHENTICATED to METHOD\n"),
    "UNAVAILABLE": (_status("UNAVAILABLE"), "it does not answer: UNAVAILABLE\n"),
    "CANCELLED": (_status("CANCELLED"), "it does not answer: it takes too long\n"),
    "silent": (_silent, "it does not answer: it takes too long\n"),
    "too large": (_message(bytes(8 << 20)), "it answers RESOURCE_EXHAUSTED to METHOD\n"),
    "a bomb": (_bomb, "it answers INTERNAL to METHOD\n"),
}
OF_MESSAGES: dict[str, Fault] = {"other bytes": _message(b"\xff" * 50), "nothing": _message(b"")}
OF_STREAMS: dict[str, tuple[Fault, str]] = {
    "endless": (_endless, "it sends more bytes than an entry has\n"),
    "endless of nothing": (_endless_of_nothing, "it is too slow\n"),
    "dripping": (_dripping, "it is too slow\n"),
    "short": (_message(message((10, b"x"))), "has other bytes\n"),
    "no message": (lambda _, __: iter([]), "has other bytes\n"),
    "other bytes": (_message(message((10, CONTENTS["large"][::-1]))), "has other bytes\n"),
    "of no protocol": (_message(b"\xff" * 50), "its answer is not a message of the protocol\n"),
}


def _left_out(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a user reads of a server that cannot be used: it costs a moment, and leaves nothing."""
    monkeypatch.setattr(remote, "_PATIENCE", 2.0)  # a busy machine takes more than half a second for a bomb
    monkeypatch.setattr(remote, "_RATE", 1 << 20)
    started = time.monotonic()
    made, said, store = _find(server, folder)
    assert time.monotonic() - started < 8
    assert made is None
    assert not store.has_file(*FILES["large"])
    assert [*(folder / "second" / "blobs").rglob("*.stagec*")] == []
    assert said.startswith(f"{server.url}: the remote cache was left out: ")
    assert "secret" not in said
    return said


@pytest.mark.parametrize("method", [*UNARY, "Read"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_with_a_fault_is_left_out(
    fault: str, method: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act, told = FAULTS[fault]
    server.faults[method] = act
    assert told.replace("METHOD", method) in _left_out(server, tmp_path, monkeypatch)


@pytest.mark.parametrize("fault", OF_STREAMS)
def test_a_stream_with_a_fault(fault: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.faults["Read"], told = OF_STREAMS[fault]
    assert told in _left_out(server, tmp_path, monkeypatch)


def test_a_large_file_that_stops(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it may take long, and a piece of it not."""
    monkeypatch.setattr(remote, "_PATIENCE", 0.5)
    monkeypatch.setattr(remote, "_RATE", 1000)

    def stop(_: bytes, context: Any) -> Iterator[bytes]:
        yield message((10, b"x"))
        while context.is_active():
            time.sleep(0.1)

    server.faults["Read"] = stop
    started = time.monotonic()
    assert "it does not answer: it takes too long\n" in _find(server, tmp_path)[1]
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("method", UNARY)
@pytest.mark.parametrize("fault", OF_MESSAGES)
def test_a_message_with_a_fault(
    fault: str, method: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.faults[method] = OF_MESSAGES[fault]
    said = _left_out(server, tmp_path, monkeypatch)
    assert {
        "GetCapabilities": "it speaks versions 0 to 0 of" if fault == "nothing" else "is not a message of the protocol",
        "GetActionResult": "an entry of it does not name the files that an action read",
        "BatchReadBlobs": "it answers nothing to" if fault == "nothing" else "is not a message of the protocol",
    }[method] in said


@pytest.mark.parametrize("content", [CONTENTS["small"][::-1], b"", CONTENTS["small"] + b"x"])
def test_a_batch_of_other_bytes(
    content: bytes, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.blobs[FILES["small"][0].encode()] = content
    told = f"what it has as cas/{FILES['small'][0]} has other bytes\n"
    assert told in _left_out(server, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("size", "told"),
    [(0, "has other bytes"), (1, "has other bytes"), (2**31, "has other bytes"), (2**64 - 1, "it takes too long")],
)
def test_a_size_that_is_not_the_one_of_the_file(
    size: int, told: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "Read", lambda *_: iter([message((10, b"x"))]))
    outputs = {**FILES, "large": (FILES["large"][0], size)}
    (name,) = (name for name, content in server.results.items() if b"large" in content)
    server.results[name] = b"".join(map(remote._output, outputs.items()))
    assert f"{told}\n" in _left_out(server, tmp_path, monkeypatch)


@pytest.mark.parametrize("digests", [b"", b"\x02\x03"])
def test_a_server_with_other_digests(
    digests: bytes, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.capabilities = message((1, message((1, digests))), *_versions(2, 2))
    assert "it has no digests of SHA-256\n" in _left_out(server, tmp_path, monkeypatch)


@pytest.mark.parametrize("method", ["FindMissingBlobs", "BatchUpdateBlobs", "Write", "UpdateActionResult"])
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (_status("PERMISSION_DENIED"), "it answers PERMISSION_DENIED to METHOD: to read from it alone, write --no-up"),
        (_silent, "it does not answer: it takes too long"),
        (_message(bytes(8 << 20)), "it answers RESOURCE_EXHAUSTED to METHOD\n"),
    ],
)
def test_a_server_that_takes_nothing_is_told(
    method: str, fault: Fault, told: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_PATIENCE", 0.5)
    with _serving() as server:
        server.faults[method] = fault
        said = _send(server.url, store)
        assert told.replace("METHOD", method) in said
        assert "secret" not in said
        assert not server.results  # the last thing that is sent


@pytest.mark.parametrize(
    ("method", "content", "told"),
    [
        ("Write", message((1, 5)), "it takes a part of a file\n"),
        ("Write", b"", "it takes a part of a file\n"),
        ("BatchUpdateBlobs", b"", "it answers nothing to BatchUpdateBlobs\n"),
        ("FindMissingBlobs", b"\xff", "its answer is not a message of the protocol\n"),
    ],
)
def test_a_server_that_takes_a_part(method: str, content: bytes, told: str, store: Store) -> None:
    with _serving() as server:
        server.faults[method] = _message(content)
        assert told in _send(server.url, store)


def test_a_server_that_only_some_may_write_to(server: Server, store: Store, tmp_path: Path) -> None:
    server.capabilities = message((1, message((1, 1))), *_versions(2, 2))
    assert "it takes no results: to read from it alone, write --no-upload\n" in _send(server.url, store)
    made, said, _ = _find(server, tmp_path)
    assert (made is not None, said) == (True, "")


def test_a_name_and_a_password(server: Server, tmp_path: Path) -> None:
    address = server.url.removeprefix("grpc://")
    server.url = f"grpc://me:a%20secret@{address}"
    made, said, _ = _find(server, tmp_path)
    assert (made is not None, said) == (True, "")
    assert server.headers["authorization"] == "Basic bWU6YSBzZWNyZXQ="
    server.faults["GetCapabilities"] = _status("UNAUTHENTICATED")
    assert _find(server, tmp_path / "other")[1].startswith(
        f"grpc://{address}: the remote cache was left out: it answers"
    )


def test_tls(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, key = certificate(tmp_path)
    with _serving(grpc.ssl_server_credentials([(key.read_bytes(), chain.read_bytes())])) as secure:
        secure.blobs, secure.results = server.blobs, server.results
        assert "it does not answer: CERTIFICATE_VERIFY_FAILED\n" in _find(secure, tmp_path)[1]
        monkeypatch.setenv("SSL_CERT_FILE", str(chain))
        made, said, _ = _find(secure, tmp_path)
        assert (made is not None, said) == (True, "")
    server.url = server.url.replace("grpc:", "grpcs:")
    assert "it does not answer: WRONG_VERSION_NUMBER\n" in _find(server, tmp_path / "plain")[1]


def test_it_needs_the_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setattr(sys, "path", [])
    for name in [name for name in sys.modules if name.partition(".")[0] == "stagec_grpc"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(StagecError) as refused:
        Remote("grpcs://cache", Store(tmp_path))
    assert str(refused.value) == (
        "--remote-cache grpcs:// needs the extension grpc, which is not installed\n"
        "  in a clone of stagec, pip install ./compiler/extensions/grpc"
    )
