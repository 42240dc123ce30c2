"""Which executables of one release of jaxlib another one runs with the same bits: writes the loader's table.

    python tools/crossing.py --folder FOLDER PYTHON PYTHON...

PYTHON: of an environment with a jaxlib, numpy, scipy and flatbuffers, for each release. This Python has JAX, of a
release that all of them can read. It exports the programs below. Each environment compiles them for AVX2 with two
partitions, as an action does, and each of them loads and calls every one in child processes, on two sets of random
arrays. The results are compared with those of the jaxlib that compiled it, bit for bit, and counted for the kinds of
operations in the executable (`stagec.core.data.thunks`). So a program that differs says something about all kinds in
it, except where a smaller program has said so before of one of them. A kind that only such programs have is unproven.
The table, `compiler/stagec/bundle/crossings.json`, names the build-ids of what was measured: with that of a wheel
those of the same release for other Pythons, which have the same XLA. Rows of other machines and of other pairs stay
there. FOLDER keeps what was made, so that a stopped run goes on: in a folder whose name follows everything that what is
in it depends on.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parent.parent
SEEDS = (0, 1)
UNARY = (
    "abs acos acosh asin asinh atan atanh cos cosh sin sinh tan tanh ceil floor round sign exp exp2 expm1 log log1p "
    "logistic cbrt sqrt rsqrt bessel_i0e bessel_i1e digamma erf erfc erf_inv lgamma"
)
BINARY = "add atan2 div max mul nextafter pow rem sub"
SPECIAL = "igamma igammac polygamma zeta"
COMPLEX = "exp log sin cos tanh sqrt abs"
INTEGERS = "bitwise_and div rem shift_left shift_right_arithmetic"
SECONDS = 120
"""How long a program may take."""


def main() -> int:
    """Run the command line; return the exit status."""
    sys.path[:0] = [str(ROOT), str(ROOT / "compiler")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", help="one for each release")
    parser.add_argument("--folder", type=Path, required=True, help="for what is made: programs, executables, results")
    parser.add_argument("--programs", default="", help="a regular expression of their names (default: all; no table)")
    parser.add_argument("--role", choices=("write", "read"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder: Path = options.folder
    if options.role == "write":
        write(folder)
    elif options.role == "read":
        for writer in options.pythons:
            read(folder, writer)
    else:
        builds = _builds(options.pythons)
        folder /= _key(builds)
        (folder / "exported").mkdir(parents=True, exist_ok=True)
        export(folder, options.programs)
        for python in options.pythons:
            _as("write", python, folder, ["-"])
        for python in options.pythons:
            _as("read", python, folder, [*builds])
        measured = compared(folder, builds)
        print(json.dumps(measured["pairs"], indent=1))
        if not options.programs:
            merge(measured)
    return 0


def _builds(pythons: Sequence[str]) -> dict[str, str]:
    """Return the jaxlib of each environment, and its build-id. Their scipy must be one: LAPACK is in it."""
    ask = """
import scipy
from stagec.pjrt import compatibility
print(compatibility.version(), compatibility.build_id(), scipy.__version__)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "compiler")}
    told = [
        subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True, env=env).stdout.split()
        for python in pythons
    ]
    if len({scipy for *_, scipy in told}) > 1:
        sys.exit(f"the environments have several releases of scipy: {', '.join(scipy for *_, scipy in told)}")
    return {release: build_id for release, build_id, _ in told}


def _key(builds: Mapping[str, str]) -> str:
    """Return the digest of all that what is made here depends on: code, jaxlibs, the JAX that exports, the CPU."""
    import jax

    from stagec.pjrt import compatibility, host

    digest = hashlib.sha256()
    for word in (*builds.values(), jax.__version__, compatibility.build_id(), *sorted(host.cpu_flags())):
        digest.update(f"{word}\n".encode())
    code = [*(ROOT / "compiler").rglob("*.py"), *(ROOT / "tests" / "zoo").glob("*.py")]
    for file in (Path(__file__), *sorted(code)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _as(role: str, python: str, folder: Path, words: Sequence[str]) -> None:
    print(f"{role} with {python}", flush=True)
    subprocess.run([python, "-B", __file__, "--role", role, "--folder", folder, *words], check=True)


def _whole(file: Path, data: bytes) -> None:
    """Write a file whole: a process that is ended leaves no half of one, which the next run would take for all."""
    from stagec.core.data import writing

    writing.named(str(file), [data])


def programs() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield programs with arrays for them: of each kind of operation several sizes, each kind alone where it can be."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def of(dtype: str, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    floats = ("bfloat16", "float16", "float32", "float64")
    numbers = (*floats, "complex64", "complex128", "int8", "int32")
    # A product's code follows its sizes: 0.12.0.1 has other bits than 0.10.2 for 8x8x8, and not for 33x17x9.
    small = [(3, 5, 2), (8, 16, 4), (33, 17, 9), (5, 7, 3), (17, 33, 65)]
    small += [(n, n, n) for n in (1, 2, 4, 8, 16, 24, 100)]
    large = [(1, 64, 64), (64, 64, 1), (64, 64, 64), (128, 300, 70), (512, 384, 256), (64, 1024, 64), (1024, 64, 10)]
    sizes = [*small, *large]
    for dtype in numbers:
        for m, k, n in sizes:
            yield f"dot {dtype} {m}x{k}x{n}", jnp.matmul, (of(dtype, m, k), of(dtype, k, n))
        yield f"dot {dtype} vector", jnp.matmul, (of(dtype, 300, 200), of(dtype, 200))
        yield f"dot {dtype} inner", jnp.vdot, (of(dtype, 5000), of(dtype, 5000))
        for batch, m, k, n in ((2, 3, 8, 3), (4, 24, 40, 12), (3, 16, 16, 16), (12, 64, 32, 64)):
            yield f"dot {dtype} batch {batch} {m}x{k}x{n}", jnp.matmul, (of(dtype, batch, m, k), of(dtype, batch, k, n))
            yield (
                f"dot {dtype} batch {batch} {m}x{k}x{n} transposed",
                lambda x, y: jnp.einsum("bqd,bkd->bqk", x, y),
                (of(dtype, batch, m, k), of(dtype, batch, n, k)),
            )
        yield f"dot {dtype} on the left", lambda x, y: x.T @ y, (of(dtype, 64, 16), of(dtype, 64, 8))
        yield f"dot {dtype} on the right", lambda x, y: x @ y.T, (of(dtype, 16, 64), of(dtype, 8, 64))
        yield f"dot {dtype} transposed", lambda x, y: x.T @ y.T, (of(dtype, 90, 40), of(dtype, 60, 90))
        for name in ("sum", "max", "cumsum"):
            for shape in ((7,), (1000,), (1 << 17,)):
                yield f"{name} {dtype} {shape}", getattr(jnp, name), (of(dtype, *shape),)
        yield f"sum {dtype} of columns", lambda x: x.sum(0), (of(dtype, 300, 200),)
        yield f"sum {dtype} of rows", lambda x: x.sum(1), (of(dtype, 300, 2000),)
        yield f"sort {dtype}", jnp.sort, (of(dtype, 5000),)
        yield f"argsort {dtype}", jnp.argsort, (of(dtype, 40, 50),)
        yield f"indices {dtype}", lambda x: (x[::2], x[jnp.array([2, 0])], x.at[1].add(x[0])), (of(dtype, 9, 4),)
    for narrow, wide in (("bfloat16", "float32"), ("float16", "float32"), ("int8", "int32"), ("float32", "float64")):
        for m, k, n in sizes:
            yield (
                f"dot {narrow} to {wide} {m}x{k}x{n}",
                lambda x, y, wide=wide: lax.dot(x, y, preferred_element_type=wide),
                (of(narrow, m, k), of(narrow, k, n)),
            )
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        yield f"dot {dtype}", lambda x, y: lax.dot(x, y, preferred_element_type="float32"), (of(dtype, 64, 64),) * 2
    for size in (64, 1024):
        square = of("float32", size, size)
        yield f"dot float32 highest {size}", lambda x: jnp.matmul(x, x, precision="highest"), (square,)
    for dtype in floats:
        for rank in (1, 2, 3):
            image, kernel = of(dtype, 2, 8, *[11] * rank), of(dtype, 4, 8, *[3] * rank)
            yield f"convolution {dtype} {rank}", lambda x, k, r=rank: lax.conv(x, k, (1,) * r, "SAME"), (image, kernel)
        yield (
            f"convolution {dtype} groups",
            lambda x, k: lax.conv_general_dilated(x, k, (2, 2), "SAME", feature_group_count=8),
            (of(dtype, 2, 8, 20, 20), of(dtype, 8, 1, 3, 3)),
        )
        yield (
            f"convolution {dtype} channels last",
            lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")),
            (of(dtype, 1, 32, 32, 16), of(dtype, 3, 3, 16, 32)),
        )
        yield f"window {dtype}", lambda x: lax.reduce_window(x, 0, lax.add, (2, 2), (2, 2), "SAME"), (of(dtype, 9, 9),)
        yield f"softmax {dtype}", jax.nn.softmax, (of(dtype, 40, 1000),)
        yield f"top_k {dtype}", lambda x: lax.top_k(x, 5), (of(dtype, 8, 200),)
        for name in UNARY.split():
            yield f"{name} {dtype}", getattr(lax, name), (of(dtype, 257),)
        for name in BINARY.split():
            yield f"{name} {dtype}", getattr(lax, name), (of(dtype, 257),) * 2
    for name in SPECIAL.split():
        yield f"{name} float32", getattr(lax, name), (of("float32", 33),) * 2
    for dtype in ("complex64", "complex128"):
        for name in COMPLEX.split():
            yield f"{name} {dtype}", getattr(jnp, name), (of(dtype, 257),)
        real = "float32" if dtype == "complex64" else "float64"
        for shape in ((8,), (60,), (97,), (1024,), (16, 12), (3, 4096)):
            yield f"fft {dtype} {shape}", jnp.fft.fft, (of(dtype, *shape),)
            yield f"ifft {dtype} {shape}", jnp.fft.ifft, (of(dtype, *shape),)
            yield f"rfft {dtype} {shape}", jnp.fft.rfft, (of(real, *shape),)
            yield f"irfft {dtype} {shape}", jnp.fft.irfft, (of(dtype, *shape),)
        yield f"fft2 {dtype}", jnp.fft.fft2, (of(dtype, 12, 20),)
    for name in INTEGERS.split():
        yield f"{name} int32", getattr(lax, name), (of("int32", 33),) * 2
    linalg = jnp.linalg
    for dtype in ("float32", "float64", "complex64", "complex128"):
        for n in (24,):
            a = of(dtype, n, n)
            spd = f"{dtype} {n}"
            # Without a product, which may have other bits itself.
            definite = lambda a: (a + a.conj().T) / len(a) + 8 * jnp.eye(len(a), dtype=a.dtype)  # noqa: E731
            yield f"cholesky {spd} alone", lambda a, definite=definite: linalg.cholesky(definite(a)), (a,)
            yield f"eigh {spd}", lambda a: tuple(linalg.eigh(a + a.conj().T)), (a,)
            yield f"triangular {spd}", lambda a: lax.linalg.triangular_solve(a, a, left_side=True), (a,)
            yield f"tridiagonal solve {spd}", lambda a: lax.linalg.tridiagonal_solve(a[0], a[1], a[2], a), (a,)
            for name, function in {
                "qr": lambda a: tuple(linalg.qr(a)),
                "qr with pivots": lambda a: lax.linalg.qr(a, pivoting=True),
                "svd": lambda a: tuple(linalg.svd(a)),
                "lu": lax.linalg.lu,
                "eig": lambda a: tuple(linalg.eig(a)),
                "solve": lambda a: linalg.solve(a, a[0]),
                "inverse": linalg.inv,
                "schur": lax.linalg.schur,
                "hessenberg": lax.linalg.hessenberg,
                "tridiagonal": lambda a: lax.linalg.tridiagonal(a + a.conj().T),
            }.items():
                yield f"{name} {spd}", function, (a,)
    seed, i, x = of("uint32"), of("int32"), of("float32", 12, 16)
    for implementation in ("threefry2x32", "rbg", "unsafe_rbg"):
        for name, draw in {
            "normal": jax.random.normal,
            "bits": jax.random.bits,
            "gamma": lambda key, shape: jax.random.gamma(key, 2.0, shape),
            "permutation": lambda key, shape: jax.random.permutation(key, shape[0]),
        }.items():
            yield (
                f"random {name} {implementation}",
                lambda s, impl=implementation, draw=draw: draw(jax.random.key(s, impl=impl), (500,)),
                (seed,),
            )
    yield "random bit generator", lambda s: lax.rng_bit_generator(jnp.full(4, s), (300,)), (seed,)
    yield "cond", lambda x, i: lax.cond(i > 0, jnp.sin, jnp.cos, x), (x, i)
    yield "switch", lambda x, i: lax.switch(i, [jnp.sin, jnp.cos, jnp.tan], x), (x, i)
    yield "loop", lambda x, i: lax.fori_loop(0, i + 3, lambda _, x: x * 2, x), (x, i)
    yield "while", lambda x: lax.while_loop(lambda x: abs(x).sum() < 9e3, lambda x: x * 2 + 1, x), (x,)
    yield "scan", lambda x: lax.scan(lambda c, row: (jnp.tanh(c + row), c.sum()), x[0], x), (x,)
    yield "scan of products", lambda x: lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x @ x.T, length=4), (x,)
    yield "slices", lambda x, i: lax.dynamic_update_slice(x, lax.dynamic_slice(x, (i, i), (2, 3)), (i, i)), (x, i)
    for count, dtypes in ((2, ("float32", "float64", "bfloat16", "int32")), (4, ("float32",))):
        mesh = jax.make_mesh((count,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        for dtype in dtypes:
            for name, function in {
                "psum": lambda x: lax.psum(x, "d"),
                "pmax": lambda x: lax.pmax(x, "d"),
                "all_gather": lambda x: lax.all_gather(x, "d"),
                "ppermute": lambda x: lax.ppermute(x, "d", [(0, 1), (1, 0)]),
                "all_to_all": lambda x: lax.all_to_all(x, "d", 1, 0, tiled=True),
                "psum_scatter": lambda x: lax.psum_scatter(x, "d", scatter_dimension=1, tiled=True),
                "axis_index": lambda x: x + lax.axis_index("d").astype(x.dtype),
            }.items():
                mapped = jax.shard_map(function, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"), check_vma=False)
                on = jax.sharding.NamedSharding(mesh, jax.P("d"))
                yield (
                    f"{name} {dtype} over {count}",
                    jax.jit(mapped, in_shardings=on),
                    (jax.ShapeDtypeStruct((16, 16), dtype),),
                )
    from tests.zoo import zoo

    params = {"w": of("float32", 16, 4), "b": of("float32", 4)}
    for batch in (1, 4, 64):
        yield f"zoo mlp {batch}", zoo.mlp, (params, of("float32", batch, 16))
    for length in (3, 5, 64):
        yield f"zoo attention {length}", zoo.attention, (of("float32", 2, length, 8),)
    yield "zoo loop", zoo.loop, (of("float32", 8),)
    yield "zoo factorize", zoo.factorize, (of("float32", 5, 5),)
    yield "zoo fourier", zoo.fourier, (of("complex64", 16),)
    yield "zoo draw", lambda s: zoo.draw(jax.random.key(s)), (seed,)
    narrow = of("bfloat16", 4), of("int8", 4), of("bool", 4), of("float32", 0, 3)
    yield "zoo narrow", zoo.narrow, narrow
    yield "zoo precise", zoo.precise, (of("float32", 8, 8),)
    yield "zoo named", lambda x, s: zoo.named(x, None, shift=s, power=3), (of("float32", 3), of("float32"))

    def step(params: Any, x: Any) -> Any:
        gradient = jax.grad(lambda params: -jnp.log(zoo.mlp(params, x)[:, 0]).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    for batch in (1, 8, 128):
        yield f"training {batch}", step, (params, of("float32", batch, 16))


def export(folder: Path, wanted: str) -> None:
    """Export the programs with this process's JAX. A program that JAX itself refuses is named, and left out."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    import jax
    import jax.export

    jax.config.update("jax_enable_x64", True)
    every = [jax.export.DisabledSafetyCheck.platform()]
    for name, function, args in programs():
        file = folder / "exported" / f"{_file(name)}.exported"
        if file.exists() or not re.search(wanted, name):
            continue
        try:
            jitted = function if hasattr(function, "lower") else jax.jit(function)
            checks = [*every, *map(jax.export.DisabledSafetyCheck.custom_call, _calls(jitted, args))]
            _whole(file, jax.export.export(jitted, disabled_checks=checks)(*args).serialize())
        except (NotImplementedError, TypeError, ValueError) as error:
            print(f"left out: {name}: {str(error).strip().splitlines()[0][:100]}", flush=True)


def _calls(jitted: Any, args: Any) -> set[str]:
    """Return the custom calls of a program: JAX promises nothing of some."""
    return set(re.findall(r"custom_call @([\w$.]+)", jitted.lower(*args).as_text()))


def _file(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)


def write(folder: Path) -> None:
    """Compile all programs with this process's jaxlib."""
    from stagec.backends.cpu import compiler
    from stagec.core.builds.specs import CpuTarget
    from stagec.pjrt import compatibility

    target = CpuTarget("crossing", "AVX2", 2, {})
    compiler.prepare_process(target)
    from stagec.core.messages.errors import StagecError
    from stagec.stages.exported import Exported
    from stagec.stages.lowering import lower_exported

    out = folder / compatibility.version()
    out.mkdir(exist_ok=True)
    for exported in sorted((folder / "exported").iterdir()):
        file = out / f"{exported.stem}.xla"
        if file.exists():
            continue
        try:
            program = lower_exported(Exported.deserialize(exported.read_bytes()), "cpu", {})
            compiled = program.compile(target=target)
        except (StagecError, ValueError) as error:
            print(f"{out.name} does not compile {exported.stem}: {str(error).splitlines()[0][:100]}", flush=True)
            continue
        _whole(file.with_suffix(".json"), compiled.description.to_json().encode())
        _whole(file, compiled.executable)


def read(folder: Path, writer: str) -> None:
    """Run the executables of a release with this process's jaxlib, in forks: the next goes on where one ends."""
    from jaxlib import _jax  # noqa: F401 - once, for all forks

    from stagec.bundle.description import Description
    from stagec.core.messages.refusal import Refusal
    from stagec.pjrt import clients, compatibility
    from stagec.pjrt.calling_convention import Signature
    from stagec.pjrt.making import random_arrays

    out = folder / writer / compatibility.version()
    out.mkdir(exist_ok=True)

    def run(file: Path) -> None:
        description = Description.from_json(file.with_suffix(".json").read_text())
        signature = Signature(file.stem, description)
        devices = clients.devices("cpu", description.nr_devices)
        signature.load(file.read_bytes(), tuple(description.custom_calls), devices, description.memory_kinds)
        lines = []
        for seed in SEEDS:
            arrays = random_arrays(description.in_avals, seed)
            lines += (f"{array.dtype.name} {array.tobytes().hex()}" for array in signature.call(arrays))
        _whole(out / f"{file.stem}.results", "\n".join(lines).encode())

    def done(file: Path) -> bool:
        return any((out / f"{file.stem}.{end}").exists() for end in ("results", "failed"))

    while left := [file for file in sorted((folder / writer).glob("*.xla")) if not done(file)]:
        child = os.fork()
        if child == 0:
            for file in left:
                signal.alarm(SECONDS)
                try:
                    run(file)
                except (ArithmeticError, Refusal, RuntimeError, ValueError) as error:
                    _whole(out / f"{file.stem}.failed", str(error).splitlines()[0][:120].encode())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:  # by the first one that said nothing
            how = f"{signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else "it ends the process"
            _whole(out / f"{next(file for file in left if not done(file)).stem}.failed", how.encode())


def compared(folder: Path, builds: Mapping[str, str]) -> dict[str, Any]:
    """Return what was measured here: the machine, the kinds of each writer, and each pair of releases.

    builds: the build-id of each release.
    """
    from stagec.bundle import crossings
    from stagec.core.data import thunks
    from stagec.pjrt import host

    kinds = {
        writer: {file.stem: sorted(thunks.kinds(file.read_bytes())) for file in (folder / writer).glob("*.xla")}
        for writer in builds
    }
    return {
        "architecture": host.architecture(),
        "cpu": sorted(crossings.vectors(host.cpu_flags())),
        "builds": {release: _same(release, build_id) for release, build_id in builds.items()},
        "kinds": {writer: sorted({kind for each in of.values() for kind in each}) for writer, of in kinds.items()},
        "pairs": {
            f"{writer} {reader}": _pair(folder / writer, kinds[writer], writer, reader)
            for writer in builds
            for reader in builds
            if writer != reader
        },
    }


def _same(release: str, build_id: str) -> list[str]:
    """Return a build-id, and those of the same release that the project knows for other Pythons."""
    from stagec.patches import known_builds

    rows = known_builds.rows()
    like = [row for row in rows if row.build_id == build_id]
    kind = [(row.library, row.version, row.architecture) for row in like]
    more = {row.build_id for row in rows if (row.library, row.version, row.architecture) in kind}
    return [build_id, *sorted(more - {build_id})]


def _pair(folder: Path, kinds: Mapping[str, Sequence[str]], writer: str, reader: str) -> dict[str, Any]:
    differs: dict[str, float] = {}
    fails: dict[str, str] = {}
    proven: set[str] = set()
    ran = equal = 0
    # The smallest first: what one kind does alone explains the larger programs.
    for name in sorted(kinds, key=lambda name: (len(kinds[name]), name)):
        failed = folder / reader / f"{name}.failed"
        at_home = folder / writer / f"{name}.results"
        if not at_home.exists():
            continue  # the writer does not run it either
        if not failed.exists():
            ran += 1
            error = _error(at_home.read_text(), (folder / reader / f"{name}.results").read_text())
            equal += error is None
            if error is None:
                proven.update(kinds[name])
                continue
        blamed = _blamed(kinds[name])
        if failed.exists() and not fails.keys() & blamed:
            fails |= dict.fromkeys(blamed, failed.read_text())
        elif not failed.exists():
            known = differs.keys() & blamed
            differs |= {kind: max(differs.get(kind, 0), error) for kind in known or blamed}
    return {
        "measured": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "programs": len([name for name in kinds if (folder / writer / f"{name}.results").exists()]),
        "ran": ran,
        "equal": equal,
        "differs": {kind: float(f"{error:.2g}") for kind, error in sorted(differs.items())},
        "fails": dict(sorted(fails.items())),
        "unproven": sorted({kind for each in kinds.values() for kind in each} - proven - differs.keys() - fails.keys()),
    }


def _blamed(kinds: Sequence[str]) -> set[str]:
    """Return the kinds that may be why a program differs: its own machine code only if it has nothing else."""
    from stagec.bundle import crossings

    return {kind for kind in kinds if kind not in crossings.OWN} or {*kinds}


def _error(first: str, second: str) -> float | None:
    """Return the largest difference of results, of the largest number; None if all have the same bits.

    It is infinite for integers that differ, and for NaN or an infinite number in place of another: no tolerance is for
    these.
    """
    import ml_dtypes  # noqa: F401 - names of dtypes
    import numpy as np

    if first == second:
        return None
    worst = 0.0
    for given, wanted in zip(first.splitlines(), second.splitlines(), strict=True):
        if given == wanted:
            continue
        dtype = np.dtype(given.split()[0])
        if dtype.name.startswith(("bool", "int", "uint")):
            return float("inf")
        data = (bytes.fromhex((*line.split(), "")[1]) for line in (given, wanted))
        a, b = (np.frombuffer(each, dtype).astype(np.complex128) for each in data)
        both = np.isfinite(a) & np.isfinite(b)
        parts = (each[~both].view(np.float64) for each in (a, b))  # of complex numbers
        if not np.array_equal(*parts, equal_nan=True):
            return float("inf")
        scale = max(np.abs(a[both]).max(initial=0), np.finfo(float).tiny)
        worst = max(worst, float((np.abs(a[both] - b[both]) / scale).max(initial=0)))
    return worst


def merge(measured: Mapping[str, Any]) -> None:
    """Write the table: what was measured here instead of what was there of the same machine and pair."""
    from stagec.bundle import crossings

    table = json.loads(crossings.TABLE.read_text("utf-8")) if crossings.TABLE.exists() else []
    same = [row for row in table if (row["architecture"], row["cpu"]) == (measured["architecture"], measured["cpu"])]
    before = same[0] if same else {"builds": {}, "kinds": {}, "pairs": {}}
    builds = {**before["builds"], **measured["builds"]}
    others = {release for release, ids in before["builds"].items() if ids != builds[release]}
    before["pairs"] = {pair: row for pair, row in before["pairs"].items() if not others & {*pair.split()}}
    for key in ("builds", "kinds", "pairs"):
        ordered = sorted(
            {**before[key], **measured[key]}.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])]
        )
        measured[key].clear()
        measured[key].update(ordered)
    rows = [*(row for row in table if row not in same), measured]
    rows.sort(key=lambda row: (row["architecture"], row["cpu"]))
    _whole(crossings.TABLE, _text(rows).encode())


def _text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table with a line for each pair, and for what is said of each release."""

    def lines(value: Any) -> str:
        if not isinstance(value, dict):
            return json.dumps(value)
        return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(each)}" for key, each in value.items()) + "\n }"

    tables = (",\n ".join(f"{json.dumps(key)}: {lines(value)}" for key, value in row.items()) for row in rows)
    return "[" + ",\n".join(f"{{\n {table}\n}}" for table in tables) + "]\n"


if __name__ == "__main__":
    sys.exit(main())
