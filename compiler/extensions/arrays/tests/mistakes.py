"""What functions of arrays say of a user's mistake, and in a trace the line that it is in."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import stagec


def check(case: tuple[Callable[..., Any], type[Exception], str], argument: Any) -> None:
    """Call a function, outside a trace and in one, and compare what it raises: in a trace with the user's line.

    case: the function, in one line; the error; a pattern of its message.
    """
    function, error, message = case
    code = inspect.unwrap(function).__code__
    line = re.escape(f"{code.co_filename}:{code.co_firstlineno}: ")
    for call, place in ((function, f"({line})?"), (stagec.jit(function, frontend="arrays"), line)):
        with pytest.raises(error, match=f"^{place}{message}"):
            call(argument)
