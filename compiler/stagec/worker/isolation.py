"""Choose the best isolation of actions that this system allows a worker.

There are two, for neither keeps every promise of docs/security.md everywhere. Most containers allow no namespaces; and
without them, Landlock does not know the names of files, command lines of processes and, before Linux 6.12, signals, and
some kernels do not have it. To make a jail with namespaces takes 6 ms of an export's 270, and one without them 18 ms.
Compilations have the same jails: they run no code of a model, but XLA reads a file that a model's action wrote, and
one process compiles a series.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence

from stagec.worker import filters, syscalls
from stagec.worker.group import Group
from stagec.worker.jail import LONGEST, end_with, said
from stagec.worker.namespaces import Namespaces
from stagec.worker.root import BELOW

Isolation = Namespaces | Group
"""The isolation of the actions of this process, the worker. Both have the same methods, with the same meaning."""


def begin(words: Sequence[str], in_place: bool) -> tuple[Isolation, socket.socket, Sequence[str]]:
    """Isolate this process (a child of the called one) from here on, and start a template.

    words, in_place: as `Namespaces.start` has them. Returns the isolation, the connection of the template, and the
    system's refusal of a better isolation. Raises OSError if the system lets it do so in no way.
    """
    if not filters.exists():
        raise OSError(0, f"no filter of system calls for {os.uname().machine}")
    problems: list[str] = []
    # The better means first. No key depends on the choice, so machines that isolate in other ways share a cache.
    for kind in (Namespaces, Group):
        problem, tells = os.pipe()
        child = os.fork()  # a failed attempt may have worked in part
        if not child:
            os.close(problem)
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
            try:
                isolation: Isolation = kind()
                template = isolation.start(words, in_place)
            except OSError as error:
                os.write(tells, said(error).encode())
                sys.exit(1)
            os.close(tells)
            gc.freeze()  # the collector ignores present objects, so they stay in memory that all children share
            return isolation, template, problems
        os.close(tells)
        text = os.read(problem, LONGEST)
        os.close(problem)
        if not text:
            end_with(child)
        os.waitpid(child, 0)
        problems.append(text.decode())
    raise OSError(0, ", ".join(problems))


def tell() -> None:
    """Isolate an action that does nothing; print the limits of the isolation, if any, or exit with the failure."""
    try:
        isolation, template, refused = begin(["-c", "import os, sys; os.read(int(sys.argv[1]), 1)"], in_place=False)
        with isolation.new_files() as files, isolation.action("/", (), files):
            os.close(syscalls.open_beneath(files, BELOW))
        template.close()
    except OSError as error:
        sys.exit(said(error))
    if isinstance(isolation, Group):
        print(f"({', '.join(refused)}), so {isolation.by()}")
