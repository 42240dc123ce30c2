"""Who may talk to a server: certificates of both protocols, and tokens. Files that change are read again."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import ssl
from collections.abc import Mapping
from pathlib import Path

from stagec.core.messages.errors import StagecError, mistake
from stagec_serve.refusal import RequestError

LOOK = 1
"""Seconds between two looks at a file that is watched."""
_LOG = logging.getLogger("stagec_serve")
_SHORTEST = 16


def identity(path: str) -> tuple[int, ...] | None:
    """Return numbers that change when a file is replaced; None if there is no file."""
    try:
        file = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return file.st_dev, file.st_ino, file.st_mtime_ns, file.st_size


class Certificates:
    """The server's certificate with its key, and the one that must have signed those of clients.

    Both protocols use the bytes that were checked: the files may be others a moment later.

    context: of HTTP. New connections have the certificate that it has by then.
    pair: the certificate and its key. roots: who must have signed those of clients; None: they need none.
    """

    def __init__(self, certificate: str, key: str, clients: str = "") -> None:
        """Take files in PEM. clients: "": clients need no certificate. Raises StagecError if they are not that."""
        self._files = certificate, key
        self._known = [identity(file) for file in self._files]
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            self.pair = self._read()
            _load(self.context, self.pair)
        except OSError as error:  # and of ssl
            raise mistake(f"{' and '.join(self._files)}: not a certificate and its key in PEM: {error}") from None
        self.roots: bytes | None = None
        if clients:
            try:
                self.roots = Path(clients).read_bytes()
                self.context.load_verify_locations(cadata=self.roots.decode("ascii"))
            except (OSError, ValueError) as error:
                raise mistake(f"{clients}: not certificates in PEM: {error}") from None
            self.context.verify_mode = ssl.CERT_REQUIRED

    def _read(self) -> tuple[bytes, bytes]:
        certificate, key = (Path(file).read_bytes() for file in self._files)
        _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), (certificate, key))
        return certificate, key

    async def keep(self) -> None:
        """Use new files for new connections when they are there, until this is cancelled."""
        while True:
            await asyncio.sleep(LOOK)
            now = [identity(file) for file in self._files]
            if now == self._known:
                continue
            try:
                self.pair = self._read()
                _load(self.context, self.pair)
                _LOG.info("the certificate is that of a new file")
            except OSError as error:
                _LOG.error("the certificate stays as it is: %s", error)
            self._known = now


def _load(context: ssl.SSLContext, pair: tuple[bytes, bytes]) -> None:
    """Let a context have a certificate and its key. OpenSSL reads files: these are in memory. Raises OSError."""
    with contextlib.ExitStack() as opened:
        paths = []
        for data in pair:
            file = opened.enter_context(open(os.memfd_create("stagec"), "wb"))  # noqa: PTH123
            file.write(data)
            file.flush()
            paths.append(f"/proc/self/fd/{file.fileno()}")
        context.load_cert_chain(*paths)


class Tokens:
    """Secrets of which each request must have one, as `Authorization: Bearer TOKEN`."""

    def __init__(self, file: str) -> None:
        """Read a file with a token on each line. Raises StagecError."""
        self._file, self._known = file, identity(file)
        self._tokens = self._read()

    def _read(self) -> list[bytes]:
        try:
            tokens = Path(self._file).read_bytes().split()
        except OSError as error:
            raise mistake(f"{self._file}: cannot be read: {error.strerror}") from None
        if not tokens or min(map(len, tokens)) < _SHORTEST:
            write = "write for example what `openssl rand -hex 32` prints"
            raise mistake(f"{self._file}: expected tokens of {_SHORTEST} characters or more, one a line", write)
        return tokens

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise RequestError ("token") for a request without one. headers: with names in lower case."""
        if (now := identity(self._file)) != self._known:
            self._known = now
            try:
                self._tokens = self._read()
            except StagecError as error:
                _LOG.error("the tokens stay as they are: %s", error)
        kind, _, given = headers.get("authorization", "").partition(" ")
        data = given.strip().encode("utf-8", "replace")
        if kind.lower() != "bearer" or not any(hmac.compare_digest(data, token) for token in self._tokens):
            raise RequestError("token", "the request has no token that the server knows: Authorization: Bearer TOKEN")
