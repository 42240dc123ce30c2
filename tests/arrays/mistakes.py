"""What functions of arrays say of a user's mistake, with the line that it is in."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import stagec


def check(case: tuple[Callable[..., Any], type[Exception], str], argument: Any) -> None:
    """Call a function, outside of a trace and in one, and compare what it raises.

    case: the function, in one line; the error; a pattern of what stands behind the function's file and line.
    """
    function, error, message = case
    code = inspect.unwrap(function).__code__
    line = re.escape(f"{code.co_filename}:{code.co_firstlineno}: ")
    for call in (function, stagec.jit(function, frontend="arrays")):
        with pytest.raises(error, match=f"^{line}{message}"):
            call(argument)
