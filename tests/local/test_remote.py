"""A cache that builds without Bazel share: with nginx, and with servers that do everything wrong.

Modules: `local/remote.py`, `local/running.py`, `local/store.py`, `cli/build.py`.
"""

import contextlib
import hashlib
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from stagec.core.data import wire
from stagec.core.messages.errors import StagecError
from stagec.local import remote
from stagec.local.remote import Remote
from stagec.local.store import Made, Store
from tests.caches import HttpCache, http_cache
from tests.local.test_building import SOURCES, Workspace

KEY = "0" * 64
SOURCE = {"f.py": "1" * 64}
CONTENT = b"an executable" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpCache]:
    with contextlib.ExitStack() as stack:
        try:
            started = stack.enter_context(http_cache(tmp_path_factory.mktemp("cache") / "http"))
        except FileNotFoundError as error:
            pytest.skip(str(error))
        yield started


def test_another_machine_takes_what_one_made(cache: HttpCache, tmp_path: Path) -> None:
    first, second = Workspace(tmp_path / "first"), Workspace(tmp_path / "second")
    words = ["--remote-cache", cache.url]
    ran = first.build(*words)
    assert "action export m.double" in ran
    done = second.run("--json", *words)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["ran"], answer["fetched"]) == ([], len(ran))
    assert second.sha256() == first.sha256()
    assert second.build() == set()  # without the cache
    # An edit that leaves the artifact as it was, and one that does not.
    second.write("models/f.py", "# A comment.\n" + SOURCES["models/f.py"])
    second.write("models/other.py", "TEN = 11\n")
    assert second.build(*words) == {"action imports m.imports", "action export m.double"}
    assert first.build(*words) == set()
    first.write("models/f.py", "# A comment.\n" + SOURCES["models/f.py"])
    assert first.build(*words) <= {"action imports m.imports"}  # which reads other.py


def test_a_machine_that_may_only_read(cache: HttpCache, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, {**SOURCES, "models/g.py": "def shift(x):\n    return x + 7\n"})
    before = len(cache.actions)
    assert "action export m.shift" in workspace.build("--remote-cache", cache.url, "--no-upload")
    assert len(cache.actions) == before
    told = workspace.refusal("--dry-run", "--remote-cache", cache.url)
    assert told == "--dry-run asks no cache, and --remote-cache names one\n  leave one of them out\n"
    assert workspace.refusal("--no-upload") == "--no-upload is for --remote-cache: leave it out\n"


def test_a_cache_with_damage_gives_no_wrong_result(cache: HttpCache, tmp_path: Path) -> None:
    first, second = Workspace(tmp_path / "first"), Workspace(tmp_path / "second")
    first.build("--remote-cache", cache.url)
    for blob in cache.blobs:
        blob.write_bytes(b"!" + blob.read_bytes()[1:])
    done = second.run("--json", "--remote-cache", cache.url)
    assert done.returncode == 0
    assert json.loads(done.stdout)["fetched"] == 0
    assert second.sha256() == first.sha256()
    assert done.stderr.count("the remote cache was left out: what it has as cas/") == 1
    shutil.rmtree(cache.folder / "files" / "cas")


def test_a_server_that_is_not_there_fails_no_build(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    done = workspace.run("--remote-cache", "http://user:secret@127.0.0.1:9")
    assert done.returncode == 0
    assert done.stderr.endswith(
        "http://127.0.0.1:9: the remote cache was left out: it does not answer: Connection refused\n"
        "  the bundle is as without it; look at the server, or leave --remote-cache out\n"
    )


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("unix:/cache", "it is not the address of a cache"),
        ("cache:8080", "it is not the address of a cache"),
        ("http://cache/\xe9", "it is not the address of a cache"),
        ("http://", "it is not the address of a cache"),
        ("http://cache:x", "it is not the address of a cache"),
        ("http://user:se/cret@cache", "it is not the address of a cache"),
        ("http://user:1/cret@cache", "it is not the address of a cache"),
        ("http://user:se#cret@cache", "it is not the address of a cache"),
        ("http://user:se\u2100cret@cache", "it is not the address of a cache"),
        ("http://user:se[cret@cache", "it is not the address of a cache"),
    ],
)
def test_addresses_of_others_are_refused(url: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(StagecError) as refused:
        Remote(url, Store(tmp_path))
    assert str(refused.value).startswith(f"--remote-cache: {told}\n  write the address of a cache, such as http://")
    assert not re.search("user|se|cret", str(refused.value))


class Server(ThreadingHTTPServer):
    """A cache in memory. fault: answers GET in its own way; it returns whether it did."""

    daemon_threads = True
    fault: Callable[[BaseHTTPRequestHandler], bool] = staticmethod(lambda _: False)

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    """A request of it."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.server.fault(self):
            self.close_connection = True
            return
        content = self.server.entries.get(self.path)
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        self.wfile.write(content or b"")

    def do_PUT(self) -> None:
        self.server.entries[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def _serving() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server that has the result of an action, which read a source."""
    with _serving() as server:
        store, root = Store(tmp_path / "one"), tmp_path / "root"
        root.mkdir()
        (root / "out").write_bytes(CONTENT)
        made = store.keep(KEY, root, ["out"], SOURCE)
        with Remote(server.url, store) as cache:
            cache.keep(KEY, made, reads_sources=True)
        assert cache.said == ""
        assert len(server.entries) == 3
        yield server


def _find(server: Server, folder: Path) -> tuple[Made | None, str, Store]:
    """Return what another machine gets, what it tells, and its store."""
    store = Store(folder / "two")
    with Remote(server.url, store) as cache:
        made = cache.find(KEY, ["out"], SOURCE.__getitem__)
        assert made is None or cache.said == ""
        if made is None:  # it is not asked again
            asked = len(server.asked)
            assert cache.find(KEY, ["out"], SOURCE.__getitem__) is None
            assert not cache.said or len(server.asked) == asked
    return made, cache.said, store


def test_a_result_is_found_by_what_was_read(server: Server, tmp_path: Path) -> None:
    made, _, store = _find(server, tmp_path)
    assert made is not None
    assert made.outputs == {"out": (DIGEST, len(CONTENT))}
    assert store.read(DIGEST) == CONTENT
    with Remote(server.url, store) as cache:
        assert cache.find(KEY, ["out"], {"f.py": "2" * 64}.__getitem__) is None  # another content
        assert cache.find(KEY, ["out"], {"g.py": "1" * 64}.__getitem__) is None  # there is no such file here
        assert cache.find("1" * 64, ["out"], SOURCE.__getitem__) is None
    assert cache.said == ""


def test_a_file_that_was_evicted_is_a_miss(server: Server, tmp_path: Path) -> None:
    del server.entries[f"/cas/{DIGEST}"]
    assert _find(server, tmp_path)[:2] == (None, "")


def _answer(handler: BaseHTTPRequestHandler, content: bytes, *headers: tuple[str, str], status: int = 200) -> bool:
    handler.send_response(status)
    for name, value in headers:
        handler.send_header(name, value)
    handler.end_headers()
    with contextlib.suppress(OSError):
        handler.wfile.write(content)
    return True


def _endless(handler: BaseHTTPRequestHandler) -> bool:
    _answer(handler, b"", ("Connection", "close"))
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(CONTENT)
    return True


def _endless_chunks(handler: BaseHTTPRequestHandler) -> bool:
    _answer(handler, b"", ("Transfer-Encoding", "chunked"))
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")
    return True


def _dripping(handler: BaseHTTPRequestHandler) -> bool:
    _answer(handler, b"", ("Content-Length", str(len(CONTENT))))
    with contextlib.suppress(OSError):
        for _ in range(100):
            handler.wfile.write(b"x")
            time.sleep(0.1)
    return True


def _dripping_headers(handler: BaseHTTPRequestHandler) -> bool:
    with contextlib.suppress(OSError):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        for number in range(100):
            handler.wfile.write(f"X-{number}: x\r\n".encode())
            time.sleep(0.1)
    return True


def _dripping_chunk(handler: BaseHTTPRequestHandler) -> bool:
    _answer(handler, b"", ("Transfer-Encoding", "chunked"))
    with contextlib.suppress(OSError):
        for _ in range(100):
            handler.wfile.write(b"0")
            time.sleep(0.1)
    return True


def _silent(_: BaseHTTPRequestHandler) -> bool:
    time.sleep(3)
    return True


LENGTH = ("Content-Length", str(len(CONTENT)))
FAULTS: dict[str, tuple[Callable[[BaseHTTPRequestHandler], bool], str]] = {
    "other bytes": (lambda h: _answer(h, CONTENT[::-1], LENGTH), "has other bytes"),
    "fewer bytes": (lambda h: _answer(h, CONTENT[:9], ("Content-Length", "9")), "has other bytes"),
    "more bytes": (lambda h: _answer(h, CONTENT + b"x", ("Content-Length", str(len(CONTENT) + 1))), "more bytes"),
    "a short body": (lambda h: _answer(h, CONTENT[:9], LENGTH), "ends in the middle of an entry"),
    "no body": (lambda h: _answer(h, b"", ("Content-Length", "0")), "has other bytes"),
    "endless": (_endless, "sends more bytes than an entry has"),
    "endless chunks": (_endless_chunks, "sends more bytes than an entry has"),
    "dripping": (_dripping, "it is too slow"),
    "dripping headers": (_dripping_headers, "it does not answer"),
    "dripping chunk": (_dripping_chunk, "ends in the middle of an entry"),
    "silent": (_silent, "it does not answer"),
    "500": (lambda h: _answer(h, b"", ("Content-Length", "0"), status=500), "it answers 500 to GET"),
    "403": (lambda h: _answer(h, b"", ("Content-Length", "0"), status=403), "it answers 403 to GET"),
    "206": (lambda h: _answer(h, CONTENT, LENGTH, status=206), "it answers 206 to GET"),
    "no HTTP": (lambda h: h.wfile.write(b"\0" * 100) > 0, "it does not answer"),
}


@pytest.mark.parametrize("which", ["/cas/", "/ac/"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_with_a_fault_is_left_out(
    fault: str, which: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_PATIENCE", 0.5)
    monkeypatch.setattr(remote, "_LARGEST_RESULT", 20_000)
    monkeypatch.setattr(remote, "_RATE", 1 << 20)
    act, told = FAULTS[fault]
    server.fault = lambda handler: which in handler.path and act(handler)
    started = time.monotonic()
    made, said, store = _find(server, tmp_path)
    assert time.monotonic() - started < 8
    assert made is None
    assert not store.has_file(DIGEST, len(CONTENT))
    assert [*(tmp_path / "two" / "blobs").rglob("*.stagec*")] == []
    if which == "/ac/" and fault in ("other bytes", "fewer bytes", "more bytes", "no body"):
        told = "an entry of it does not name the files that an action read"
    assert said.startswith(f"{server.url}: the remote cache was left out: ")
    assert told in said


def test_it_follows_no_redirect(server: Server, tmp_path: Path) -> None:
    with _serving() as elsewhere:
        elsewhere.entries = server.entries
        server.fault = lambda h: _answer(h, b"", ("Location", elsewhere.url + h.path), status=302)
        made, said, _ = _find(server, tmp_path)
        assert made is None
        assert elsewhere.asked == []
    assert "it answers 302 to GET, which leads elsewhere: name that address" in said


@pytest.mark.parametrize("paths", [["../out"], ["/out"], ["out", "more"], []])
def test_an_entry_with_other_files_is_not_taken(paths: list[str], server: Server, tmp_path: Path) -> None:
    (name,) = (name for name, content in server.entries.items() if "/ac/" in name and DIGEST.encode() in content)
    outputs = {path: (DIGEST, len(CONTENT)) for path in paths}
    server.entries[name] = b"".join(map(remote._output, outputs.items()))
    made, said, store = _find(server, tmp_path)
    assert made is None
    assert "an entry of it has other files than the action" in said
    assert not store.has_file(DIGEST, len(CONTENT))


@pytest.mark.parametrize("content", [b"\xff" * 50, b"\n", remote._output(("out", ("../" * 21 + "x", 1)))])
def test_an_entry_that_is_no_result_is_not_taken(content: bytes, server: Server, tmp_path: Path) -> None:
    for name in server.entries:
        if "/ac/" in name and DIGEST.encode() in server.entries[name]:
            server.entries[name] = content
    made, said, _ = _find(server, tmp_path)
    assert made is None
    assert "an entry of it is not the result of an action" in said


@pytest.mark.parametrize(
    "text", ['["f.py"]', '{"f.py": []}', "[[1]]", "[" * 5000, '[["f.py", NaN]]', f"[{'[' * 250}{']' * 250}]", "[[]"]
)
def test_an_entry_that_names_no_files_is_not_taken(text: str, server: Server, tmp_path: Path) -> None:
    (name,) = (name for name, content in server.entries.items() if b"f.py" in content)
    server.entries[name] = wire.Record(remote._STDOUT, 2, text.encode()).encode()
    made, said, _ = _find(server, tmp_path)
    assert made is None
    assert "an entry of it does not name the files that an action read" in said


def test_a_server_that_takes_nothing_is_told(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(handler: Handler) -> None:
        asked.append(handler.path)
        handler.rfile.read(int(handler.headers["Content-Length"]))
        _answer(handler, b"", ("Content-Length", "0"), status=403)

    monkeypatch.setattr(Handler, "do_PUT", refuse)
    store = Store(tmp_path / "one")
    made = store.find(KEY)[0]
    with Remote(server.url, store) as cache:
        for _ in range(3):
            cache.keep(KEY, made, reads_sources=True)
    assert asked == [f"/cas/{DIGEST}"]  # nothing is asked after it
    assert "it answers 403 to PUT: to read from it alone, write --no-upload\n" in cache.said
