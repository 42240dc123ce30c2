"""JAX's compilation cache, built: programs with JAX find every executable, and what differs is a miss.

Modules: `frontends/jax/cache_keys.py`, `jax_cache.py`, `jaxcache/jax_entries.py`, `building/for_jax.py`,
`cli/actions/jax_cache.py`, `cli/actions/jax_compile.py`, `cli/actions/jax_key.py`.
"""

import ctypes
import dataclasses
import functools
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jaxlib
import pytest
from jaxlib import xla_client
from jaxlib.mlir import ir

from stagec.hardware import x86
from stagec.jaxcache import jax_entries
from stagec.jaxcache.jax_entries import Key
from stagec.pjrt import host
from stagec.stages import mlir
from tests.building import COMPILER, build_jax_cache, checked, stagec, write_specs

SOURCES = Path(__file__).parent / "cached"
EIGHT = "--xla_force_host_platform_device_count=8"
HERE = next(isa for isa in reversed(list(x86.ISA)) if host.cpu_flags().issuperset(x86.ISA[isa].requires))
SMALL = """
[manifest]
name = "small"
version = "1"
jax_cache = true

[functions.double]
entry = "small:double"
args = ["f32[4]"]
targets = ["cpu-avx2"]
"""
DOUBLE = "def double(x):\n    return x * 2\n"
CALL = """
import json, sys
import jax, numpy as np
from small import double
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
result = jax.jit(double)(np.arange(4, dtype=sys.argv[1] if len(sys.argv) > 1 else "f4"))
print(json.dumps([events.count("cache_hits"), events.count("compile_requests_use_cache"), result.tolist()]))
"""
NO_MISSES = "could lead to execution errors such as SIGILL"


def process(
    code: str | Path, *arguments: str, folder: Path | None, cwd: Path, hook: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program with JAX, whose compilation cache is in `folder`. hook: whether it finds stagec, too."""
    site = [entry for entry in sys.path if entry.endswith("site-packages")]
    env = {
        "JAX_PLATFORMS": "cpu",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([*site, str(cwd), *([str(COMPILER)] if hook else [])]),
        **({"JAX_COMPILATION_CACHE_DIR": str(folder)} if folder else {}),
        **variables,
    }
    program = [str(code)] if isinstance(code, Path) else ["-c", code]
    command = [sys.executable, "-B", "-s", "-S", *program, *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def printed(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cached")
    shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def cache(workspace: Path) -> Path:
    return build_jax_cache("cached.toml", workspace / "out", workspace)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a cache of one function."""
    root = tmp_path_factory.mktemp("small")
    (root / "small.toml").write_text(SMALL)
    (root / "small.py").write_text(DOUBLE)
    build_jax_cache("small.toml", root / "out", root)
    return root


call = functools.partial(process, f"import stagec.jax_cache\n{CALL}")


@pytest.mark.skipif(list(x86.ISA).index(HERE) < list(x86.ISA).index("AVX2"), reason="the executables need AVX2")
def test_a_program_with_jax_compiles_nothing(cache: Path, workspace: Path) -> None:
    """Donation, static arguments, x64, 8 devices, Explicit axes, steps of flax, Equinox and nnx, with JAX's bits."""
    done = process(workspace / "serve.py", "--hook", folder=cache, cwd=workspace, XLA_FLAGS=EIGHT)
    found_all = printed(done)
    assert found_all["cache_hits"] == found_all["compile_requests_use_cache"] == len(found_all["results"]) == 14
    assert found_all["cache_misses"] == 0
    assert NO_MISSES not in done.stderr
    plain = process(workspace / "serve.py", folder=None, cwd=workspace, XLA_FLAGS=f"{EIGHT} --xla_cpu_max_isa=AVX2")
    assert printed(plain)["results"] == found_all["results"]
    assert printed(plain)["cache_hits"] == 0


@pytest.mark.pinned
def test_two_builds_are_the_same_bytes(cache: Path, workspace: Path) -> None:
    again = build_jax_cache("cached.toml", workspace / "again", workspace)
    files = {path.name: path.read_bytes() for path in cache.iterdir()}
    assert files == {path.name: path.read_bytes() for path in again.iterdir()}
    assert len(files) == 14 * 2 * 2 + 1  # two compressions, each with the file that JAX writes beside


def test_a_machine_that_the_manifest_names_needs_no_import(small: Path, tmp_path: Path) -> None:
    fingerprint = process(
        "import runpy; runpy.run_module('stagec.jax_cache', run_name='__main__')", folder=None, cwd=small
    )
    assert re.fullmatch("[0-9a-f]{16}\n", fingerprint.stdout), fingerprint.stderr
    named = f'jax_cache_machines = {{ cpu-avx2 = ["{fingerprint.stdout.strip()}"] }}\n'
    (tmp_path / "small.toml").write_text(SMALL.replace("jax_cache = true\n", f"jax_cache = true\n{named}"))
    (tmp_path / "small.py").write_text(DOUBLE)
    folder = build_jax_cache("small.toml", tmp_path / "out", tmp_path)
    assert printed(process(CALL, folder=folder, cwd=tmp_path, hook=False)) == [1, 1, [0, 2, 4, 6]]
    assert printed(process(CALL, folder=folder, cwd=tmp_path, hook=False, XLA_FLAGS=EIGHT)) == [0, 1, [0, 2, 4, 6]]
    assert printed(call(folder=folder, cwd=tmp_path, XLA_FLAGS=EIGHT)) == [1, 1, [0, 2, 4, 6]]


def test_without_the_import_it_is_a_miss(small: Path) -> None:
    assert printed(process(CALL, folder=small / "out" / "jax_cache", cwd=small)) == [0, 1, [0, 2, 4, 6]]


def _another_function(root: Path) -> dict[str, Any]:
    (root / "small.py").write_text(DOUBLE.replace("x * 2", "x + x"))
    return {}


@pytest.mark.parametrize(
    ("change", "arguments"),
    [
        (_another_function, ()),
        (lambda _: {"XLA_FLAGS": "--xla_cpu_enable_fast_min_max=true"}, ()),
        (lambda _: {"JAX_OPTIMIZATION_LEVEL": "O1"}, ()),
        (lambda _: {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}, ()),
        (lambda _: {"JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "all"}, ()),
        (lambda _: {}, ("i4",)),
    ],
    ids=["function", "flag", "level", "optimizations", "caches", "dtype"],
)
def test_what_differs_is_a_miss(
    small: Path, tmp_path: Path, change: Callable[[Path], Mapping[str, str]], arguments: tuple[str, ...]
) -> None:
    """What is the same is a hit: see `test_a_folder_may_be_moved`."""
    (tmp_path / "small.py").write_text(DOUBLE)
    changed = call(*arguments, folder=small / "out" / "jax_cache", cwd=tmp_path, **change(tmp_path))
    assert printed(changed) == [0, 1, [0, 2, 4, 6]]


def test_another_jaxlib_is_a_miss(small: Path) -> None:
    """The version is a part of the key by itself."""
    (file,) = (small / "out").glob("*.jax.key")
    (key,) = Key.read(file.read_bytes())
    names = {key.with_parts({"jax_lib version": version}).name() for version in (b"0.10.1", b"0.10.2")}
    assert len(names) == 2


def test_a_layer_has_the_files_of_the_folder(small: Path, tmp_path: Path) -> None:
    """The same bytes, whenever they were written."""
    layer = small / "out" / "jax_cache.tar"
    with tarfile.open(layer) as archive:
        assert {(member.mtime, member.uid, member.mode) for member in archive.getmembers()} == {(0, 0, 0o644)}
        for member in archive.getmembers():  # Debian 12's Python has no filter for extractall
            (tmp_path / member.name).parent.mkdir(exist_ok=True)
            (tmp_path / member.name).write_bytes(archive.extractfile(member).read())  # type: ignore[union-attr]
    folder, written = tmp_path / "jax_cache", small / "out" / "jax_cache"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in written.iterdir()
    }
    assert printed(call(folder=folder, cwd=small)) == [1, 1, [0, 2, 4, 6]]
    again = build_jax_cache("small.toml", tmp_path / "again", small)
    assert again.with_suffix(".tar").read_bytes() == layer.read_bytes()


def test_a_folder_may_be_moved(small: Path, tmp_path: Path) -> None:
    """Without XLA's own caches, its path is in no key; neither is that of the module."""
    moved = shutil.copytree(small / "out" / "jax_cache", tmp_path / "elsewhere")
    (tmp_path / "small.py").write_text(DOUBLE)
    assert printed(call(folder=moved, cwd=tmp_path)) == [1, 1, [0, 2, 4, 6]]


def test_a_machine_that_lacks_instructions_never_opens_the_file(small: Path) -> None:
    old = "from stagec.pjrt import host\nhost.cpu_flags = lambda: frozenset()\nimport stagec.jax_cache\n"
    done = process(old + CALL, folder=small / "out" / "jax_cache", cwd=small)
    assert printed(done) == [0, 1, [0, 2, 4, 6]]


def test_what_jax_compiles_itself_has_its_own_key(small: Path, tmp_path: Path) -> None:
    """A folder that is shared may be read by machines with fewer instructions."""
    variables = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    assert printed(call(folder=tmp_path, cwd=small, **variables)) == [0, 1, [0, 2, 4, 6]]
    (own,) = tmp_path.glob(f"*{jax_entries.SUFFIX}")
    ours = {path.name for path in (small / "out" / "jax_cache").iterdir()}
    assert own.name not in ours
    assert printed(process(CALL, folder=tmp_path, cwd=small, hook=False)) == [1, 1, [0, 2, 4, 6]]


def _zstd(frame: bytes) -> bytes:
    """Return the content of a frame as the package `zstandard` does, with the library that it wraps."""
    library = ctypes.CDLL("libzstd.so.1")
    size_of, decompress, is_error = library.ZSTD_getFrameContentSize, library.ZSTD_decompress, library.ZSTD_isError
    size_of.restype = decompress.restype = ctypes.c_size_t
    decompress.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    is_error.argtypes = [ctypes.c_size_t]
    size = size_of(frame, len(frame))
    if size > 1 << 24:
        raise MemoryError(size)
    content = ctypes.create_string_buffer(size + 1)
    written = decompress(content, size, frame, len(frame))
    if is_error(written):
        raise ValueError("not a frame")
    return content.raw[:written]


READERS: dict[str, list[Callable[[bytes], bytes]]] = {"zlib": [zlib.decompress], "zstandard": [_zstd]}
"""What JAX calls (jax/_src/compilation_cache.py: decompress_executable)."""
if sys.version_info >= (3, 14):
    from compression import zstd

    READERS["zstandard"].append(zstd.decompress)


@pytest.mark.parametrize("compression", jax_entries.COMPRESSIONS)
def test_a_frame_is_one_of_zlib_and_of_zstandard(compression: str) -> None:
    """The reader of zstandard refuses another checksum, so XXH64 is right for each length."""
    for size in (*range(100), 65535, 65536, 1 << 17, 300_000):
        data = os.urandom(size)
        for decompress in READERS[compression]:
            assert decompress(jax_entries.file(data, compression)) == bytes(4) + data


def test_the_hash_is_that_of_its_specification() -> None:
    assert jax_entries.xxh64(b"") == 0xEF46DB3751D8E999
    assert jax_entries.xxh64(b"abc") == 0x44BC2CF5AD770999


@pytest.mark.parametrize("compression", jax_entries.COMPRESSIONS)
@pytest.mark.parametrize(("size", "step"), [(100, 1), (2000, 1), (200_000, 997)])
def test_a_flipped_bit_is_an_error_or_nothing(compression: str, size: int, step: int) -> None:
    """Every bit of the heads and of the last block, and of small files; bits all over large ones."""
    data = random.Random(size).randbytes(size)
    whole = jax_entries.file(data, compression)
    bits = {*range(0, 8 * len(whole), step), *range(200), *range(8 * len(whole) - 200, 8 * len(whole))}
    harmless = []
    for bit in sorted(bits):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        for decompress in READERS[compression]:
            try:
                content = decompress(bytes(damaged))
            except Exception:  # noqa: BLE001 - whatever it is, JAX compiles
                continue
            assert content == bytes(4) + data, bit
            harmless.append(bit)
    # Bits that nobody reads: of zlib's first block, and in zstandard's head, where one says that there is a checksum.
    assert {*harmless} <= {"zlib": {19, 20, 21, 22, 23}, "zstandard": {34, 36}}[compression] | {
        8 * at + bit for at in range(2, len(whole), 65535 + 5) for bit in range(3, 8) if compression == "zlib"
    }


def test_a_damaged_entry_is_a_miss(small: Path, tmp_path: Path) -> None:
    """JAX compiles. Without the import it warns of the frame's checksum."""
    damaged = shutil.copytree(small / "out" / "jax_cache", tmp_path / "damaged")
    for path in damaged.glob(f"*{jax_entries.SUFFIX}"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    done = call(folder=damaged, cwd=small)
    assert printed(done)[0::2] == [0, [0, 2, 4, 6]]
    assert "the file of double for cpu-avx2 is not what was built" in done.stderr


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("log = cache_key.__dict__.pop('_log_cache_key_hash')", "cache_key._log_cache_key_hash = log"),
        ("get = cache_key.get; cache_key.get = lambda *given: get(*given) + '0'", ""),
    ],
    ids=["name", "parts"],
)
def test_a_jax_that_stagec_does_not_know_works_on(small: Path, before: str, after: str) -> None:
    lines = ["import jax", "from jax._src import cache_key", before, "import stagec.jax_cache", after]
    done = process("\n".join(lines) + CALL, folder=small / "out" / "jax_cache", cwd=small)
    assert printed(done) == [0, 1, [0, 2, 4, 6]]
    assert "UserWarning: stagec.jax_cache changes nothing: JAX " in done.stderr


EAGER = """
import jax, jax.numpy as jnp
TABLE = jnp.arange(4.0) * 2

def avals():
    x = jnp.ones(4) * 3
    return (jax.ShapeDtypeStruct(x.shape, x.dtype),)

def double(x):
    with jax.ensure_compile_time_eval():
        one = jnp.sin(jnp.zeros(())) + 1
    return x * TABLE * one
"""


def test_what_tracing_computes_is_not_the_program(tmp_path: Path) -> None:
    """Programs that JAX compiles and runs meanwhile."""
    manifest = SMALL.replace('args = ["f32[4]"]', 'avals = "small:avals"')
    (tmp_path / "small.toml").write_text(manifest)
    (tmp_path / "small.py").write_text(EAGER)
    folder = build_jax_cache("small.toml", tmp_path / "out", tmp_path)
    (entry,) = jax_entries.read((folder / jax_entries.INDEX).read_text())
    assert entry.module == "jit_double"
    hits, _, result = printed(call(folder=folder, cwd=tmp_path))
    assert (hits, result) == (1, [0, 2, 8, 18])


MANY = """
[manifest]
name = "many"
version = "1"
jax_cache = true
"""
FUNCTION = """
def f{i}(w, x):
    for _ in range({i} % 4 + 1):
        x = jnp.tanh(x @ w) + {i}
    return x
"""
SERVE = """
import stagec.jax_cache
import hashlib, json, jax, models, numpy as np
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
w, x = np.ones((8, 8), "f4"), np.ones((2, 8), "f4")
results = [np.asarray(jax.jit(getattr(models, f"f{i}"))(w, x)).tobytes().hex() for i in range(8)]
print(json.dumps([events.count("cache_hits"), events.count("compile_requests_use_cache"), results]))
"""


@pytest.mark.pinned
def test_a_server_of_many_functions(tmp_path: Path) -> None:
    tables = "".join(
        f'[functions.f{i}]\nentry = "models:f{i}"\nargs = ["f32[8,8]", "f32[2,8]"]\ntargets = ["cpu-avx2"]\n'
        for i in range(8)
    )
    (tmp_path / "many.toml").write_text(MANY + tables)
    functions = "".join(FUNCTION.format(i=i) for i in range(8))
    (tmp_path / "models.py").write_text(f"import jax.numpy as jnp\n{functions}")
    folder = build_jax_cache("many.toml", tmp_path / "out", tmp_path)
    done = process(SERVE, folder=folder, cwd=tmp_path)
    hits, requests, results = printed(done)
    assert hits == requests == 8
    assert NO_MISSES not in done.stderr
    plain = process(SERVE, folder=None, cwd=tmp_path, XLA_FLAGS="--xla_cpu_max_isa=AVX2")
    assert printed(plain) == [0, 8, results]


def test_arguments_on_a_device_that_the_program_chose(tmp_path: Path) -> None:
    """They are in the key; a manifest says in which ways programs call."""
    ways = 'targets = ["cpu-avx2"]\njax_cache_committed = [[], [0]]'
    (tmp_path / "small.toml").write_text(SMALL.replace('targets = ["cpu-avx2"]', ways))
    (tmp_path / "small.py").write_text(DOUBLE)
    folder = build_jax_cache("small.toml", tmp_path / "out", tmp_path)
    placed = CALL.replace("jax.jit(double)(", "jax.jit(double)(jax.device_put(").replace(
        '"f4"))', '"f4"), jax.devices()[0]))'
    )
    assert placed != CALL
    assert printed(call(folder=folder, cwd=tmp_path)) == [1, 1, [0, 2, 4, 6]]
    assert printed(process(f"import stagec.jax_cache\n{placed}", folder=folder, cwd=tmp_path)) == [1, 1, [0, 2, 4, 6]]
    described = [entry.described for entry in jax_entries.read((folder / jax_entries.INDEX).read_text())]
    assert described == ["double for cpu-avx2", "double for cpu-avx2, arguments 0 on a device"]


def test_compiler_options_are_those_of_jit(tmp_path: Path) -> None:
    """A target has them, and the program gives them to `jax.jit`, in the order of their names; levels as numbers."""
    options = {
        "optimization_level": 29,
        "xla_cpu_enable_fast_min_max": True,
        "xla_cpu_prefer_vector_width": 128,
        "xla_disable_hlo_passes": "algsimp",
    }
    fast = "[targets.fast]\nplatform = 'cpu'\nisa = 'AVX2'\n"
    fast += "".join(f"compiler_options.{name} = {json.dumps(value)}\n" for name, value in reversed(options.items()))
    fast = fast.replace("level = 29", 'level = "O2"')
    (tmp_path / "small.toml").write_text(SMALL.replace('"cpu-avx2"', '"fast"') + fast)
    (tmp_path / "small.py").write_text(DOUBLE)
    folder = build_jax_cache("small.toml", tmp_path / "out", tmp_path)
    given = CALL.replace("jax.jit(double)", f"jax.jit(double, compiler_options={options})")
    assert printed(process(f"import stagec.jax_cache\n{given}", folder=folder, cwd=tmp_path)) == [1, 1, [0, 2, 4, 6]]
    assert printed(call(folder=folder, cwd=tmp_path)) == [0, 1, [0, 2, 4, 6]]


CALLS_BACK = 'import jax\n\ndef double(x):\n    jax.debug.print("{}", x)\n    return x * 2\n'


def test_a_function_that_calls_back_is_refused(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "small.py").write_text(CALLS_BACK)
    write_specs("small.toml", tmp_path, tmp_path)
    words = ["--output", "key", "--executable", "small.double.cpu-avx2.spec", "--import-root", "."]
    done = stagec("action", "jax-key", "--spec", "small.double.spec", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "small.toml: functions.double.jax_cache: small:double calls back into Python, and JAX keeps no executable of "
        "such a function\n  write jax_cache = false for this function, or take the callback out\n"
    )


def _of_key(change: Callable[[Key], Key]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        (key,) = Key.read(data)
        return change(key).to_bytes()

    return changed


def _with_options(set_: Callable[[Any], object]) -> Callable[[bytes], bytes]:
    def change(key: Key) -> Key:
        options = xla_client.CompileOptions.ParseFromString(key.parts[jax_entries.OPTIONS])
        set_(options)
        return key.with_parts({jax_entries.OPTIONS: options.SerializeAsString()})

    return _of_key(change)


def _of_another_program(data: bytes) -> bytes:
    """A key whose name is right, behind the one of the program that is compiled: JAX would run that for both."""
    (key,) = Key.read(data)
    with mlir.context():
        module = ir.Module.parse(str(ir.Module.parse(key.parts[jax_entries.MODULE])).replace("2.0", "3.0"))
        other = io.BytesIO()
        module.operation.write_bytecode(other)
    assert other.getvalue() != key.parts[jax_entries.MODULE]
    return data + key.with_parts({jax_entries.MODULE: other.getvalue()}).to_bytes()


FORGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a name that leads elsewhere": (
        _of_key(lambda key: dataclasses.replace(key, module="../../jit_double")),
        "module: expected the name of a module",
    ),
    "a part twice": (
        lambda data: data.replace(b'"custom_hook": 0', b'"compression": 0'),
        "the key 'compression' appears twice",
    ),
    "parts in another order": (
        _of_key(lambda key: dataclasses.replace(key, parts=dict(reversed(key.parts.items())))),
        "the parts of a key are not in JAX's order",
    ),
    "a part that ends behind the file": (lambda data: data[:-1], "bytes, not the"),
    "no key": (lambda data: b"", "0 bytes, not the 0 that it says"),
    "another frame": (lambda data: data.replace(b'"zlib": "zl', b'"zlib": "lz'), "zlib: expected"),
    "another program's name": (
        _of_key(lambda key: dataclasses.replace(key, module="jit_another")),
        "the module jit_double is named jit_another",
    ),
    "a second program": (_of_another_program, "its keys are of several programs"),
    "flags": (
        _of_key(lambda key: key.with_parts({jax_entries.FLAGS: b"--xla_cpu_enable_fast_min_max=true"})),
        "XLA_FLAGS or LIBTPU_INIT_ARGS was --xla_cpu_enable_fast_min_max=true where the model ran",
    ),
    "a flag with two values": (
        _of_key(lambda key: key.with_parts({jax_entries.FLAGS: b"--xla_tpu_a=false--xla_tpu_a=true--xla_tpu_b=1"})),
        "--xla_tpu_a had two values in LIBTPU_INIT_ARGS or XLA_FLAGS where the model ran; give it once",
    ),
    "the same program with other flags": (
        lambda data: data + _of_key(lambda key: key.with_parts({jax_entries.FLAGS: b"--xla_tpu_a=true"}))(data),
        "its keys are of several programs",
    ),
    "a hook": (_of_key(lambda key: key.with_parts({jax_entries.HOOK: b"x"})), "added something by a hook of JAX"),
    "another release": (
        _of_key(lambda key: key.with_parts({jax_entries.JAXLIB: b"0.1.0"})),
        f"it is of another jaxlib than {jaxlib.__version__}",
    ),
    "an option that the target lacks": (
        _with_options(
            lambda options: setattr(options, "env_option_overrides", [("xla_cpu_enable_fast_min_max", True)])
        ),
        "its options are not the target's compiler_options",
    ),
    "a folder to write to": (
        _with_options(lambda o: setattr(o.executable_build_options.debug_options, "xla_dump_to", "/tmp/elsewhere")),
        "it sets options of XLA that may name files",
    ),
    "more devices": (
        _of_key(lambda key: dataclasses.replace(key, mesh=[2])),
        "it is for 1 devices, and the mesh has 2",
    ),
    "no module": (_of_key(lambda key: key.with_parts({jax_entries.MODULE: b"x"})), "it cannot be read: "),
    "no options": (
        _of_key(lambda key: key.with_parts({jax_entries.OPTIONS: b""})),
        "it is for 0 devices, and the mesh has 1",
    ),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_key_that_is_not_the_one_of_its_program_is_refused(small: Path, tmp_path: Path, forged: str) -> None:
    """A model runs in the action that writes it; the one that compiles it believes nothing."""
    change, said = FORGED[forged]
    (key,) = (small / "out").glob("*.jax.key")
    (tmp_path / "key").write_bytes(change(key.read_bytes()))
    words = ["--key", "key", "--output", "xla", "--entry", "json"]
    done = stagec("action", "jax-compile", "--spec", small / "out" / "small.double.cpu-avx2.spec", *words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "let stagec action jax-key write it again" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_fingerprint_that_is_none_is_refused(small: Path, tmp_path: Path) -> None:
    (key,) = (small / "out").glob("*.jax.key")
    spec = ("--spec", small / "out" / "small.double.cpu-avx2.spec", "--key", key)
    for wrong in ("12", "0123456789abcdeg"):
        words = ("--output", "xla", "--entry", "json", "--machine", wrong)
        done = stagec("action", "jax-compile", *spec, *words, cwd=tmp_path)
        said = f'--machine: not a fingerprint: "{wrong}" has not 16 digits and letters a to f'
        assert (done.returncode, done.stderr) == (2, f"{said}\n  write what python -m stagec.jax_cache prints there\n")
    assert [*tmp_path.iterdir()] == []


def test_flags_that_change_no_executable_are_part_of_its_name(small: Path, tmp_path: Path) -> None:
    """MaxText sets them, whatever the device."""
    (key,) = (small / "out").glob("*.jax.key")
    spec = ("--spec", small / "out" / "small.double.cpu-avx2.spec")
    flags = b"--xla_dump_large_constants--xla_tpu_spmd_rng_bit_generator_unsafe=true"
    (tmp_path / "key").write_bytes(_of_key(lambda key: key.with_parts({jax_entries.FLAGS: flags}))(key.read_bytes()))
    entries = []
    for name in (key, "key"):
        done = stagec("action", "jax-compile", *spec, "--key", name, "--output", "xla", "--entry", "json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        ((entry,), executable) = (
            json.loads((tmp_path / "json").read_text())["entries"],
            (tmp_path / "xla").read_bytes(),
        )
        entries.append((entry, executable))
    (before, plain), (after, told) = entries
    assert plain == told
    assert before["names"] != after["names"]
    assert after["parts"][jax_entries.FLAGS] == jax_entries.digest(flags)


@pytest.mark.parametrize(
    "name", ["../jit_double-" + 64 * "0", "/tmp/jit-" + 64 * "0", "jit_double", "a\0b-" + 64 * "0"]
)
def test_an_entry_whose_name_leads_elsewhere_is_refused(small: Path, tmp_path: Path, name: str) -> None:
    entry, executable = (next((small / "out").glob(f"*.jax.{suffix}")) for suffix in ("json", "xla"))
    document = json.loads(entry.read_text())
    document["entries"][0]["names"]["zlib"] = {"any CPU": name}
    (tmp_path / "forged.json").write_text(json.dumps(document))
    words = ["--output", tmp_path / "out", "--entry", f"a:{tmp_path / 'forged.json'}:{executable}"]
    done = stagec("action", "jax-cache", *words)
    assert done.returncode == 2
    assert "entries[0].names.zlib.any CPU: expected the name of an entry" in done.stderr
    assert {path.name for path in tmp_path.rglob("*")} <= {"forged.json", "out"}


def test_two_targets_of_one_key_are_refused(small: Path, tmp_path: Path) -> None:
    """How many threads a target has is in no key."""
    entry, executable = (next((small / "out").glob(f"*.jax.{suffix}")) for suffix in ("json", "xla"))
    twice = [word for name in "ab" for word in ("--entry", f"{name}:{entry}:{executable}")]
    done = stagec("action", "jax-cache", "--manifest", "m.toml", "--output", tmp_path / "out", *twice)
    assert done.returncode == 2
    assert done.stderr == (
        "m.toml: jax_cache: a and b are one entry to JAX, whose key has nothing in which they differ\n"
        "  leave one of them out\n"
    )


def test_a_signature_without_an_entry_is_refused(small: Path, tmp_path: Path) -> None:
    entry, executable = (next((small / "out").glob(f"*.jax.{suffix}")) for suffix in ("json", "xla"))
    (tmp_path / "none.json").write_text(jax_entries.to_json([]))
    words = ["--entry", f"a:{entry}:{executable}", "--entry", f"b:{tmp_path / 'none.json'}:{executable}"]
    done = stagec("action", "jax-cache", "--manifest", "m.toml", "--output", tmp_path / "out", *words)
    assert done.returncode == 2
    assert done.stderr == (
        "m.toml: jax_cache: b has no entry, and a program that calls it would compile\n"
        "  build its key and its entry again\n"
    )


def test_an_index_says_what_the_entries_are_for(small: Path) -> None:
    folder = small / "out" / "jax_cache"
    (entry,) = jax_entries.read((folder / jax_entries.INDEX).read_text())
    assert (entry.described, entry.module) == ("double for cpu-avx2", "jit_double")
    names = {name for table in entry.names.values() for name in table.values()}
    assert {path.name for path in folder.iterdir()} == {
        jax_entries.INDEX,
        *(name + suffix for name in names for suffix in (jax_entries.SUFFIX, jax_entries.USED)),
    }
    checked("action", "jax-cache", "--output", small / "empty")
    assert not jax_entries.read((small / "empty" / jax_entries.INDEX).read_text())
