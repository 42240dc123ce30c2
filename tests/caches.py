"""Caches that builds share, on loopback: nginx speaks HTTP, BuildGrid Bazel's gRPC protocol."""

import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.building import ROOT

# No process of a worker: that of a root's nginx is another user, who cannot go to the folder.
_NGINX = """daemon off; master_process off; user root; # else root would give its folders to others
pid {folder}/nginx.pid; error_log {folder}/nginx.err;
events {{ worker_connections 512; }}
http {{
  log_format sizes '$request_method $uri $status $request_length $bytes_sent';
  access_log {folder}/access.log sizes;
  client_body_temp_path {folder}/incoming;
  proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  {server}
}}
"""
_BUILDGRID = """server: [!channel {{address: "127.0.0.1:{port}", insecure-mode: true}}]
description: a cache
storages: [!disk-storage &files {{path: {folder}/files}}]
caches: [!lru-action-cache &results {{storage: *files, max-cached-refs: 10000, allow-updates: true}}]
instances:
  - name: ""
    services: [!action-cache {{cache: *results}}, !cas {{storage: *files}}, !bytestream {{storage: *files}}]
thread-pool-size: 100
"""
# Before it is started, it can be given other versions of the API to speak.
_START_BUILDGRID = """
import sys
from buildgrid.server import settings
settings.LOW_REAPI_VERSION, settings.HIGH_REAPI_VERSION = sys.argv.pop(1).split("-")
from buildgrid.server.app import cli
sys.exit(cli())
"""


@dataclass(frozen=True)
class Traffic:
    """What a cache was asked for. hits, misses: of actions. sent, received: bytes to and from Bazel, with headers."""

    hits: int
    misses: int
    sent: int
    received: int


@dataclass(frozen=True)
class HttpCache:
    """nginx, as docs/remote.md sets it up. url: for `--remote_cache`. folder: `files` in it has what is cached."""

    url: str
    folder: Path

    @property
    def actions(self) -> list[Path]:
        """The files of the results of actions, by name."""
        return sorted((self.folder / "files" / "ac").rglob("?*"))

    @property
    def blobs(self) -> list[Path]:
        """The files of the contents, by name, which is their sha256."""
        return sorted((self.folder / "files" / "cas").rglob("?*"))

    def traffic(self) -> Traffic:
        """Return what was asked since the last time."""
        log = self.folder / "access.log"
        lines = [line.split() for line in log.read_text().splitlines()]
        log.write_text("")
        asked = [status for method, path, status, *_ in lines if method == "GET" and re.search("/ac/", path)]
        sizes = [(int(received), int(sent)) for *_, received, sent in lines]
        hits = asked.count("200")
        return Traffic(hits, len(asked) - hits, sum(sent for _, sent in sizes), sum(received for received, _ in sizes))


def block(start: str) -> str:
    """Return the block of docs/remote.md or docs/remote-execution.md that begins with this text."""
    pages = "".join((ROOT / "docs" / name).read_text("utf-8") for name in ("remote.md", "remote-execution.md"))
    blocks = re.findall(r"^```text\n(.*?)^```$", pages, re.MULTILINE | re.DOTALL)
    return next(text for text in blocks if text.startswith(start))


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def http_cache(folder: Path) -> Iterator[HttpCache]:
    """Run nginx on loopback, with its files in a new folder."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if program is None:
        raise FileNotFoundError("there is no nginx (Debian: apt-get install nginx)")
    (folder / "files").mkdir(parents=True)
    port = free_port()
    config = folder / "nginx.conf"
    server = block("server {").replace("8080", f"127.0.0.1:{port}").replace("/srv/bazel-cache", f"{folder}/files")
    config.write_text(_NGINX.format(folder=folder, server=server))
    process = subprocess.Popen([program, "-c", config, "-p", folder, "-e", folder / "nginx.err"])
    with _served(process, port):
        yield HttpCache(f"http://127.0.0.1:{port}", folder)


@dataclass(frozen=True)
class GrpcCache:
    """BuildGrid's cache. url: for `--remote_cache`. folder: `files` in it has what is cached."""

    url: str
    folder: Path

    def blobs(self) -> list[bytes]:
        """Return all contents, and results of actions."""
        return [path.read_bytes() for path in (self.folder / "files").rglob("*") if path.is_file()]


def install_buildgrid(packages: Path) -> None:
    """Install BuildGrid and what it imports into a new folder."""
    lock = ROOT / "tools" / "engine" / "requirements.lock"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--require-hashes"]
    subprocess.run([*install, "--target", packages, "-r", lock], check=True)


@contextmanager
def grpc_cache(folder: Path, packages: Path, versions: str = "2.0.0-2.2.0") -> Iterator[GrpcCache]:
    """Run BuildGrid's cache on loopback, with its files in a new folder.

    packages: where `install_buildgrid` has installed it. versions: of the API, from and to.
    """
    folder.mkdir()
    config, port = folder / "buildgrid.yml", free_port()
    config.write_text(_BUILDGRID.format(folder=folder, port=port))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-s", "-c", _START_BUILDGRID, versions, "server", "start", config],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(packages)},
            stdout=log,
            stderr=log,
        )
        with _served(process, port):
            yield GrpcCache(f"grpc://127.0.0.1:{port}", folder)


@contextmanager
def _served(process: subprocess.Popen[bytes], port: int) -> Iterator[None]:
    """Wait until a server listens, and end it afterwards."""
    try:
        for _ in range(1200):
            with socket.socket() as one:
                if process.poll() is not None or one.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        assert process.poll() is None, f"{process.args!r} ended with status {process.returncode}"
        yield
    finally:
        process.terminate()
        process.wait()
