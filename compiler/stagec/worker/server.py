"""Answer Bazel's requests, each in a forked process that sees the inputs of its request and nothing else of the build.

Only a command that runs no code of a model's, and opens the files that it is told to, works in the execution root.
The worker itself imports packages and the compiler, never a model, and starts no XLA client: a fork after that would
wait for threads that it does not have. So a request starts with what a new process has after its imports, and what it
does is gone when it has ended. The sources of the compiler and the digest of the packages are in the key by which
Bazel keeps workers (rules/toolchain.bzl): when they change, another worker is started.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from stagec.worker import isolation
from stagec.worker.protocol import Request, Requests, Response

_COMPILER = Path(__file__).absolute().parent.parent


def serve(run: Callable[[Sequence[str]], int], in_place: bool = False) -> int:
    """Answer the requests on stdin on stdout until stdin is closed; return the exit status.

    run: what a process does for the arguments of a request; it returns an exit status. Bazel shows what it prints.
    in_place: whether it does it in the execution root, and not in a folder that has the inputs of the request alone.
    """
    requests, responses = Requests(os.dup(0)), os.dup(1)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # stdout is for responses alone
    sys.path[:] = [str(Path(entry).absolute()) for entry in sys.path]  # children have another working directory
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise RuntimeError("what was imported started threads: forks would wait for them")
    isolation.remove_folders_of_the_dead()
    gc.collect()
    gc.freeze()  # what is imported is not looked at again, and stays in memory that all children share
    while request := requests.next():
        if request.cancel:  # it came too late
            continue
        answer = _answer(request, requests, run, in_place).encode()
        while answer:
            answer = answer[os.write(responses, answer) :]
    return 0


def _answer(request: Request, requests: Requests, run: Callable[[Sequence[str]], int], in_place: bool) -> Response:
    """Have a child do the work; its last word is its exit status, on a pipe that is closed when it dies."""
    started = time.monotonic()
    # The compiler is imported from where the worker found it: links to its sources would be many, and read by nobody.
    here, compiler = Path.cwd(), f"{_COMPILER}/"
    inputs = [path for path in request.inputs if not f"{here}/{path}".startswith(compiler)]
    own = contextlib.nullcontext(here) if in_place else isolation.folder_of(inputs)
    with own as folder, tempfile.TemporaryFile() as printed:
        last_word, said = os.pipe()
        child = os.fork()
        if not child:
            _work(request, run, folder, inputs, printed.fileno(), said)
        os.close(said)
        try:
            cancelled = requests.ended_before(last_word)
            status = "" if cancelled else os.read(last_word, 16).decode()
        finally:
            os.close(last_word)
            isolation.end(child)
            _, how, usage = os.wait4(child, 0)
        printed.seek(0)
        output = printed.read().decode("utf-8", "replace")
        seconds, memory = time.monotonic() - started, f"{usage.ru_maxrss / 1024:,.0f} MiB"
        if request.verbosity > 0:
            print(f"{' '.join(request.arguments)}: {seconds:.2f} s, {memory}", file=sys.stderr, flush=True)
        if cancelled:
            return Response(0, request_id=request.request_id, was_cancelled=True)
        if not status:
            output += f"stagec: {_death(how)} after {seconds:.1f} s; it had used {memory} of memory\n"
            return Response(1, output, request.request_id)
        if status == "0" and not in_place:
            isolation.hand_over(folder, request.arguments)
        return Response(int(status), output, request.request_id)


def _work(
    request: Request,
    run: Callable[[Sequence[str]], int],
    folder: Path,
    inputs: Sequence[str],
    printed: int,
    said: int,
) -> NoReturn:
    """Do the work of a request in this process, print into one descriptor and say the exit status on the other."""
    status = 1
    try:
        for descriptor in (1, 2):
            os.dup2(printed, descriptor)
        missed = isolation.undeclared(folder, Path.cwd())
        isolation.enter(folder, inputs)
        faulthandler.enable()  # where it died is worth knowing
        status = run(request.arguments)
        for path in sorted(missed) if status else ():
            print(f"{path} is no input of this action\n  name it in deps, or in data where it is read", file=sys.stderr)
    except SystemExit as error:  # argparse
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - it is told, and 1 is the status
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(said, str(status).encode())
        finally:  # whatever the model did to stdout: this process is no worker
            os._exit(0)


def _death(how: int) -> str:
    """Say how a child ended before its work did."""
    if not os.WIFSIGNALED(how):
        return f"the process of this action ended with exit({os.WEXITSTATUS(how)}) in the middle of its work"
    number = os.WTERMSIG(how)
    why = signal.strsignal(number) or "unknown"
    if number == signal.SIGKILL:
        why += ", most likely because the machine has no memory left"
    return f"the process of this action died of {signal.Signals(number).name} ({why})"
