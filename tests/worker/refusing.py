"""Runs a command where the kernel refuses system calls: `python refusing.py CALL=ERROR... -- COMMAND...`.

A container is such a place: CALL is a number, and ERROR what the command gets then.
"""

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "compiler")]

from stagec.worker import confinement, syscalls

_NO_NEW_PRIVS = 38

if __name__ == "__main__":
    end = sys.argv.index("--")
    lines = []
    for word in sys.argv[1:end]:
        call, error = map(int, word.split("="))
        lines += confinement._fails_if(confinement._NUMBER, confinement._EQUAL, [call], error)
    syscalls.prctl(_NO_NEW_PRIVS, 1)
    confinement._filter_system_calls(confinement._assembled(lines))
    os.execvp(sys.argv[end + 1], sys.argv[end + 1 :])
