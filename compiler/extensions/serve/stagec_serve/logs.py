"""The log of a server: lines that no request waits for, equal ones not without end, and one for each request."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import TextIO

_MOST_WAITING = 10_000
"""Lines that nobody has read yet; more are dropped and counted."""
_MOST_ALIKE, _SECONDS, _MOST_KINDS = 20, 10.0, 1000
"""Messages of one kind in so many seconds; more are counted. And kinds that are counted."""
_LAST = 1.0
"""Seconds in which what is left is written when the process ends."""
FIELDS = ("status", "ms", "client", "request_id", "id", "trace", "model", "rows", "batch")
"""What the line of a request has, in this order, where it is known. `docs/serving.md` says what each is."""
_LONGEST = 200
REQUESTS = logging.getLogger("stagec_serve.access")
"""The log of requests, which it logs if its level is INFO."""
_noted: ContextVar[dict[str, object] | None] = ContextVar("noted", default=None)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        table = {"time": record.created, "level": record.levelname, "logger": record.name}
        table |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            table["traceback"] = self.formatException(record.exc_info)
        return json.dumps(table)


class Alike(logging.Filter):
    """Lets so many messages of one kind pass, and then says how many were left out.

    Of one kind are those with the same text before their arguments are put in.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a message is logged."""
        if record.name == REQUESTS.name:
            return True
        kind, now = (record.name, str(record.msg)), time.monotonic()
        with self._lock:
            since, count = self._counts.pop(kind, (now, 0))
            if now - since > _SECONDS:
                if count > _MOST_ALIKE:
                    record.msg = f"{record.getMessage()} ({count - _MOST_ALIKE:,} more like this were not logged)"
                    record.args = ()
                since, count = now, 0
            self._counts[kind] = since, count + 1
            if len(self._counts) > _MOST_KINDS:
                self._counts.pop(next(iter(self._counts)))
        return count < _MOST_ALIKE


class Handler(logging.Handler):
    """Writes lines in a thread of its own: where nobody reads them, they are dropped, and the server goes on."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream, self._dropped = stream, 0
        self._lines: queue.Queue[str] = queue.Queue(_MOST_WAITING)
        threading.Thread(target=self._write, name="stagec-log", daemon=True).start()
        atexit.register(self.flush)

    def emit(self, record: logging.LogRecord) -> None:
        """Take a message."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1
        except Exception:  # noqa: BLE001  # as the handlers of Python
            self.handleError(record)

    def flush(self) -> None:
        """Wait for a moment until all lines are written."""
        deadline = time.monotonic() + _LAST
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            dropped, self._dropped = self._dropped, 0
            try:
                if dropped:
                    what = f"{dropped:,} messages were dropped: nobody read the log"
                    record = logging.LogRecord(__name__, logging.WARNING, "", 0, what, None, None)
                    line = f"{self.format(record)}\n{line}"
                self._stream.write(f"{line}\n")
                if self._lines.empty():
                    self._stream.flush()
            except (OSError, ValueError):  # nobody reads it any more
                pass
            finally:
                self._lines.task_done()


def log_to(stream: TextIO, as_json: bool, requests: bool = False) -> None:
    """Write the messages of Python's loggers there.

    as_json: an object a line, with time (in seconds since 1970), level, logger, message, and traceback of an exception.
    requests: whether there is a line for each request, too; of the JSON it has the fields, and no message.
    """
    handler = Handler(stream)
    handler.setFormatter(_Json() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(Alike())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    REQUESTS.setLevel(logging.INFO if requests else logging.WARNING)


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
    if not REQUESTS.isEnabledFor(logging.INFO):
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
        REQUESTS.info("%s%s", _shown(what), text, extra={"fields": {"request": _short(what), **fields}})


def _short(value: object) -> object:
    return value[:_LONGEST] if isinstance(value, str) else value


def _shown(value: object) -> str:
    """Return a value in a form that cannot look like another field, or another line."""
    text = str(_short(value))
    return text if re.fullmatch(r"[\w.:/+\[\]%-]+( /[\w.:/+%-]*)?", text, re.ASCII) else ascii(text)
