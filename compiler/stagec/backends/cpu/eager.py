"""What a model computes while it is imported and traced: the same numbers on every machine.

A table of a module, weights that it draws, a few steps of training: JAX computes them at once, and the program has the
result as a constant. Numbers follow the CPU and its caches, the cores, and the libraries that choose kernels by them:

- XLA compiles for the machine: it sees the CPU, the cores and the seed of hash tables that the spec names, as for a
  target (`compiler`).
- YNNPACK chooses kernels by `cpuid`, and Eigen the size of its blocks: they see this CPU too (`cpuid`, everywhere).
- oneDNN makes kernels of its own for products: a variable switches them off, and Eigen's remain.
- NumPy, SciPy and other packages choose when they are loaded: variables name the CPU (`LIBRARIES`).

docs/reproducibility.md has the measurements, and what is not pinned. `another_cpu` finds it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from stagec.backends.cpu import compiler
from stagec.core.builds.specs import (
    COMPUTED_ON,
    EXAMINED_HERE,
    NOT_EXAMINED,
    Aarch64Target,
    AnyCpuTarget,
    CpuTarget,
    FunctionSpec,
)
from stagec.hardware import x86
from stagec.patches import another_cpu, machine_code
from stagec.pjrt import host

_THREADS = str(COMPUTED_ON["parallelism"])
LIBRARIES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "x86_64": {
            # The names of all releases since 1.23; NumPy passes over those that it does not know.
            "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512F AVX512CD AVX512_KNL AVX512_KNM AVX512_SKX AVX512_CLX "
            "AVX512_CNL AVX512_ICL AVX512_SPR",
            "OPENBLAS_CORETYPE": "Haswell",
            "BLIS_ARCH_TYPE": "haswell",
            "MKL_CBWR": "AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
        },
        "aarch64": {"OPENBLAS_CORETYPE": "ARMV8"},
    }
)
"""The variables by which packages take the CPU of `COMPUTED_ON` for that of the machine, by its architecture."""


def prepare_process() -> None:
    """Set what packages and XLA read when they are loaded, in the environment; neither may be imported yet."""
    prepare_libraries()
    os.environ.update(compiler.environment(_target(COMPUTED_ON)))
    os.environ.update({"TENSORFLOW_USE_CUSTOM_CONTRACTION_KERNEL": "false", "OMP_NUM_THREADS": _THREADS})
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"  # of PyTorch and TensorFlow; oneDNN passes over a name that it lacks


def prepare_libraries() -> None:
    """Set what packages read when they are loaded, and nothing that XLA reads: it computes as where a bundle runs."""
    os.environ.pop("NPY_ENABLE_CPU_FEATURES", None)  # NumPy refuses both
    os.environ.update(LIBRARIES.get(host.architecture(), {}))


def can_be_another_machine() -> bool:
    """Return whether this machine can show a process another CPU."""
    return another_cpu.possible()


def be_another_machine() -> None:
    """Let this process see the least CPU that builds, if this machine can show one; the first thing that it does."""
    with contextlib.suppress(machine_code.PatchError):
        another_cpu.show(x86.ISA[str(COMPUTED_ON["isa"])])


def _target(on: Mapping[str, object]) -> AnyCpuTarget:
    """Return the CPU of a spec's `computed_on` on a machine like this one, as a target."""
    parallelism, examined = int(str(on["parallelism"])), str(on.get("examined", EXAMINED_HERE))
    if host.architecture() == "aarch64":
        return Aarch64Target("", str(on["core"]), parallelism, {}, examined=examined)
    return CpuTarget("", str(on["isa"]), parallelism, {}, examined=examined)


@contextlib.contextmanager
def computing(spec: FunctionSpec) -> Iterator[None]:
    """Show the CPU of `spec.computed_on` to XLA and to the libraries that compute beside it, inside a `with` statement.

    Where that says `"examined": "none"`, it is the machine's own. `prepare_process` must have run. Nothing in this
    process may compile for a target meanwhile.
    Raises StagecError if this machine cannot run such code, or if this build of jaxlib is not known, or the system does
    not allow it.
    """
    from jaxlib import _jax  # noqa: F401  # it must be there

    if spec.computed_on.get("examined") == NOT_EXAMINED:
        yield
        return
    target = _target(spec.computed_on)
    # All aarch64 machines have the core, and an emulator may show another machine's flags.
    requires = x86.ISA[target.isa].requires if isinstance(target, CpuTarget) else ()
    missing = host.cpu_refusal(requires, host.cpu_flags())
    if missing:
        what = f"what it computes while it is traced cannot run here: {missing}"
        raise spec.problem("", what, f"build it on a machine that has {' '.join(sorted(requires))}")
    with contextlib.ExitStack() as changes:
        try:
            changes.enter_context(machine_code.patched(compiler.changes(target, everywhere=True)))
        except machine_code.PatchError as error:
            what = f"what it computes while it is traced would follow this machine: {error}"
            raise spec.problem("", what, error.write) from error
        yield


def find_code() -> None:
    """Import jaxlib, and find the sites that `computing` changes, for this process and its forks."""
    from jaxlib import _jax  # noqa: F401

    with contextlib.suppress(machine_code.PatchError):  # an export will say so
        compiler.changes(_target(COMPUTED_ON), everywhere=True)
