"""Whether stagec can use the jaxlib that is installed: its version, or a program that is compiled, loaded and called.

Of a release that is newer than the tested ones, a number cannot say it: jaxlib moves its internal interface with each
release, or does not. What is wrong may be a signal, so the program runs in a child.
"""

from __future__ import annotations

import functools
import warnings

from stagec.pjrt import compatibility


def refusal() -> str | None:
    """Return why the installed jaxlib cannot be used, by name; None if it can.

    Of one that is newer than the tested range, a program in a child decides, once in a process. If it passes, this
    warns.
    """
    if compatibility.numbers() >= compatibility.BEFORE:
        return _probed()
    if compatibility.numbers() >= compatibility.OLDEST:
        return None
    oldest = ".".join(map(str, compatibility.OLDEST))
    return f"jaxlib {compatibility.version()} is too old for stagec: install {oldest} or newer"


@functools.cache
def _probed() -> str | None:
    from stagec.core.data import child
    from stagec.pjrt import probe_program

    before = ".".join(map(str, compatibility.BEFORE))
    newer = f"jaxlib {compatibility.version()} is newer than the releases that stagec was tested with"
    try:
        child.call(probe_program.run, b"")
    except ValueError as error:
        return f"{newer}, and a small program fails there ({error}): install one before {before}, or upgrade stagec"
    warnings.warn(f"{newer}; a small program is right there", RuntimeWarning, stacklevel=2)
    return None
