"""Names of a package that are imported when they are used, so that importing the package does no work."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazily(
    package: str, modules: Mapping[str, Sequence[str]], namespaces: Sequence[str] = (), first: str = ""
) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package (https://peps.python.org/pep-0562).

    modules: the names that each module below the package gives. namespaces: modules that are attributes themselves.
    first: a module that is imported before any of them; "": none.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def attribute(name: str) -> Any:
        if name in namespaces:
            return importlib.import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            if first:
                importlib.import_module(f"{package}.{first}")
            return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        except ModuleNotFoundError as error:
            from stagec.core.messages.errors import missing_package

            sentence = missing_package(error, f"{package}.{name}")
            if sentence is None:
                raise
            raise ModuleNotFoundError(sentence, name=error.name) from None

    return attribute
