"""`stagec autotune`: time kernels on the NVIDIA devices of this machine, for files that a manifest names.

XLA needs the driver for that, and the libraries that it calls: cuBLAS, cuDNN and others of CUDA. It searches for them
like any program.
jaxlib is imported when the process has been prepared for devices, not with this module.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from stagec.audit import inputs
from stagec.audit.inputs import Inputs
from stagec.backends import plugins
from stagec.backends.compilation import CannotCompile
from stagec.backends.gpu import descriptions, local_gpus, nvidia
from stagec.core.builds.specs import ExecutableSpec, GpuTarget
from stagec.core.messages.errors import Problem, StagecError, mistake
from stagec.core.messages.progress import Progress
from stagec.hardware import autotuning, gpu_devices
from stagec.hardware.autotuning import Result
from stagec.pjrt import compatibility
from stagec.pjrt.packages import folder

if TYPE_CHECKING:
    from jaxlib.mlir import ir

_RESULTS = "results.textproto"
_SAME = ("name", "compute_capability", "core_count", "l2_cache_size")
"""Properties that identify the device. Drivers report slightly different clocks and bandwidths."""
_Files = dict[str, list[tuple[str, ExecutableSpec, GpuTarget]]]
"""Path of a file -> the executables of its targets: name of the exported artifact, spec, target."""


def autotune(path: str, roots: Sequence[str], progress: Progress | None = None) -> dict[str, str]:
    """Compile all executables for targets with a file of results, on devices of this machine.

    path, roots: as for `inputs.read`. Returns the files' content by their paths; these have the same base folder as the
    manifest's path. progress: counts each executable as a step.
    Raises StagecError when no target names a file, when this machine does not have the devices, and when XLA refuses.
    """
    current = inputs.read(path, roots)
    if current is None:
        raise StagecError(Problem(path, "", "it stands for no inputs", "give a manifest (.toml)"))
    files: _Files = {}
    for export, spec in current.executables.values():
        target = spec.target
        if isinstance(target, GpuTarget) and target.platform == "cuda" and target.autotuning:
            file = str(PurePosixPath(spec.manifest).parent / target.autotuning)
            files.setdefault(file, []).append((export, spec, target))
    if not files:
        write = 'write in a target with platform = "cuda", for example autotuning = "h200.autotune.textproto"'
        raise StagecError(Problem(path, "targets", "no function has a target with a file of results", write))
    progress = progress or Progress("autotune")
    progress.total = sum(map(len, files.values()))
    local_gpus.prepare_process()
    try:
        local_gpus.devices()
    except CannotCompile as error:
        raise mistake(str(error), error.write) from error
    return {
        file: together([_time(current, export, spec, progress) for export, spec, _ in executables], executables[0][2])
        for file, executables in files.items()
    }


def together(results: Sequence[Sequence[Result]], target: GpuTarget) -> str:
    """Return the file that has the results of several executables, for `target`."""
    device = gpu_devices.read(target.platform, target.figures)
    comment = (
        f"Kernels timed on {device.name}, with jaxlib {compatibility.version()}. stagec autotune writes this file."
    )
    return autotuning.write(autotuning.merge(results, device), comment)


def _time(current: Inputs, export: str, spec: ExecutableSpec, progress: Progress) -> list[Result]:
    from jaxlib.mlir import ir

    from stagec.building.compilation import lower, problem
    from stagec.stages import mlir

    progress.step(export)
    serialized, _, lowered_for = current.portable(export)
    _, lowered = lower(serialized, spec, lowered_for)
    assert isinstance(spec.target, GpuTarget)
    try:
        with mlir.make_context():
            return timed(ir.Module.parse(lowered.module), spec.target, (lowered.nr_devices,))
    except CannotCompile as error:
        raise problem(error, spec) from error


def timed(module: ir.Module, target: GpuTarget, mesh: Sequence[int]) -> list[Result]:
    """Compile a StableHLO module on devices of this machine and return XLA's fastest choices for them.

    The process must have been prepared by `local_gpus.prepare_process`. mesh: as for `Backend.compile_module`.
    Raises CannotCompile when there are not as many devices as the module needs, when they are others than the
    target's, when a library is missing that XLA times, and when XLA refuses the module.
    """
    count = math.prod(mesh)
    here = local_gpus.devices()
    if len(here) < count:
        what = f"it needs {count} devices, and CUDA finds {len(here)} here"
        raise CannotCompile(what, "topology", "run this on a machine with as many")
    reported = descriptions.properties(local_gpus.described(here[0]))
    refuse_another(reported, target)
    missing = [name for name in nvidia.TOOLKIT.libraries if not _loads(name)]
    if missing:
        write = f"install CUDA {nvidia.TOOLKIT.release} and cuDNN 9, and name their folders in LD_LIBRARY_PATH"
        raise CannotCompile(f"XLA times kernels of libraries that are not here: {', '.join(missing)}", "", write)
    nvidia.register_custom_calls()
    form = autotuning.form(compatibility.numbers())
    options = {**target.compiler_options, **form, "xla_gpu_dump_autotune_results_to": _RESULTS}
    with nvidia.scratch():
        plugins.compile_for(nvidia.PLUGIN, here[:count], module, options, load=True, examined=target.examined)
        # XLA writes no file if there is nothing to time.
        text = Path(_RESULTS).read_text("ascii") if Path(_RESULTS).exists() else ""
    try:
        return autotuning.read(text)
    except StagecError as error:
        raise CannotCompile.from_error(error) from error


def refuse_another(reported: Mapping[str, Any], target: GpuTarget) -> None:
    """Raise CannotCompile unless the device here is the target's. reported: the result of `descriptions.properties`."""

    def bare(value: object) -> str:  # a driver does not say which features of its architecture code may use
        return str(value).rstrip("af")

    rows = ((key, reported.get(key), target.figures[key]) for key in _SAME)
    others = [f"{key} is {here}, not {wanted}" for key, here, wanted in rows if bare(here) != bare(wanted)]
    if others:
        raise CannotCompile(f"this machine has another device: {', '.join(others)}", "device")


def _loads(library: str) -> bool:
    folders = [folder(package) for package in nvidia.TOOLKIT.folders]  # where the plugin looks too
    if any(folder and (folder / "lib" / library).exists() for folder in folders):
        return True
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
