"""The process that imports what a command needs, once, and forks for every action.

It runs in namespaces of the worker's (isolation.py), and each fork enters those of its action before it does anything.
It imports packages and the compiler, never a model, and starts no XLA client: a fork after that would wait for threads
that it does not have. So an action starts with what a new process has after its imports, and what it does is gone when
it has ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from stagec.worker import confinement, syscalls
from stagec.worker.action import ENDED
from stagec.worker.isolation import enter, keep_open
from stagec.worker.root import FOLDER, WORKING

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
    confinement.program()  # made once for all
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("what was imported started threads: forks would wait for them")
    gc.freeze()
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1, _DESCRIPTORS)
        if not message:
            return 0
        request, printed, said, processes, *namespaces = descriptors
        syscalls.setns(processes, syscalls.CLONE_NEWPID)
        child = os.fork()
        if not child:
            _work(request, printed, said, namespaces, run)
        syscalls.setns(own, syscalls.CLONE_NEWPID)
        for one in descriptors:
            os.close(one)
        _, how, usage = os.wait4(child, 0)
        connection.sendall(ENDED.pack(how, usage.ru_maxrss))


def _work(
    request: int, printed: int, said: int, namespaces: Sequence[int], run: Callable[[Sequence[str]], int]
) -> NoReturn:
    """Do an action in this process, print into one descriptor and say on another how it ended."""
    gc.enable()
    status, missed = 1, set[str]()
    try:
        for descriptor in (1, 2):
            os.dup2(printed, descriptor)
        with open(request, encoding="utf-8") as file:
            asked = json.load(file)
        os.setsid()
        enter(namespaces)
        keep_open(said)
        if namespaces:
            os.chdir(WORKING)
            _note(missed)
        confinement.confine(asked["written"])
        faulthandler.enable()  # where it died is worth knowing
        status = run(asked["arguments"])
    except SystemExit as error:  # argparse
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - it is reported, and 1 is the status
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(said, json.dumps({"status": status, "missed": sorted(missed)}).encode())
        finally:  # whatever the model did to stdout
            os._exit(0)


_MOST = 100
_OF_THE_MACHINE = (FOLDER, "/dev/", "/etc/", "/proc/", "/sys/", "/tmp/", "/usr/", "/var/")


def _note(missed: set[str]) -> None:
    """Have a set get what this process wants to read or import, in vain: paths relative to WORKING, or absolute ones.

    Not those that programs look for on any machine.
    """

    def look(path: str) -> None:
        if os.path.lexists(path) or len(missed) >= _MOST:
            return
        if path.startswith(f"{WORKING}/"):
            missed.add(path.removeprefix(f"{WORKING}/"))
        elif not path.startswith((*_OF_THE_MACHINE, *sys.path)):
            missed.add(path)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        with contextlib.suppress(OSError):  # the working directory may be gone
            if event == "open" and isinstance(arguments[0], str) and not arguments[2] & os.O_CREAT:
                path = os.path.abspath(arguments[0])
                if os.path.isabs(arguments[0]) or path.startswith(f"{WORKING}/"):  # else the model went elsewhere
                    look(path)
            elif event == "import":
                for entry in sys.path:
                    if entry.startswith(WORKING):
                        module = os.path.normpath(f"{entry}/{arguments[0].replace('.', '/')}")
                        look(f"{module}.py")
                        look(f"{module}/__init__.py")

    sys.addaudithook(hook)
