"""Who may talk to a server: certificates of both protocols, and tokens. Files that change are read again."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    """The server's certificate with its key, and the one that must have signed those of clients."""

    def __init__(self, certificate: str, key: str, clients: str = "") -> None:
        """Take files in PEM. clients: "": clients need no certificate. Raises StagecError if they are not that."""
        self._files, self._clients = (certificate, key), clients
        self._known, self._changes = [identity(file) for file in self._files], 0
        try:
            self._roots = Path(clients).read_bytes() if clients else None
            self._check()
        except OSError as error:  # and of ssl
            raise mistake(f"{' and '.join(self._files)}: not a certificate and its key in PEM: {error}") from None
        try:
            if clients:
                ssl.create_default_context(cafile=clients)
        except OSError as error:
            raise mistake(f"{clients}: not certificates in PEM: {error}") from None

    def _check(self) -> None:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files)

    def of_uvicorn(self) -> dict[str, Any]:
        """Return the options of uvicorn."""
        needed = {"ssl_ca_certs": self._clients, "ssl_cert_reqs": ssl.CERT_REQUIRED} if self._clients else {}
        return {"ssl_certfile": self._files[0], "ssl_keyfile": self._files[1], **needed}

    def of_grpc(self) -> Any:
        """Return the credentials of a server of gRPC."""
        import grpc

        known = self._changes

        def read() -> Any:
            certificate, key = (Path(file).read_bytes() for file in self._files)
            return grpc.ssl_server_certificate_configuration([(key, certificate)], self._roots)

        def changed() -> Any:
            nonlocal known
            if known == self._changes:
                return None
            known = self._changes
            return read()

        return grpc.dynamic_ssl_server_credentials(read(), changed, bool(self._clients))

    async def keep(self, context: ssl.SSLContext) -> None:
        """Use new files for new connections when they are there, until this is cancelled."""
        while True:
            await asyncio.sleep(LOOK)
            now = [identity(file) for file in self._files]
            if now == self._known:
                continue
            try:
                self._check()
                context.load_cert_chain(*self._files)
                self._changes += 1
                _LOG.info("the certificate is that of a new file")
            except OSError as error:
                _LOG.error("the certificate stays as it is: %s", error)
            self._known = now


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
