"""A line on the terminal while a command works for long. Where stderr is not a terminal, there is none."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Self

_FIRST = 0.5  # seconds without a line: most commands are over before
_EVERY = 1.0


class Progress:
    """Show on stderr the current step, the number of steps and the seconds: a line that disappears at the end.

    command: the word before it. total: how many steps there will be; 0: nobody knows. Use it in a `with` statement; a
    thread writes the line, so that the seconds go on while a step computes.
    """

    def __init__(self, command: str, total: int = 0) -> None:
        self._command, self.total = command, total
        self._done, self._what = 0, ""
        self._since = time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            self._thread = threading.Thread(target=self._show, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread:
            self._thread.join()

    def step(self, what: str) -> None:
        """Begin a step."""
        self._done, self._what = self._done + 1, what

    def line(self) -> str:
        """Return the present content of the line."""
        of = f" of {self.total}" if self.total else ""
        count = f" {self._done}{of}" if self._done and self.total != 1 else ""
        minutes, seconds = divmod(int(time.monotonic() - self._since), 60)
        return f"{self._command}{count}  {self._what}  {minutes}:{seconds:02}"

    def _show(self) -> None:
        wait = _FIRST
        while not self._over.wait(wait):
            wait = _EVERY
            width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            self._write(self.line()[: width - 1])
        if wait != _FIRST:
            self._write("")

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()
