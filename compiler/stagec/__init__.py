"""stagec: hermetic, reproducible ahead-of-time builds of JAX functions.

Running what was built needs numpy and jaxlib:

- `load(path)` opens a bundle, a mapping of functions; `device_put(tree)` keeps state on the device between calls.
  `devices(platform)` lists what it can run on, `make_array_from_single_device_arrays` takes an array in its parts,
  `from_dlpack` one of another library without a copy.
  `distributed(...)` joins several processes, `make_array_from_process_local_data` takes what this one has of an array.
- `Exported.deserialize(bytes)` reads an exported artifact, stagec's or JAX's; its `call` runs it.
- `Lowered.compile()` and `Compiled.deserialize(bytes)` give an executable that can be called.

`build(manifest)` makes the bundle of a manifest, as `stagec build` does, and opens it. Tracing needs JAX: `jit(fun)` is
a `Wrapped`, whose `trace` gives a `Traced`, whose `lower` and `export` give the others.
The extension `stagec_arrays` traces without it: `jit(fun, frontend="arrays")`. `Mesh`, `NamedSharding` and
`PartitionSpec` say how arrays are split over devices. The classes are those of
https://docs.jax.dev/en/latest/jax.stages.html and https://docs.jax.dev/en/latest/jax.export.html.

Arrays are numpy's, whole, in pytrees (https://docs.jax.dev/en/latest/pytrees.html) of plain containers or of the
model's own types: the loader returns those that the process has imported, or that `load(types=...)` gives it as classes
or as a `PyTreeNode`. Sizes of arrays are in elements, XLA's numbers in bytes and operations.

Errors: `LoadError`, `CallError` and `RunError` with a `code`, `StagecError` for mistakes in manifests and models,
`NotExported`, `CannotLower` and `CannotCompile` (ValueErrors) from the stages. Nothing is imported until used.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stagec.core.builds.version import VERSION
from stagec.core.faces import lazily

# jaxlib reads it when it is loaded, and would list devices on stderr; warnings and errors stay. jax sets the same.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

if TYPE_CHECKING:
    from stagec.backends.compilation import CannotCompile as CannotCompile
    from stagec.core.messages.errors import StagecError as StagecError
    from stagec.core.messages.refusal import CallError as CallError, LoadError as LoadError, RunError as RunError
    from stagec.core.trees.nodes import PyTreeNode as PyTreeNode
    from stagec.frontends.common.jit import Traced as Traced, Wrapped as Wrapped
    from stagec.frontends.staging import jit as jit
    from stagec.loader.bundle import Bundle as Bundle
    from stagec.loader.function import Function as Function
    from stagec.loader.load import load as load
    from stagec.local.building import build as build
    from stagec.pjrt.clients import devices as devices
    from stagec.pjrt.distributed import distributed as distributed
    from stagec.pjrt.dlpack import from_dlpack as from_dlpack
    from stagec.pjrt.making import (
        device_put as device_put,
        make_array_from_process_local_data as make_array_from_process_local_data,
        make_array_from_single_device_arrays as make_array_from_single_device_arrays,
    )
    from stagec.stages.compiled import Compiled as Compiled
    from stagec.stages.errors import CannotLower as CannotLower, NotExported as NotExported
    from stagec.stages.exported import Exported as Exported
    from stagec.stages.lowered import Lowered as Lowered
    from stagec.stages.shardings import Mesh as Mesh, NamedSharding as NamedSharding, PartitionSpec as PartitionSpec

__version__ = VERSION

_MODULES = {
    "backends.compilation": ("CannotCompile",),
    "core.messages.errors": ("StagecError",),
    "frontends.staging": ("jit",),
    "frontends.common.jit": ("Traced", "Wrapped"),
    "pjrt.clients": ("devices",),
    "pjrt.distributed": ("distributed",),
    "pjrt.making": ("device_put", "make_array_from_process_local_data", "make_array_from_single_device_arrays"),
    "pjrt.dlpack": ("from_dlpack",),
    "loader.function": ("Function",),
    "loader.bundle": ("Bundle",),
    "core.messages.refusal": ("CallError", "LoadError", "RunError"),
    "loader.load": ("load",),
    "local.building": ("build",),
    "stages.compiled": ("Compiled",),
    "stages.errors": ("CannotLower", "NotExported"),
    "stages.exported": ("Exported",),
    "stages.lowered": ("Lowered",),
    "stages.shardings": ("Mesh", "NamedSharding", "PartitionSpec"),
    "core.trees.nodes": ("PyTreeNode",),
}
_NAMES = "__version__", *(name for names in _MODULES.values() for name in names)
if not TYPE_CHECKING:  # type checkers take the names that are imported as themselves above
    __all__ = list(_NAMES)

__getattr__ = lazily(__name__, _MODULES)


def __dir__() -> list[str]:
    return list(_NAMES)
