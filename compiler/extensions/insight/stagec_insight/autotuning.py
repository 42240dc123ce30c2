"""`stagec autotune`: time kernels on the devices of this machine, for files that a manifest names.

jaxlib is imported when the process has been prepared for devices, not with this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from stagec.audit import inputs
from stagec.audit.inputs import Inputs
from stagec.backends.compilation import CannotCompile
from stagec.backends.gpu import local_gpus
from stagec.core.builds.specs import ExecutableSpec, GpuTarget
from stagec.core.messages.errors import Problem, StagecError, mistake
from stagec.core.messages.progress import Progress
from stagec.hardware import autotuning, gpu_devices
from stagec.hardware.autotuning import Result
from stagec.pjrt import compatibility

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
            return local_gpus.autotune(ir.Module.parse(lowered.module), spec.target, (lowered.nr_devices,))
    except CannotCompile as error:
        raise problem(error, spec) from error
