"""Debian's docker-registry on this machine, a connection to it that breaks, and a registry that is hostile."""

import contextlib
import hashlib
import http.server
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagec_registry import layout

_CONFIG = """version: 0.1
log: {{level: info}}
storage: {{filesystem: {{rootdirectory: {folder}/data}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""
_AUTH = "auth: {{htpasswd: {{realm: here, path: {folder}/htpasswd}}}}\n"
_PASSWORDS = "ann:$2b$05$nIbv.EQMyWmynB6jdI/onOVhCLuih8ASv5p05FdXG3lE/iYgpt/fO\n"
"""bcrypt of "secret"."""

needs_registry = pytest.mark.skipif(
    not (shutil.which("docker-registry") and shutil.which("skopeo")),
    reason="docker-registry or skopeo is not installed: apt-get install docker-registry skopeo",
)


class Registry:
    """A registry. host: address and port; folder: its log and data."""

    def __init__(self, folder: Path, password: bool = False) -> None:
        self.folder, self.port = folder, _free_port()
        self.host = f"127.0.0.1:{self.port}"
        text = _CONFIG + (_AUTH if password else "")
        (folder / "config.yml").write_text(text.format(folder=folder, port=self.port))
        (folder / "htpasswd").write_text(_PASSWORDS)
        self._log = (folder / "log").open("wb")
        words = ["docker-registry", "serve", str(folder / "config.yml")]
        self._process = subprocess.Popen(words, stdout=self._log, stderr=self._log)
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.05)
        raise AssertionError((folder / "log").read_text())

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def uploads(self) -> int:
        """How many blobs were uploaded so far."""
        return len(
            re.findall(r"http\.request\.method=PUT http\.request\.[^\n]*uploads", (self.folder / "log").read_text())
        )

    def blob(self, digest: str) -> Path:
        """Where the registry keeps a blob."""
        return self.folder / "data" / "docker/registry/v2/blobs/sha256" / digest[:2] / digest / "data"

    def get(self, path: str, accept: str = "application/vnd.oci.image.manifest.v1+json") -> bytes:
        request = urllib.request.Request(f"http://{self.host}/v2/{path}", headers={"Accept": accept})
        with urllib.request.urlopen(request) as answer:
            return bytes(answer.read())


class Hostile:
    """A registry that serves what a test says. host: address and port.

    manifests: content by tag or digest. blobs: content by digest (hex), or a number of bytes that it sends as if they
    were it. status, answer: of every request, in place of all that. silent: whether it never answers.
    """

    def __init__(self) -> None:
        self.manifests: dict[str, bytes] = {}
        self.blobs: dict[str, bytes | int] = {}
        self.status, self.answer, self.silent, self.sent = 0, b"", False, 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.reply(self)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.host = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, manifest: dict[str, Any], *names: str) -> str:
        """Serve a manifest by its digest and by `names`; return the digest."""
        content = json.dumps(manifest).encode()
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self.manifests |= dict.fromkeys([digest, *names], content)
        return digest

    def blob(self, content: bytes) -> dict[str, Any]:
        """Serve a blob; return its descriptor."""
        digest = hashlib.sha256(content).hexdigest()
        self.blobs[digest] = content
        return {"mediaType": "application/octet-stream", "digest": f"sha256:{digest}", "size": len(content)}

    def layer(self, title: str, content: bytes, kind: str = layout.CODE) -> dict[str, Any]:
        """Serve a layer; return its descriptor."""
        return {**self.blob(content), "mediaType": kind, "annotations": {layout.TITLE: title}}

    def image(self, *layers: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Return the manifest of an image."""
        head = {"schemaVersion": 2, "mediaType": layout.MANIFEST_TYPE, "artifactType": layout.MODEL}
        return {**head, "config": self.blob(b"{}"), "layers": list(layers), **more}

    def reply(self, request: http.server.BaseHTTPRequestHandler) -> None:
        if self.silent:
            time.sleep(3600)
        kind, _, name = request.path.rpartition("/")
        content: bytes | int | None = b"{}"
        status = self.status or 200
        if self.status:
            content = self.answer
        elif kind.endswith("/manifests"):
            content = self.manifests.get(name)
        elif kind.endswith("/blobs"):
            content = self.blobs.get(name.removeprefix("sha256:"))
        elif kind.endswith("/tags"):
            tags = [tag for tag in self.manifests if ":" not in tag]
            content = json.dumps({"name": "x", "tags": tags}).encode()
        if content is None:
            status, content = 404, b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}'
        request.send_response(status)
        if status == 429:
            request.send_header("Retry-After", "1")  # else skopeo asks for a minute
        kinds = {True: "application/vnd.oci.image.manifest.v1+json", False: "application/json"}
        if isinstance(content, bytes) and b'"manifests"' in content:
            kinds[True] = "application/vnd.oci.image.index.v1+json"
        request.send_header("Content-Type", kinds[kind.endswith("/manifests")])
        size = content if isinstance(content, int) else len(content)
        if isinstance(content, int):
            request.send_header("Transfer-Encoding", "chunked")
        else:
            request.send_header("Content-Length", str(size))
        request.end_headers()
        if request.command == "HEAD":
            return
        if isinstance(content, bytes):
            request.wfile.write(content)
            return
        piece = bytes(1 << 20)
        with contextlib.suppress(OSError):
            for _ in range(0, size, len(piece)):
                request.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                self.sent += len(piece)
            request.wfile.write(b"0\r\n\r\n")


@contextlib.contextmanager
def breaking(port: int, after: int, times: int) -> Iterator[int]:
    """Listen on a port in front of another, and cut `times` connections after so many bytes of either side."""
    listener = socket.create_server(("127.0.0.1", 0))
    left = [times]

    def pump(source: socket.socket, target: socket.socket, count: list[int]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                count[0] += len(data)
                if count[0] > after and left[0] > 0:
                    left[0] -= 1
                    break
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server, count = socket.create_connection(("127.0.0.1", port)), [0]
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=pump, args=(*pair, count), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
