"""What Python imports first in a program that is rehearsed: it observes JAX from the moment that JAX is imported."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class _AfterJax(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports JAX as Python would have, and then observes it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "jax":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        self._before, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._before.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec
        spec.loader = module.__loader__ = self._before
        platform = os.environ["STAGEC_REHEARSAL_PLATFORM"]
        if platform in ("cuda", "rocm"):
            from stagec_rehearse import driver

            driver.load(platform)
        self._before.exec_module(module)
        from stagec_rehearse import observing

        observing.start()


def _next() -> None:
    """Run the sitecustomize that this one stands before: the machine's, or the user's."""
    here = os.path.dirname(os.path.abspath(__file__))
    path = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec and spec.loader:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("STAGEC_REHEARSAL"):
    sys.meta_path.insert(0, _AfterJax())
_next()
