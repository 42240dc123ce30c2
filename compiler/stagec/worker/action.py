"""A forked action, from the worker's view: its output, and its end."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
from collections.abc import Sequence

from stagec.worker.place import Place
from stagec.worker.protocol import Requests

_SHOWN = 1 << 19
"""The most bytes of an action's output to show. Bazel shows nothing of a MiB or more."""
_SAID = 1 << 16
ENDED = struct.Struct("iq")
"""The template's report on an action: the status of waitpid, and the most memory that it used, in KiB."""


class Action:
    """The process of an action. Nothing that it says or leaves is believed: it may be the model that speaks."""

    def __init__(
        self, template: socket.socket, arguments: Sequence[str], place: Place, namespaces: Sequence[int]
    ) -> None:
        """Have the template fork. arguments: of the command. place, namespaces: of `Isolation.action`."""
        self._template = template
        self._printed, self._word = _Pipe(_SHOWN), _Pipe(_SAID)
        request = os.memfd_create("request")
        with open(request, "w", closefd=False, encoding="utf-8") as file:
            json.dump({"arguments": arguments, "place": place}, file)
        os.lseek(request, 0, os.SEEK_SET)
        socket.send_fds(template, [b"1"], [request, self._printed.end, self._word.end, *namespaces])
        for descriptor in (request, self._printed.end, self._word.end):
            os.close(descriptor)

    def is_cancelled(self, requests: Requests) -> bool:
        """Wait until the process has ended: False. True when Bazel cancels the request, or is gone, before."""
        more = False
        while not requests.cancelled(more):
            pipes = [pipe for pipe in (self._printed, self._word) if pipe.open]
            wanted: list[socket.socket | Requests | _Pipe] = [self._template, requests, *pipes]
            ready, _, _ = select.select(wanted, [], [])
            if self._template in ready:
                return False
            for pipe in pipes:
                if pipe in ready:
                    pipe.read()
            more = requests in ready
        return True

    def end(self, folder: str) -> Ended:
        """Wait for the end of the process; its descendants must be dead. folder: the execution root."""
        message = self._template.recv(ENDED.size, socket.MSG_WAITALL)
        if len(message) < ENDED.size:
            raise RuntimeError("the process that imports packages died")
        how, kibibytes = ENDED.unpack(message)
        return Ended(how, kibibytes * 1024, self._printed.rest(), self._word.rest(), [folder])


class Ended:
    """How an action ended.

    status: the exit status of its command; None if the process ended in the middle of its work.
    output: its output, and the undeclared files that it looked for. memory: the most bytes that it used.
    """

    def __init__(self, how: int, memory: int, printed: bytes, word: bytes, folders: Sequence[str]) -> None:
        """how: waitpid's status. word: the action's own report. folders: possible places of undeclared files."""
        self._how = how
        self.memory = memory
        self.output = printed.decode("utf-8", "replace")
        self.status = None
        try:
            said = json.loads(word)
        except (ValueError, RecursionError):
            return
        status, missed = (said.get(name) for name in ("status", "missed")) if isinstance(said, dict) else (None, None)
        if how == 0 and isinstance(status, int) and 0 <= status < 256:
            self.status = status
        if self.status and isinstance(missed, list):
            paths = _undeclared([path for path in missed if isinstance(path, str)], folders)
            self.output += "".join(map(_HINT.format, paths))

    def death(self, seconds: float) -> str:
        """Describe the end of the process in the middle of its work, after `seconds`."""
        if os.WIFSIGNALED(self._how):
            number = os.WTERMSIG(self._how)
            why = signal.strsignal(number) or "unknown"
            if number == signal.SIGKILL:
                why += ", most likely because the machine has no memory left"
            how = f"the process of this action died of {_signal_name(number)} ({why})"
        else:
            how = f"the process of this action ended with exit({os.WEXITSTATUS(self._how)}) in the middle of its work"
        return f"stagec: {how} after {seconds:.1f} s; it had used {mebibytes(self.memory)} of memory\n"


def mebibytes(size: int) -> str:
    """Say a number of bytes."""
    return f"{size / (1 << 20):,.0f} MiB"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # only the first and the last realtime signal have names
        return f"signal {number}"


_HINT = "{} is not an input of this action\n  name it in deps, or in data where it is read\n"


def _undeclared(missed: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Return those that are files of `folders`, and the absolute paths, among those that were opened in vain."""
    # Do not look at absolute paths: on some machines, a look-up of a name asks a server in the network.
    return sorted(
        path
        for path in set(missed)
        if path.startswith("/")
        or (".." not in path.split("/") and any(os.path.isfile(f"{folder}/{path}") for folder in folders))
    )


class _Pipe:
    """The output of an action; only its end is kept. end: the descriptor that the action writes to."""

    def __init__(self, kept: int) -> None:
        self._descriptor, self.end = os.pipe()
        self._kept = kept
        self._data = bytearray()
        self._left_out = 0
        self.open = True

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> None:
        """Wait for more."""
        more = os.read(self._descriptor, 1 << 16)
        self.open = bool(more)
        self._data += more
        if len(self._data) > 2 * self._kept:
            self._left_out += len(self._data) - self._kept
            del self._data[: -self._kept]

    def rest(self) -> bytes:
        """Wait for what is left until all have closed the other end, and return the end of all."""
        while self.open:
            self.read()
        os.close(self._descriptor)
        left_out = self._left_out + max(0, len(self._data) - self._kept)
        start = f"... {left_out:,} bytes are not shown ...\n".encode() if left_out else b""
        return start + bytes(self._data[-self._kept :])
