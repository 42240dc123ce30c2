"""Caches that builds share: nginx as an HTTP cache on loopback."""

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_NGINX = """daemon off; master_process off;
pid {folder}/nginx.pid; error_log {folder}/nginx.err;
events {{ worker_connections 512; }}
http {{
  log_format sizes '$request_method $uri $status $request_length $bytes_sent';
  access_log {folder}/access.log sizes;
  client_body_temp_path {folder}/incoming; client_max_body_size 0;
  proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{
    listen 127.0.0.1:{port};
    location / {{ root {folder}/files; dav_methods PUT; create_full_put_path on; dav_access user:rw group:r all:r; }}
  }}
}}
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
    # Workers of a root's nginx are another user, who cannot go there.
    config.write_text(_NGINX.format(folder=folder, port=port))
    process = subprocess.Popen([program, "-c", config, "-p", folder, "-e", folder / "nginx.err"])
    try:
        for _ in range(100):
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield HttpCache(f"http://127.0.0.1:{port}", folder)
    finally:
        process.terminate()
        process.wait()
