"""Immutable values: they serve as keys of caches. Standard library only."""

from __future__ import annotations

from typing import NoReturn


class Frozen:
    """A class that refuses changes, as a frozen dataclass does. To import `dataclasses` takes as long as ten modules.

    `__init__` sets fields by `object.__setattr__`. To set or delete one later raises AttributeError.
    """

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} does not change: make another one")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} does not change: make another one")
