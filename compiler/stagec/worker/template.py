"""The process that imports what a command needs, once, and forks for every action.

It is where the worker started it (place.py), and each fork enters the place of its action before it does anything.
It imports packages and the compiler, never a model, and starts no XLA client: a fork after that would wait for threads
that it does not have. So an action starts with what a new process has after its imports, and what it does is gone when
it has ended.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import socket
from collections.abc import Callable, Sequence

from stagec.worker import confinement, syscalls, work
from stagec.worker.action import ENDED
from stagec.worker.place import Place, keep_open

_DESCRIPTORS = 6


def serve(descriptor: int, prepare: Callable[[], object], run: Callable[[Sequence[str]], int]) -> int:
    """Fork for each request of the worker, until it closes the connection; return the exit status.

    descriptor: of the connection. prepare: imports. run: does what arguments of the command say; returns a status.
    """
    connection = socket.socket(fileno=descriptor)
    confinement.renounce()
    # What is imported is never looked at for garbage, neither here nor in forks: that takes a tenth of the time that
    # importing JAX takes, and copies pages that all share (https://docs.python.org/3/library/gc.html#gc.freeze).
    gc.disable()
    prepare()
    confinement.prepare()
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("what was imported started threads: forks would wait for them")
    gc.freeze()
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1, _DESCRIPTORS)
        if not message:
            return 0
        request, printed, said, *namespaces = descriptors
        if namespaces:
            syscalls.setns(namespaces[0], syscalls.CLONE_NEWPID)
        child = os.fork()
        if not child:
            work.do(said, functools.partial(_act, request, printed, namespaces[1:], said, run))
        if namespaces:
            syscalls.setns(own, syscalls.CLONE_NEWPID)
        for descriptor in descriptors:
            os.close(descriptor)
        _, how, usage = os.wait4(child, 0)
        connection.sendall(ENDED.pack(how, usage.ru_maxrss))


def _act(
    request: int,
    printed: int,
    namespaces: Sequence[int],
    said: int,
    run: Callable[[Sequence[str]], int],
    missed: set[str],
) -> int:
    """Run an action in this process. It prints into one descriptor and keeps `said`."""
    gc.enable()
    for descriptor in (1, 2):
        os.dup2(printed, descriptor)
    with open(request, encoding="utf-8") as file:
        asked = json.load(file)
    place = Place(*asked["place"])
    place.enter(namespaces)
    keep_open(said)
    if place.working is not None:
        os.chdir(place.working)
    confinement.confine(place.written, place.read, place.group is not None)
    if place.working is not None:
        work.note_missed(missed, place.working, elsewhere=True)
    work.tell_crashes()
    return run(asked["arguments"])
