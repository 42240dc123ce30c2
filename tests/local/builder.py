"""Run `stagec build` again and again in one process, whose workers stay, as those of `--watch` do.

To import JAX in two workers takes 2 of the 3 CPU seconds of a small build. Each build has its own workspace and store.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from stagec import cli
from stagec.local import pool
from stagec.local.store import Store


class Builder:
    """The process. environment: its variables."""

    def __init__(self, python: Sequence[str], environment: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        command = [*python, __file__]
        self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)

    def run(self, arguments: Sequence[str], cwd: Path, cache: Path) -> subprocess.CompletedProcess[str]:
        """Run a command in a folder, with a folder for caches; return what it printed."""
        assert self._process.stdin
        assert self._process.stdout
        with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as said:
            files = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (printed, said)]
            self._process.stdin.write(json.dumps([arguments, str(cwd), str(cache), files]) + "\n")
            self._process.stdin.flush()
            status = int(self._process.stdout.readline())
            for file in (printed, said):
                file.seek(0)
            return subprocess.CompletedProcess(arguments, status, printed.read(), said.read())


class Kept(pool.Pool):
    """The pool of all builds, which stays after each."""

    def __exit__(self, *_: object) -> None:
        pass


def _serve() -> None:
    """Build for each line of stdin, until it is closed, and answer with the status."""
    usual, made = pool.Pool, list[Kept]()

    def begin(store: Store) -> Kept:
        if not made:  # on the disk of the stores, and in none of a build
            made.append(Kept(Store(store.folder.parent.with_name("workers"))))
            assert made[0].root
        made[0].store = store
        return made[0]

    pool.Pool = begin  # type: ignore[assignment, misc]
    answers = os.fdopen(os.dup(1), "w")
    requests = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in requests:
        arguments, cwd, os.environ["XDG_CACHE_HOME"], files = json.loads(line)
        os.chdir(cwd)
        for descriptor, file in enumerate(files, 1):
            opened = os.open(file, os.O_WRONLY)
            os.dup2(opened, descriptor)
            os.close(opened)
        try:
            status = cli.main(arguments)
        except SystemExit as error:  # argparse
            status = error.code if isinstance(error.code, int) else 1
        sys.stderr.flush()
        answers.write(f"{status}\n")
        answers.flush()
    for kept in made:
        usual.__exit__(kept)


if __name__ == "__main__":
    _serve()
