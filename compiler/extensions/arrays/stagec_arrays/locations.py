"""Where in the user's sources something was traced: for messages, and for the locations of operations."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import jaxlib
import numpy as np

from stagec.core.builds import extensions

_LOCATION = re.compile(r"(^|at )(/|<)[^:]*:[0-9]+[:;,]")
_BELOW = tuple(f"{Path(str(module.__file__)).parent}" for module in (jaxlib, np))


@functools.cache
def is_ours(filename: str) -> bool:
    """Whether a file is stagec's: a frame in it does not help the user."""
    return filename.startswith((*extensions.sources(), "<frozen"))


def located(error: Exception) -> None:
    """Put FILE:LINE of the user's sources before the message of an error that stagec raises for a mistake there.

    An error that the user raises does not change, nor does a message that has a location.
    """
    if len(error.args) != 1 or not isinstance(error.args[0], str) or _LOCATION.search(error.args[0]):
        return
    location, step, ours = "", error.__traceback__, False
    while step is not None:
        name = step.tb_frame.f_code.co_filename
        if is_ours(name):
            ours = True
        elif not name.startswith(_BELOW):
            location, ours = f"{name}:{step.tb_lineno}", False
        step = step.tb_next
    if location and ours:
        error.args = (f"{location}: {error.args[0]}",)


def here() -> str:
    """Return FILE:LINE of the innermost frame of the calling thread that is not stagec's; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


@functools.lru_cache(4096)
def _frames(traceback: Any) -> tuple[Any, ...]:
    return tuple(traceback.frames)


def frames_of_user(traceback: Any) -> list[Any]:
    """Return the frames of a call stack, as jaxlib's `Traceback` has them, that are not stagec's, innermost first."""
    return [frame for frame in _frames(traceback) if not is_ours(frame.file_name)]


def location_of(traceback: Any) -> str:
    """Return FILE:LINE in the user's sources of a call stack; "" where it is not known, and for None."""
    frames = frames_of_user(traceback) if traceback is not None else []
    return f"{frames[0].file_name}:{frames[0].line_num}" if frames else ""
