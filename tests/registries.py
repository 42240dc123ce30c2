"""Debian's docker-registry on this machine, and a connection to it that breaks."""

import contextlib
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

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
