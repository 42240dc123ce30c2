"""Answer Bazel's requests with processes that see the inputs of a request and nothing else.

    Bazel --requests--> worker --"fork into these namespaces"--> template --fork--> process
          <-responses--        <--------"it has ended"---------                       ^
                               ---------"do this action", "it is done"----------------

This process, the worker, imports neither packages nor models. It alone speaks with Bazel, makes the namespaces of an
action, and takes from them what the action was asked for when all that was started in them is dead. So the worst that a
model can do is to fail, or to make another artifact of itself.

A process does one action, or those of a series, one after the other: compilations of functions of one manifest for one
target, which run no code of a model. XLA takes less CPU time if it has just compiled another function. Such a process
gets copies of its inputs, and lives on while the worker takes its outputs. It ends with the series, if an action fails,
if it has much memory, or if Bazel asks for nothing.

The sources of the compiler and the digest of the packages are in the key by which Bazel keeps workers
(rules/toolchain.bzl): when they change, another worker is started.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence

from stagec.worker import isolation, outputs
from stagec.worker.action import Ended, Process
from stagec.worker.jail import said
from stagec.worker.protocol import Request, Requests, Response
from stagec.worker.root import identity, import_roots, packages

_COMPILER = os.path.abspath(__file__).removesuffix("/stagec/worker/server.py")
_SOURCES = re.compile(rf"{re.escape(_COMPILER)}/(stagec|extensions/[^/]+/stagec_[^/]+)/")
_PACKAGES = "/site-packages"
_OF_BAZEL = ("bazel-out/", "external/", "../")
"""Where Bazel has what it made and fetched."""
_IN_PLACE = ("action bundle",)
"""Commands that work in the execution root, with the files of the machine: they run no code of a model's, and open what
their arguments name. To give a bundle its thousands of inputs took longer than to write it."""
_COPIED = 64 << 20
"""The most bytes of inputs that a process of a series gets for an action. With more, an action has its own process."""
_MEMORY = 1 << 30
"""The most bytes of memory with which a process goes on with a series."""
_IDLE = 3.0
"""Seconds without a request after which a process of a series ends."""
_CANNOT = """stagec: a worker cannot isolate its actions on this system ({})
  run bazel shutdown: the next build sees it, and runs each action in a Bazel sandbox
"""
_CANNOT_NOW = """stagec: the worker cannot do this action ({})
  build again; if it stays so, run bazel shutdown before
"""


def serve(command: str, problem: str | None = None) -> int:
    """Be a worker of a command: answer requests on stdin on stdout until stdin is closed; return the exit status.

    problem: the reason that it cannot work; it is the answer to requests.
    """
    requests, responses = Requests(os.dup(0)), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # stdout is for responses alone
    sys.path[:] = [os.path.abspath(entry) for entry in sys.path]  # children have another working directory
    worker = None
    try:
        worker = None if problem else _Worker(command)
    except OSError as error:
        problem = _CANNOT.format(said(error))
    while True:
        if worker and worker.keeps_process and not requests.wait(_IDLE):
            worker.end_series()
        request = requests.next()
        if not request:
            break
        if request.cancel:  # it came too late
            continue
        response = worker.answer(request, requests) if worker else Response(1, problem or "", request.request_id)
        answer = response.encode()
        while answer:
            answer = answer[os.write(responses, answer) :]
    if worker:
        worker.end()
    return 0


class _Worker:
    def __init__(self, command: str) -> None:
        self._in_place = command in _IN_PLACE
        flags = sys.orig_argv[1 : -len(sys.argv)]
        self._words = [*flags, os.path.realpath(sys.argv[0]), command, "--worker_template"]
        self._isolation, self._template, _ = isolation.begin(self._words, self._in_place)
        self._packages = [*map(identity, packages())]
        self._kept: _Fork | None = None

    @property
    def keeps_process(self) -> bool:
        """Whether a process waits for the next action of a series."""
        return self._kept is not None

    def answer(self, request: Request, requests: Requests) -> Response:
        """Run an action, and hand over its outputs."""
        started, here = time.monotonic(), os.getcwd()
        declared = _values(request.arguments, "--declared")  # rules/toolchain.bzl names the outputs in the arguments
        # The request has the arguments. The file that has them too may change: in dynamic execution, Bazel 4 writes it
        # for the sandbox again. The compiler is seen where it is: to show its sources as inputs as well takes long.
        unread = {f"{path}-0.params" for path in declared}
        inputs = [path for path in request.inputs if path not in unread and not _SOURCES.match(f"{here}/{path}")]
        try:
            if [*map(identity, packages())] != self._packages:  # Bazel makes a repository again as a new folder
                self.end()
                self._packages = [*map(identity, packages())]
                self._isolation.see_packages()
                self._template = self._isolation.start(self._words, self._in_place)
            outputs.check(declared, request.inputs)
            before = outputs.states(here, inputs)  # of each file: the state of a folder stays when a file in it changes
            inputs = _as_folders(inputs, here)
            series = next((word for word in request.arguments if word.startswith("--series=")), "")
            named = [path for path in inputs if path in request.arguments]
            copies = outputs.contents(named, _COPIED) if series else None
            with self._fork("", inputs, declared) if copies is None else self._fork(series, (), ()) as fork:
                fork.process.start(request.arguments, copies or {})
                cancelled = fork.process.is_cancelled(requests)
                ended = (None if cancelled else fork.process.reported(here)) or fork.end()
                if ended.status == 0 and not cancelled:
                    # Bazel looks at inputs before an action and not after it. An edit in the meantime would be in an
                    # output under the key of the old file, and then in a shared cache.
                    outputs.check_unchanged(here, before)
                    if fork.files is not None:
                        outputs.hand_over(fork.files, here, declared)
                    if not fork.ended and ended.memory <= _MEMORY:
                        self._kept, fork.has_worked = fork, True
        except outputs.NotHandedOver as error:
            return Response(1, f"stagec: {error}\n", request.request_id)
        except OSError as error:
            return Response(1, _CANNOT_NOW.format(said(error)), request.request_id)
        if ended.status is None and fork.has_worked and not cancelled:
            return self.answer(
                request, requests
            )  # a process that does nothing else dies again, if it is this action's fault
        if cancelled:
            return Response(0, request_id=request.request_id, was_cancelled=True)
        if ended.status is None:
            return Response(1, ended.output + ended.death(time.monotonic() - started), request.request_id)
        return Response(ended.status, ended.output, request.request_id)

    @contextlib.contextmanager
    def _fork(self, series: str, inputs: Sequence[str], declared: Sequence[str]) -> Iterator[_Fork]:
        """Have a process for an action: the one that is kept if it is of this series, else a new one.

        series: "" for a process of the action's own. inputs: that its jail shows. When the block is left, the process
        is dead, if it is not kept.
        """
        kept, self._kept = self._kept, None
        # XLA's threads keep a fork from entering the mounts of another action, so it gets copies of the next inputs
        # instead. A series never exports: its processes run no code of a model.
        if kept and (kept.series != series or kept.process.is_dead()):
            kept.close()
            kept = None
        fork = kept or _Fork(self._isolation, self._template, series, inputs, declared if self._in_place else None)
        try:
            yield fork
        finally:
            if fork is not self._kept:
                fork.close()

    def end_series(self) -> None:
        """End the process that is kept."""
        if self._kept:
            self._kept.close()
        self._kept = None

    def end(self) -> None:
        """End the template, and wait for its end."""
        self.end_series()
        self._template.close()
        os.wait()


class _Fork:
    """A process in its jail.

    series: of its actions; "" if it does only one. files: as `Namespaces.action` has it. has_worked: whether it has
    done an action. ended: whether it is dead, and all that it started.
    """

    def __init__(
        self,
        isolated: isolation.Isolation,
        template: socket.socket,
        series: str,
        inputs: Sequence[str],
        in_place: Sequence[str] | None,
    ) -> None:
        """Start it. in_place: what it writes in the execution root; None: it works in a folder of its own."""
        self.series, self.has_worked, self.ended = series, False, False
        self._jail, self._folder = contextlib.ExitStack(), contextlib.ExitStack()
        with contextlib.ExitStack() as if_it_fails:
            if_it_fails.push(self._folder)
            if_it_fails.push(self._jail)
            written = () if in_place is None else outputs.make_folders(in_place)
            self.files = self._folder.enter_context(isolated.new_files()) if in_place is None else None
            jail = self._jail.enter_context(isolated.action(os.getcwd(), inputs, self.files, written))
            self.process = Process(template, *jail, bool(series))
            if_it_fails.pop_all()

    def end(self) -> Ended:
        """Kill it, if it is not dead; return how it ended."""
        self._jail.close()
        self.ended = True
        return self.process.end(os.getcwd())

    def close(self) -> None:
        """Kill it, and remove its folder."""
        if not self.ended:
            self.end()
        self._folder.close()


def _as_folders(inputs: Sequence[str], here: str) -> list[str]:
    """Return inputs with the folders of packages in place of the files in them: each input takes a mount.

    Of a lock's packages, Bazel names the folder alone, and of a hub's each of thousands of files. A folder of sources
    stays as it is: it may have files that are not declared.
    """
    roots = (f"{os.path.relpath(path, here)}/" for path in import_roots() if path.endswith(_PACKAGES))
    folders = [folder for folder in roots if folder.startswith(_OF_BAZEL)]
    of = {path: folder[:-1] for path in inputs for folder in folders if path.startswith(folder)}
    return list(dict.fromkeys(of.get(path, path) for path in inputs))


def _values(arguments: Sequence[str], option: str) -> list[str]:
    return [value for name, value in itertools.pairwise(arguments) if name == option]
