"""A compiler for the fake device, instead of XLA's for NVIDIA devices: STAGEC_FAKE_COMPILER=1 puts it there.

Everything else is stagec's own: what is planned, exported, lowered, described and bundled. What compiles is the plugin
for CPUs that the fake device stands before, so an executable is machine code for this CPU, in a form that no other
device takes. `stagec autotune` runs with it too: the fake writes the results that it is given.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

from stagec.backends import plugins
from stagec.backends.compilation import CompiledModule, cost, memory
from stagec.backends.gpu import compiler, local_gpus, nvidia
from stagec.core.builds.specs import GpuTarget


def compile_module(module: Any, target: GpuTarget, mesh: Sequence[int], options: bytes = b"") -> CompiledModule:
    """Compile for as many fake devices as the mesh has."""
    devices = local_gpus.devices()[: math.prod(mesh)]
    loaded = plugins.compile_for(nvidia.PLUGIN, devices, module, target.compiler_options, serialized=options, load=True)
    optimized = loaded.hlo_modules()[0]
    return CompiledModule(
        executable=loaded.serialize(),
        cost_analysis=cost(loaded.cost_analysis()),
        memory_analysis=memory(loaded),  # type: ignore[arg-type]
        hlo=optimized.to_string(),
        device_ids=[device.id for device in devices],
        devices=plugins.in_jax_keys(devices),
        optimized=optimized,
    )


def replace() -> None:
    """Put it there, in this process."""
    compiler.compile_module = compile_module
    nvidia.register_custom_calls = lambda: None  # type: ignore[assignment]  # CPUs call none of CUDA's functions
    plugins._changed = lambda plugin, examined: contextlib.nullcontext()  # type: ignore[assignment]  # nor is it a known build
