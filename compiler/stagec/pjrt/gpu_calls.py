"""The functions that JAX calls on GPUs: XLA neither compiles nor runs calls of unknown functions."""

from __future__ import annotations

import functools
import importlib
import os
from pathlib import Path
from typing import Any

from stagec.core.builds.platforms import Plugin
from stagec.pjrt.packages import folder

MOSAIC = "libmosaic_gpu_runtime.so"
"""The library for kernels of Mosaic, beside the functions: compiling and running them links with it."""


def folder_of(plugin: Plugin) -> Path | None:
    """Return the folder of the wheel with a platform's functions; None if it is not installed."""
    return folder(plugin.kernels.replace("-", "_"))


def register(plugin: Plugin, interface: Any) -> bool:
    """Tell XLA of them, as their wheel's own `initialize` does with JAX; return whether the wheel is installed.

    interface: the plugin's C interface, as jaxlib holds it. Without the wheel, programs without such calls run.
    """
    from jaxlib import gpu_linalg, gpu_prng, gpu_solver, gpu_sparse, plugin_support, xla_client

    # These two register their functions when they are imported.
    for name in ("gpu_rnn", "gpu_triton"):
        importlib.import_module(f"jaxlib.{name}")
    extension = plugin_support.import_from_plugin(plugin.platform, f"{plugin.platform}_plugin_extension")
    if extension is None:
        return False
    if plugin.platform == "cuda":
        # Kernels of Mosaic are linked with it when they are loaded (jax/experimental/mosaic/gpu/core.py).
        os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", str(Path(str(extension.__file__)).with_name(MOSAIC)))
    name = plugin.platform.upper()
    xla_client.register_custom_call_handler(name, functools.partial(extension.register_custom_call_target, interface))
    xla_client.register_custom_type_handler(name, functools.partial(extension.register_custom_type, interface))
    for target, value in extension.ffi_types().items():
        xla_client.register_custom_type(target, value, platform=name)
    for target, value in extension.ffi_handlers().items():
        xla_client.register_custom_call_target(target, value, platform=name, api_version=1)
    for module in (gpu_linalg, gpu_prng, gpu_solver, gpu_sparse):
        for target, value, api_version in module.registrations().get(name, ()):
            xla_client.register_custom_call_target(target, value, platform=name, api_version=api_version)
    for module in (gpu_linalg, gpu_solver, gpu_sparse):  # a batch may be split over devices
        for target in module.batch_partitionable_targets():
            xla_client.register_custom_call_as_batch_partitionable(target, interface)
    return True
