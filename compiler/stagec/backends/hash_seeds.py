"""Let every hash table of XLA have the same seed, so that none has an order of its own in every run.

Abseil seeds each table from the address of a variable of the thread and from the number of tables that the thread made
(absl/container/internal/raw_hash_set.cc). XLA:CPU writes the arguments of hoisted loops in the order of such a table:
machine code, calls and buffers differ from run to run. While a module is compiled, the seed is a constant
(`machine_code`).
"""

from __future__ import annotations

import functools

from stagec.backends.machine_code import CannotChange, Change, Code

# The step from one seed to the next: add eax, -0x52ad; mov [rdx], ax.
_NEXT, _ADD_SIZE = b"\x05\x53\xad\xff\xff\x66\x89\x02", 5
_CONSTANT = b"\xb8\x53\xad\x00\x00"  # mov eax, 0xad53


def changes(code: Code) -> list[Change]:
    """Return the changes to `code`, a library with Abseil in it, that make the seed of every new table the same.

    Raises CannotChange when the library is not as expected.
    """
    return [Change(address, _NEXT[:_ADD_SIZE], _CONSTANT) for address in _sites(code)]


@functools.cache
def _sites(code: Code) -> tuple[int, ...]:
    found = tuple(code.find(_NEXT))
    if not found:
        raise CannotChange(
            f"stagec does not find where hash tables get their seeds in this {code.library}; build with a jaxlib that "
            f"stagec is tested with"
        )
    return found
