"""Values that several threads ask for, and that one of them makes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Value = TypeVar("Value")


class Once:
    """Values by key. Each is made once: a thread waits only if another one is making the same value."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}
        self._turns: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the value of `key`; `make` makes it if there is none. If `make` raises, the next thread tries."""
        value: Value | None = self._values.get(key)
        if value is None:
            # A lock for each key: XLA takes tenths of a second to load an executable, and calls of others must not wait
            # for it.
            with self._turns.setdefault(key, threading.Lock()):
                value = self._values.get(key)
                if value is None:
                    value = self._values[key] = make()
        return value

    def made(self) -> list[Any]:
        """Return the values that there are."""
        return list(self._values.values())

    def clear(self) -> None:
        """Forget all values."""
        self._values.clear()
