"""In the program's process: write down each program that JAX compiles, and count its runs.

Each process has a file of rows, one for a compilation, and a file of counters that outlives a process that is ended.
The program does not notice: an error of the observer is a row, and the compilation goes on.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import functools
import importlib.metadata
import inspect
import json
import math
import mmap
import os
import re
import signal
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax._src import compilation_cache, compiler, distributed, hardware_utils, monitoring, pjit
from jax._src.interpreters import pxla
from jaxlib.mlir import ir

from stagec.core.builds import extensions
from stagec.core.builds.platforms import GPUS
from stagec.frontends.common import patched
from stagec.frontends.jax import cache_keys
from stagec.jaxcache import jax_entries
from stagec_rehearse import FOLDER, running, standing_in
from stagec_rehearse.values import Values, write

if TYPE_CHECKING:
    from stagec_rehearse.slices import Slice

_MOST = 1 << 16
"""Programs that a process counts the runs of."""
_LARGE = 1 << 20
"""Bytes of a constant that a row names: it is in the program, in its key and in each copy of its executable."""
_SETTINGS = {
    "jax_enable_x64": "False",
    "jax_default_matmul_precision": "None",
    "jax_default_prng_impl": "threefry2x32",
    "jax_debug_nans": "False",
}
"""Settings that change what JAX compiles, and that programs set, with JAX's defaults."""
_PLATFORM = os.environ.get(f"{FOLDER}_PLATFORM", "cpu")
_IS_GPU = _PLATFORM in GPUS
_QUICK = (("xla_gpu_autotune_level", "0"), ("xla_gpu_enable_command_buffer", ""))
"""XLA times no kernels: there is nothing to time on a virtual device, and it took 22 of 23 s of a training step. And it
launches each kernel by itself, which asks less of the driver than a graph of all. A key has neither."""
_TENSOR = re.compile(r"tensor<((?:\d+x)*)([\w]+)(?:<.*>)?>")


def start() -> None:
    """Observe the JAX of this process."""
    folder = Path(os.environ[FOLDER])
    observer = _Observer(folder)
    patched.COMPILE.forever(observer.compile)
    if jax.config.values["jax_enable_compilation_cache"]:  # with a folder, in which the program is to find all
        monitoring.register_event_listener(observer.event)
        import stagec.jax_cache  # noqa: F401
    # JAX's own fast ways call executables from C++, where nobody can count.
    pjit._get_fastpath_data = lambda *_, **__: None
    pxla.MeshExecutable.create_cpp_call = lambda *_: None  # type: ignore[method-assign]
    run = pxla.ExecuteReplicated.__call__

    @functools.wraps(run)
    def counted(self: Any, *args: Any) -> Any:
        observer.ran(self.xla_executable)
        if not _IS_GPU or self.backend.platform == "cpu":
            return run(self, *args)
        values = observer.values_of(self, args)
        results = run(self, *args)
        _clear(results)
        observer.write_values(self, results, values)
        return results

    pxla.ExecuteReplicated.__call__ = counted  # type: ignore[method-assign]
    if _IS_GPU:
        compiler.backend_compile_and_load = functools.partial(_quickly, compiler.backend_compile_and_load)
        # JAX asks the kernel before it starts XLA's plugin.
        hardware_utils.has_visible_nvidia_gpu = lambda: True
        hardware_utils.num_available_amd_gpus = lambda **_: 1
    address, slice_address, processes, number = os.environ.get(f"{FOLDER}_JOINED", "  1 0").split(" ")
    if _PLATFORM == "tpu":
        from stagec_rehearse.slices import Slice

        target = running.tpus(os.environ[f"{FOLDER}_DEVICE"], int(processes))
        observer.slice = Slice(target, slice_address, int(processes), int(number))
    if address:
        join = distributed.State.initialize

        # Whatever the program says, or finds in the variables of a cluster.
        @functools.wraps(join)
        def joining(self: Any, *args: Any, **kwargs: Any) -> None:
            named = inspect.signature(join).bind(self, *args, **kwargs).arguments
            named |= {"coordinator_address": address, "num_processes": int(processes), "process_id": int(number)}
            join(**named)

        distributed.State.initialize = joining  # type: ignore[method-assign]
        if _PLATFORM != "cpu":
            from jax.experimental import multihost_utils

            # Where results are zeros, no process has the value of another. `jax.device_put` compares them over a mesh.
            multihost_utils.assert_equal = lambda tree, *_, **__: multihost_utils.process_allgather(tree, tiled=True)
    versions = {
        name: importlib.metadata.version(name) for name in ("jax", "jaxlib", *_PLUGINS[_PLATFORM]) if _has(name)
    }
    (folder / f"{os.getpid()}.versions").write_text(json.dumps(versions), "utf-8")
    stacks = (folder / f"{os.getpid()}.stack").open("w")
    faulthandler.register(signal.SIGUSR2, stacks, all_threads=False)


def _quickly(compile_: Callable[..., Any], backend: Any, module: Any, devices: Any, options: Any, *more: Any) -> Any:
    if backend.platform != "cpu":
        options.env_option_overrides = [*options.env_option_overrides, *_QUICK]
    return compile_(backend, module, devices, options, *more)


def _has(distribution: str) -> bool:
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


_PLUGINS = {
    "cpu": (),
    "cuda": ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt"),
    "rocm": ("jax-rocm7-plugin", "jax-rocm7-pjrt", "jax-rocm10-plugin", "jax-rocm10-pjrt"),
    "tpu": ("libtpu",),
}


def _clear(results: Any) -> None:
    """Make results zeros. No kernel has written them, so the memory may have what was there before.

    The memory of a virtual device is this process's, and whole pages are given back to the kernel.
    """
    for result in jax.block_until_ready(jax.tree.leaves(results)):
        for shard in getattr(result, "addressable_shards", ()):
            at, size = shard.data.unsafe_buffer_pointer(), shard.data.nbytes
            first = min(-at % mmap.PAGESIZE, size)
            pages = (size - first) // mmap.PAGESIZE * mmap.PAGESIZE
            ctypes.memset(at, 0, first)
            if pages:
                _LIBC.madvise(ctypes.c_void_p(at + first), ctypes.c_size_t(pages), mmap.MADV_DONTNEED)
            ctypes.memset(at + first + pages, 0, size - first - pages)


_LIBC = ctypes.CDLL(None)


class _Observer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._process = 0
        self._indices: dict[int, int] = {}
        self._kept: list[Any] = []
        self._key = compilation_cache.get_cache_key  # JAX's own, which `stagec.jax_cache` replaces
        self._here = threading.local()
        self._values = Values() if os.environ.get(f"{FOLDER}_VALUES") else None
        self._zeros: dict[int, str] = {}
        self.slice: Slice | None = None

    def _open(self) -> None:
        """A forked process has files of its own."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._rows = (self._folder / f"{self._process}.rows").open("a", encoding="utf-8")
        counters = (self._folder / f"{self._process}.runs").open("w+b")
        counters.truncate(8 * _MOST)
        self._runs = memoryview(mmap.mmap(counters.fileno(), 8 * _MOST)).cast("Q")
        self._written = 0
        self._indices.clear()

    def compile(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compile as JAX does, and write the row."""
        backend, computation, devices, options, *_ = args
        if self._values and getattr(self._values.here, "computing", False):
            return before(*args, **kwargs)
        row: dict[str, Any] = {"line": _line(sys._getframe(1))}
        try:
            row |= _described(computation)
            key = cache_keys.recorded(lambda: self._key(computation, devices, options, backend))
            # What belongs to this machine, or to its packages, stays out of the file.
            plain = {jax_entries.TOPOLOGY: b"", jax_entries.COMPRESSION: b"zlib"}
            # With Python 3.14 JAX packs files as zstandard does whose keys say zlib (`cache_keys.compression`).
            packed = "zlib" if getattr(compilation_cache, "zstd", None) is None else "zstandard"
            mesh = _mesh(computation) or [int(devices.size)]
            ids = [device.id for device in devices.flat] if _PLATFORM == "tpu" else []
            key = dataclasses.replace(key.with_parts(plain), mesh=mesh, ids=ids, zlib=packed)
            if args[4]:
                row["not_kept"] = "it calls back into Python, and JAX keeps no such program"
            elif _PLATFORM != "cpu" and backend.platform == "cpu":
                row["not_kept"] = "it is for the CPU beside the device"
            else:
                row["hex"] = key.to_bytes().hex()
            settings = ((name, str(getattr(jax.config, name))) for name in _SETTINGS)
            row["settings"] = {name: value for name, value in settings if value != _SETTINGS[name]}
            row["options"] = {name: str(value) for name, value in options.env_option_overrides}
            row["devices"] = int(devices.size)
        except Exception as error:  # noqa: BLE001  # the program must not notice
            row["unknown"] = f"{type(error).__name__}: {error}"
        if self.slice:
            self.slice.here.module, self.slice.here.donated = computation, row.get("donated", [])
        began, self._here.hits = time.perf_counter(), 0
        try:
            executable = before(*args, **kwargs)
        except Exception as error:
            self._write({**row, "error": str(error).partition("\n")[0]}, None)
            raise
        finally:
            if self.slice:
                self.slice.here.module = None
        row["seconds"] = time.perf_counter() - began
        row["hits"] = self._here.hits
        try:
            row |= _measured(executable)
        except Exception as error:  # noqa: BLE001
            row["unknown"] = f"{type(error).__name__}: {error}"
        if _IS_GPU and backend.platform != "cpu" and (needs := standing_in.needs(executable)):
            main, held = _main(computation)
            row["not_run"] = needs
            executable = standing_in.stand_in(executable, computation, main, held, backend, args[5], options)
        if self._values:
            self._values.compiled(executable, computation)
        self._write(row, executable)
        return executable

    def values_of(self, called: Any, arguments: Sequence[Any]) -> list[np.ndarray] | str:
        """Return what a call computes, or why that is not known; "" if nobody asked for it."""
        if not self._values:
            return ""
        if called.mut:
            return "it changes arrays in place"
        kept = [argument for position, argument in enumerate(arguments) if position in called.kept_var_idx]
        return self._values.of(called.xla_executable, kept)

    def write_values(self, called: Any, results: Any, values: list[np.ndarray] | str) -> None:
        """Write what a call computes into its results, or a row that says why they are zeros."""
        why = values if isinstance(values, str) else write(jax.tree.leaves(results), values)
        index = self._indices.get(id(called.xla_executable))
        if why and index is not None and index not in self._zeros:
            self._zeros[index] = why
            with (self._folder / f"{self._process}.zeros").open("w", encoding="utf-8") as file:
                json.dump(self._zeros, file)

    def event(self, event: str, **_: Any) -> None:
        """Take an event of JAX: an executable was found in its cache."""
        self._here.hits = int(event == "/jax/compilation_cache/cache_hits") or getattr(self._here, "hits", 0)

    def _write(self, row: dict[str, Any], executable: Any) -> None:
        with self._lock:
            self._open()
            self._rows.write(json.dumps(row) + "\n")
            self._rows.flush()
            if executable is not None:
                self._indices[id(executable)] = self._written
                self._kept.append(executable)  # or another may get its id
            self._written += 1

    def ran(self, executable: Any) -> None:
        """Count a run."""
        index = self._indices.get(id(executable))
        if index is not None and index < _MOST and self._process == os.getpid():
            self._runs[index] += 1


_STANDARD = ("stdlib", "platstdlib", "purelib", "platlib")
_LIBRARIES = tuple(
    os.path.join(path, "")
    for path in {
        *site.getsitepackages(),
        site.getusersitepackages(),
        *(sysconfig.get_path(name) for name in _STANDARD),
    }
)


def _line(frame: FrameType | None) -> str:
    """Return the innermost line that is the user's, as "train.py:19"; of a library's if nothing is the user's."""
    nearest = ""
    while frame:
        path = frame.f_code.co_filename
        here = f"{_short(path)}:{frame.f_lineno}"
        if not path.startswith(("<", *extensions.sources())):
            if not path.startswith(_LIBRARIES) and "/site-packages/" not in path:
                return here
            if not nearest and f"{os.sep}jax{os.sep}" not in path:
                nearest = here
        frame = frame.f_back
    return nearest


def _short(path: str) -> str:
    """Return a path that is the same on another machine: below the folder of the program, or of a library."""
    for folder in (os.path.join(os.getcwd(), ""), *sorted(_LIBRARIES, key=len, reverse=True)):
        if path.startswith(folder):
            return path[len(folder) :]
    return path.rpartition("/site-packages/")[2]


def _described(module: ir.Module) -> dict[str, Any]:
    """Return what JAX lowered: the types of arguments and results, and the attributes that say where they lie."""
    main, arguments = _main(module)
    function = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    return {
        "name": ir.StringAttr(module.operation.attributes["sym_name"]).value,
        "arguments": [_aval(each) for each in function.inputs],
        "results": [_aval(each) for each in function.results],
        "donated": [
            position
            for position, held in enumerate(arguments)
            if "tf.aliasing_output" in held or "jax.buffer_donor" in held
        ],
        "shardings": {
            str(position): str(held[name])
            for position, held in enumerate(arguments)
            for name in ("sdy.sharding", "mhlo.sharding")
            if name in held and "@empty_mesh" not in str(held[name])
        },
        "mesh": [
            str(each)
            for each in module.body.operations
            if each.operation.name == "sdy.mesh" and "empty_mesh" not in str(each)
        ],
        "constants": [*_constants(module)],
    }


def _mesh(module: ir.Module) -> list[int]:
    """Return the sizes of the axes over which a module splits arrays; [] without a mesh."""
    meshes = [each for each in module.body.operations if each.operation.name == "sdy.mesh"]
    sizes = [[int(size) for size in re.findall(r'"=(\d+)', str(each))] for each in meshes]
    return max(sizes, key=math.prod, default=[])


def _name(operation: Any) -> str:
    attributes = operation.operation.attributes
    return ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else ""


def _main(module: ir.Module) -> tuple[Any, list[Any]]:
    """Return a module's function, and the attributes of its arguments."""
    main = next(each for each in module.body.operations if _name(each) == "main")
    if "arg_attrs" in main.attributes:
        return main, [ir.DictAttr(each) for each in ir.ArrayAttr(main.attributes["arg_attrs"])]
    return main, [{} for _ in ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value).inputs]


def _aval(type_: ir.Type) -> str:
    """Return "f32[8,64]" for tensor<8x64xf32>."""
    match = _TENSOR.fullmatch(str(type_))
    if not match:
        return str(type_)
    dtype = {"i1": "bool"}.get(match[2], match[2].replace("ui", "u"))
    return f"{dtype}[{','.join(match[1].split('x')[:-1])}]"


def _constants(module: ir.Module) -> Iterator[dict[str, Any]]:
    """Yield the large constants of a module: their bytes, and what JAX knows of their line."""
    large: list[dict[str, Any]] = []

    def visit(operation: Any) -> ir.WalkResult:
        if operation.name == "stablehlo.constant":
            value = operation.attributes["value"]
            if isinstance(value, ir.DenseElementsAttr) and not value.is_splat:
                buffer: Any = value  # the stubs know that it is one from Python 3.12 on
                # MLIR has no view of bits.
                size = 0 if "xi1>" in str(value.type) else memoryview(buffer).nbytes
                if size > _LARGE:
                    large.append({"bytes": size, "aval": _aval(value.type)})
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    yield from large


def _measured(executable: Any) -> dict[str, Any]:
    """Return XLA's own figures: bytes and floating-point operations."""
    memory = executable.get_compiled_memory_stats()
    parts = {name: getattr(memory, f"{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")}
    taken = parts["argument"] + parts["output"] - parts["alias"] + parts["temp"]
    analysis = executable.cost_analysis()
    costs = analysis[0] if isinstance(analysis, list) else analysis
    return {"bytes": taken, "flops": float((costs or {}).get("flops", 0.0))}
