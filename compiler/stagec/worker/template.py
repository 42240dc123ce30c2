"""The process that imports what a command needs, once, and forks for every action.

It is where the worker started it (jail.py), and each fork enters the jail of its action before it does anything.
It imports packages and the compiler, never a model, and starts no XLA client: a fork after that would wait for threads
that it does not have. So a fork starts with what a new process has after its imports, and what it does is gone when it
has ended. It does the work of one action, or of a series (server.py).
"""

from __future__ import annotations

import functools
import gc
import json
import os
import shutil
import socket
from collections.abc import Callable, Sequence

from stagec.worker import syscalls, work
from stagec.worker.action import ENDED
from stagec.worker.jail import Jail

_NAMESPACES = 2


def serve(descriptor: int, prepare: Callable[[], object], run: Callable[[Sequence[str]], int]) -> int:
    """Fork for each request of the worker, until it closes the connection; return the exit status.

    descriptor: of the connection. prepare: imports. run: does what arguments of the command say; returns a status.
    """
    connection = socket.socket(fileno=descriptor)
    # What is imported is never looked at for garbage, neither here nor in forks: that takes a tenth of the time that
    # importing JAX takes, and copies pages that all share (https://docs.python.org/3/library/gc.html#gc.freeze).
    gc.disable()
    prepare()
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("what was imported started threads: forks would wait for them")
    gc.freeze()
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1, 1 + _NAMESPACES)
        if not message:
            return 0
        requests, *namespaces = descriptors
        if namespaces:
            syscalls.setns(namespaces[0], syscalls.CLONE_NEWPID)
        child = os.fork()
        if not child:
            try:
                _Process(socket.socket(fileno=requests), namespaces[1:], run).serve()
            finally:  # whatever the model did to stdout
                os._exit(0)
        if namespaces:
            syscalls.setns(own, syscalls.CLONE_NEWPID)
        for descriptor in descriptors:
            os.close(descriptor)
        _, how, usage = os.wait4(child, 0)
        connection.sendall(ENDED.pack(how, usage.ru_maxrss))


class _Process:
    """A fork. It works in the jail of its first action. What an action prints goes to a descriptor of the action's."""

    def __init__(self, requests: socket.socket, namespaces: Sequence[int], run: Callable[[Sequence[str]], int]) -> None:
        self._requests, self._namespaces, self._run = requests, namespaces, run
        self._jail: Jail | None = None
        self._goes_on = False
        self._missed = set[str]()

    def serve(self) -> None:
        """Run the actions that the worker asks for, one after the other, and report on each; return after the last."""
        while True:
            _, descriptors, _, _ = socket.recv_fds(self._requests, 1, 2)
            if not descriptors:
                return
            request, printed = descriptors
            for descriptor in (1, 2):
                os.dup2(printed, descriptor)
            os.close(printed)
            self._requests.send(work.report(functools.partial(self._act, request), self._missed))
            if not self._goes_on:
                return
            # XLA's client for the last action, with its threads and 12 MB, is in a cycle. Nobody waits for this.
            gc.collect()

    def _act(self, request: int) -> int:
        with open(request, "rb") as file:
            asked, contents = json.loads(file.readline()), file.read()
        self._goes_on = asked["goes_on"]
        if self._jail is None:
            self._enter(Jail(*asked["jail"]))
        else:
            _clear()
        start = 0
        for path, size in asked["copies"]:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(path, "wb") as copy:
                copy.write(contents[start : start + size])
            start += size
        return self._run(asked["arguments"])

    def _enter(self, jail: Jail) -> None:
        gc.enable()
        self._jail = jail
        jail.enter(self._namespaces, self._requests.fileno())
        if jail.working is not None:
            work.note_missed(self._missed, jail.working, elsewhere=True)
        work.tell_crashes()


def _clear() -> None:
    """Remove what the last action left in the working directory."""
    with os.scandir() as entries:
        for entry in list(entries):
            shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)
