"""The access log: one line for each request, with what the server learned about it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

LOGGER = "stagec_serve.access"
"""The logger's name. It logs if its level is INFO."""
FIELDS = ("status", "ms", "client", "request_id", "id", "trace", "model", "rows", "batch")
"""What a line has, in this order, where it is known. `docs/serving.md` says what each is."""
_LONGEST = 200
_LOG = logging.getLogger(LOGGER)
_noted: ContextVar[dict[str, object] | None] = ContextVar("noted", default=None)


def note(**fields: object) -> None:
    """Add to the line of the request that is under way; no-op if there is none."""
    if noted := _noted.get():
        noted.update(fields)


@contextlib.contextmanager
def request(what: str, client: str, headers: Mapping[str, str]) -> Iterator[str]:
    """Log a line when a block ends; yield the id of the request, "" if it has none.

    what: method and path. client: its address. headers: with names in lower case.
    """
    given = headers.get("x-request-id", "")[:_LONGEST]
    given = given if given.isascii() and given.isprintable() else ""
    if not _LOG.isEnabledFor(logging.INFO):
        yield given
        return
    began, request_id = time.monotonic(), given or os.urandom(8).hex()
    trace = re.match(r"[0-9a-f]{2}-([0-9a-f]{32})-", headers.get("traceparent", ""))
    noted: dict[str, object] = {"client": client, "request_id": request_id, "trace": trace and trace[1]}
    token = _noted.set(noted)
    try:
        yield request_id
    finally:
        _noted.reset(token)
        noted["ms"] = round((time.monotonic() - began) * 1000, 3)
        fields = {name: _short(noted[name]) for name in FIELDS if noted.get(name) not in (None, "")}
        text = "".join(f" {name}={_shown(value)}" for name, value in fields.items())
        _LOG.info("%s%s", _shown(what), text, extra={"fields": {"request": _short(what), **fields}})


def _short(value: object) -> object:
    return value[:_LONGEST] if isinstance(value, str) else value


def _shown(value: object) -> str:
    """Return a value in a form that cannot look like another field, or another line."""
    text = str(_short(value))
    return text if re.fullmatch(r"[\w.:/+\[\]%-]+( /[\w.:/+%-]*)?", text, re.ASCII) else ascii(text)
