"""A fork that does the work of actions, from the worker's view: its output, and its end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
from collections.abc import Mapping, Sequence

from stagec.worker.jail import Jail
from stagec.worker.protocol import Requests

_SHOWN = 1 << 19
"""The most bytes of an action's output to show. Bazel shows nothing of a MiB or more."""
_SAID = _READ = 1 << 16
ENDED = struct.Struct("iq")
"""The template's report on a fork: the status of waitpid, and the most memory that it used, in KiB."""


class Process:
    """A fork. Nothing that it says or leaves is believed: it may be the model that speaks."""

    def __init__(self, template: socket.socket, jail: Jail, namespaces: Sequence[int], for_series: bool) -> None:
        """Have the template fork.

        jail, namespaces: of `Namespaces.action`. for_series: whether it does the work of several actions, not of one.
        """
        self._template, self._jail, self._for_series = template, jail, for_series
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._hears, self._word = True, b""
        self._printed: _Pipe | None = None
        with theirs:
            socket.send_fds(template, [b"1"], [theirs.fileno(), *namespaces])

    def start(self, arguments: Sequence[str], copies: Mapping[str, bytes]) -> None:
        """Let it begin an action. arguments: of the command. copies: files that it writes there before, by path."""
        self._printed, self._word = _Pipe(_SHOWN), b""
        sizes = [(path, len(content)) for path, content in copies.items()]
        asked = {"arguments": arguments, "jail": self._jail, "copies": sizes, "goes_on": self._for_series}
        request = os.memfd_create("request")
        with open(request, "wb", closefd=False) as file:
            file.writelines([json.dumps(asked).encode(), b"\n", *copies.values()])
        os.lseek(request, 0, os.SEEK_SET)
        with contextlib.suppress(OSError):  # it may be dead: the template says so
            socket.send_fds(self._connection, [b"1"], [request, self._printed.end])
        for descriptor in (request, self._printed.end):
            os.close(descriptor)

    def is_cancelled(self, requests: Requests) -> bool:
        """Wait until the action has ended: False. True when Bazel cancels the request, or is gone, before.

        An action ends with its process, and in a series with its report.
        """
        more = False
        while not requests.cancelled(more):
            wanted: list[socket.socket | Requests | _Pipe] = [self._template, requests]
            wanted += [self._printed] if self._printed and self._printed.open else []
            wanted += [self._connection] if self._hears else []
            ready, _, _ = select.select(wanted, [], [])
            if self._template in ready:
                return False
            if self._printed and self._printed in ready:
                self._printed.read()
            if self._connection in ready:
                self._hear()
                if self._word and self._for_series:
                    return False
            more = requests in ready
        return True

    def reported(self, folder: str) -> Ended | None:
        """Return how an action of a series ended; None if its process did. folder: the execution root."""
        if not (self._for_series and self._word and self._printed):
            return None
        printed, self._printed = self._printed.so_far(), None
        return Ended(0, None, printed, self._word, [folder])

    def is_dead(self) -> bool:
        """Return whether the process has ended."""
        return bool(select.select([self._template], [], [], 0)[0])

    def end(self, folder: str) -> Ended:
        """Wait for the end of the process; its descendants must be dead. folder: the execution root."""
        message = self._template.recv(ENDED.size, socket.MSG_WAITALL)
        if len(message) < ENDED.size:
            raise RuntimeError("the process that imports packages died")
        how, kibibytes = ENDED.unpack(message)
        while self._hears:
            self._hear()
        self._connection.close()
        printed = self._printed.rest() if self._printed else b""
        return Ended(how, kibibytes * 1024, printed, self._word, [folder])

    def _hear(self) -> None:
        """Wait for its report; only the last is kept."""
        try:
            word = self._connection.recv(_SAID)
        except OSError:  # it died before it had read what it was asked for
            word = b""
        self._hears = bool(word)
        self._word = word or self._word


class Ended:
    """How an action ended.

    status: the exit status of its command; None if the process ended in the middle of its work.
    output: its output, and the undeclared files that it looked for. memory: the most bytes that it used.
    """

    def __init__(self, how: int, memory: int | None, printed: bytes, word: bytes, folders: Sequence[str]) -> None:
        """how: waitpid's status. memory: None for that of the report. word: the action's own report.

        folders: possible folders of undeclared files.
        """
        self._how = how
        self.memory = memory or 0
        self.output = printed.decode("utf-8", "replace")
        self.status = None
        try:
            said = json.loads(word)
        except (ValueError, RecursionError):
            return
        names = ("status", "missed", "memory")
        status, missed, kibibytes = map(said.get, names) if isinstance(said, dict) else (None, None, None)
        if memory is None and isinstance(kibibytes, int):
            self.memory = kibibytes * 1024
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
        return f"stagec: {how} after {seconds:.1f} s; it had used {self.memory / (1 << 20):,.0f} MiB of memory\n"


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
        more = os.read(self._descriptor, _READ)
        self.open = bool(more)
        self._data += more
        if len(self._data) > 2 * self._kept:
            self._left_out += len(self._data) - self._kept
            del self._data[: -self._kept]

    def so_far(self) -> bytes:
        """Return the end of all that was written; another process may have the other end, and write on."""
        for _ in range(self._kept // _READ):
            if self.open and select.select([self], [], [], 0)[0]:
                self.read()
        return self._end()

    def rest(self) -> bytes:
        """Wait for what is left until all have closed the other end, and return the end of all."""
        while self.open:
            self.read()
        return self._end()

    def _end(self) -> bytes:
        os.close(self._descriptor)
        left_out = self._left_out + max(0, len(self._data) - self._kept)
        start = f"... {left_out:,} bytes are not shown ...\n".encode() if left_out else b""
        return start + bytes(self._data[-self._kept :])
