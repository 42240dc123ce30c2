"""Call a function in a child process, because native code may crash or hang on untrusted data.

MLIR's readers crash on a hundredth of all damaged modules, and hang on some.
The child has limits of memory and time. That keeps the caller alive; it is not a sandbox. Standard library only.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

SECONDS, BYTES_A_SECOND = 20, 5_000_000
"""The seconds that a call may take, and more for its data: ten times the time to read a module."""
MEMORY = 4 << 30
"""Bytes of memory that a call may take, beside eight for each of its data."""
LARGEST_ANSWER = 1 << 28
"""The most bytes that a call may return."""
_PROGRAM = """
import json, sys
request = json.loads(sys.argv[1])
sys.path[:] = request["path"]
from stagec.core.data import child
child.answer(request)
"""


def call(function: Callable[..., Any], data: bytes, *arguments: Any, memory: int = MEMORY) -> Any:
    """Return the result of `function(data, *arguments)`, called in another process.

    function: one at the top of a module; its other arguments and its result are JSON values.
    memory: the bytes that the child may map, beside eight for each of the data.
    Raises ValueError if the function raises one, with the same message, and if the process ends in another way.
    """
    seconds = SECONDS + len(data) // BYTES_A_SECOND
    request = {
        "module": function.__module__,
        "function": function.__name__,
        "arguments": arguments,
        "memory": memory + 8 * len(data),
        "seconds": seconds,
        "answer": LARGEST_ANSWER,
        "path": sys.path,
    }
    # As this process was started; -P: the working directory may have a file of a module's name.
    flags = ["-B", "-P", *(["-s"] if sys.flags.no_user_site else []), *(["-S"] if sys.flags.no_site else [])]
    with _in_memory(data) as given, _in_memory() as answer, _in_memory() as errors:
        command = [sys.executable, *flags, "-c", _PROGRAM, json.dumps(request)]
        try:
            done = subprocess.run(command, stdin=given, stdout=answer, stderr=errors, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            raise ValueError(_late(seconds)) from None
        except OSError as error:
            raise ValueError(f"no process to read it in can be started: {error.strerror}") from error
        status, answer_text, said = done.returncode, _content(answer), _content(errors)
    if status == 0:
        reply = json.loads(answer_text)
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply["result"]
    if status == -signal.SIGXCPU:
        raise ValueError(_late(seconds))
    last = said.decode("utf-8", "replace").strip().rpartition("\n")[2][:200]
    how = f"with {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    raise ValueError(f"what reads it ended {how}{': ' if last else ''}{last}")


def _late(seconds: int) -> str:
    return f"reading it took over {seconds} seconds, and was ended"


def answer(request: dict[str, Any]) -> None:
    """Run the function of `call` in this process, and end it."""
    limits = {
        resource.RLIMIT_AS: request["memory"],
        resource.RLIMIT_CPU: request["seconds"],
        resource.RLIMIT_FSIZE: request["answer"],
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        # After the first number of seconds the process gets SIGXCPU, so its parent knows the reason; then SIGKILL.
        resource.setrlimit(kind, (least, hard if kind == resource.RLIMIT_CPU else least))
    output = os.dup(1)
    os.dup2(2, 1)  # native code may print
    with open(0, "rb", closefd=False) as file:
        data = file.read()
    function = getattr(importlib.import_module(request["module"]), request["function"])
    try:
        reply = {"result": function(data, *request["arguments"])}
    except ValueError as error:
        reply = {"error": str(error)}
    with open(output, "wb") as file:  # noqa: PTH123
        file.write(json.dumps(reply).encode())
    sys.stderr.flush()
    os._exit(0)  # a normal exit would free objects that reading may have damaged, and crash


@contextlib.contextmanager
def _in_memory(content: bytes = b"") -> Iterator[int]:
    """Make a file that is in no folder; yield its descriptor, at its start."""
    descriptor = os.memfd_create("stagec")
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, LARGEST_ANSWER, 0)
