"""Answer Bazel's requests, each with a new process that sees the inputs of its request and nothing else.

    Bazel --requests--> worker --"fork into these namespaces"--> template --fork--> action
          <-responses--        <--------"it has ended"---------

This process, the worker, imports neither packages nor models. It alone speaks with Bazel, makes the namespaces of an
action, and takes from them what the action was asked for when all that was started in them is dead. So the worst that a
model can do is to fail, or to make another artifact of itself. The sources of the compiler and the digest of the
packages are in the key by which Bazel keeps workers (rules/toolchain.bzl): when they change, another worker is started.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Sequence

from stagec.worker import isolation, outputs
from stagec.worker.action import Action, mebibytes
from stagec.worker.place import said
from stagec.worker.protocol import Request, Requests, Response

_COMPILER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_IN_PLACE = ("bundle",)
"""Commands that work in the execution root, with the files of the machine: they run no code of a model's, and open what
their arguments name. To give a bundle its thousands of inputs took longer than to write it."""
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
    while request := requests.next():
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
        self._isolation, self._template = isolation.begin(self._words, self._in_place)

    def answer(self, request: Request, requests: Requests) -> Response:
        """Run an action, and hand over its outputs."""
        started, here = time.monotonic(), os.getcwd()
        declared = _declared(request.arguments)
        # The request has the arguments. The file that has them too may change: in dynamic execution, Bazel 4 writes it
        # for the sandbox again. The compiler is seen where it is: to show its sources as inputs as well takes long.
        unread = {f"{path}-0.params" for path in declared}
        inputs = [
            path for path in request.inputs if path not in unread and not f"{here}/{path}".startswith(f"{_COMPILER}/")
        ]
        action = ended = None
        try:
            if self._isolation.renew():
                self.end()
                self._template = self._isolation.start(self._words, self._in_place)
            with contextlib.nullcontext() if self._in_place else self._isolation.new_files() as files:
                outputs.check(declared, request.inputs)
                before = outputs.states(here, inputs)
                written = outputs.make_folders(declared) if files is None else ()
                with self._isolation.action(here, inputs, files, written) as (place, namespaces):
                    action = Action(self._template, request.arguments, place, namespaces)
                    cancelled = action.is_cancelled(requests)
                ended = action.end(here)
                if ended.status == 0 and not cancelled:
                    outputs.check_unchanged(here, before)
                    if files is not None:
                        outputs.hand_over(files, here, declared)
        except outputs.NotHandedOver as error:
            return Response(1, f"stagec: {error}\n", request.request_id)
        except OSError as error:
            if action and not ended:  # the template is in the middle of it
                raise
            return Response(1, _CANNOT_NOW.format(said(error)), request.request_id)
        seconds = time.monotonic() - started
        if request.verbosity > 0:
            done = f"{seconds:.2f} s, {mebibytes(ended.memory)}"
            print(f"{' '.join(request.arguments)}: {done}", file=sys.stderr, flush=True)
        if cancelled:
            return Response(0, request_id=request.request_id, was_cancelled=True)
        if ended.status is None:
            return Response(1, ended.output + ended.death(seconds), request.request_id)
        return Response(ended.status, ended.output, request.request_id)

    def end(self) -> None:
        """End the template, and wait for its end."""
        self._template.close()
        os.wait()


def _declared(arguments: Sequence[str]) -> list[str]:
    """Return the outputs that Bazel expects: rules/toolchain.bzl names them in the arguments."""
    return [path for option, path in itertools.pairwise(arguments) if option == "--declared"]
