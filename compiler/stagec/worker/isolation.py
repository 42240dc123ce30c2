"""Choose the best isolation of actions that this system allows a worker."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence

from stagec.worker import confinement, syscalls
from stagec.worker.group import Group
from stagec.worker.namespaces import Namespaces
from stagec.worker.place import LONGEST, Isolation, end_with, said
from stagec.worker.root import BELOW


def begin(words: Sequence[str], in_place: bool) -> tuple[Isolation, socket.socket]:
    """Isolate this process (a child of the called one) from here on, and start a template.

    words, in_place: as `Isolation.start` has them. Returns the isolation, and the connection of the template.
    Raises OSError if the system lets it do so in no way.
    """
    if not confinement.has_filter():
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
                isolation = kind()
                template = isolation.start(words, in_place)
            except OSError as error:
                os.write(tells, said(error).encode())
                sys.exit(1)
            os.close(tells)
            isolation.instead_of = problems
            gc.freeze()  # the collector ignores present objects, so they stay in memory that all children share
            return isolation, template
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
        isolation, template = begin(["-c", "import os, sys; os.read(int(sys.argv[1]), 1)"], in_place=False)
        with isolation.new_files() as files, isolation.action("/", (), files):
            os.close(syscalls.open_beneath(files, BELOW))
        template.close()
    except OSError as error:
        sys.exit(said(error))
    if isolation.instead_of:
        print(f"({', '.join(isolation.instead_of)}), so {isolation.by()}")
