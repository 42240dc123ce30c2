"""Where in the user's sources something was traced: for messages, and for the locations of operations."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import FrameType

_OURS = str(Path(__file__).absolute().parent.parent)


@functools.cache
def is_ours(filename: str) -> bool:
    """Whether a file is stagec's: a frame in it says nothing to the user."""
    return filename.startswith((_OURS, "<frozen"))


def here() -> str:
    """Return FILE:LINE of the innermost frame of the calling thread that is not stagec's; "" where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
