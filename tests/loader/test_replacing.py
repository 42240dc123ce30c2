"""Other weights in a bundle that is loaded: `Bundle.with_weights`.

Modules: `loader/bundle.py`, `pjrt/weights.py`.
"""

import contextlib
import gc
import hashlib
import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import stagec
from stagec.core.data.reading import RegularFile
from stagec.pjrt.executable import Executable
from tests.building import COMPILER, build, checked
from tests.bundles import build_large, only
from tests.signed import CURVES, write_curve, write_keys

MANIFEST = """
[manifest]
name = "m"
version = "1"

[functions.apply]
entry = "model:apply"
args = [{ w = "f32[5,3]", b = "f32[5]" }, "f32[n,3]"]
bind = { params = { file = "w.safetensors", external = EXTERNAL } }
targets = ["cpu-avx2"]
buckets = { n = [1, 4] }

[functions.plus]
entry = "arrays:plus"
frontend = "arrays"
args = ["f32[5]", { b = "f32[5]" }, "f32[]"]
bind = { params = { file = "w.safetensors", external = EXTERNAL }, scale = { file = "s.safetensors" } }
targets = ["cpu-avx2"]

[functions.baked]
entry = "model:baked"
args = ["f32[]"]
targets = ["cpu-avx2"]
"""
MODEL = """
import numpy as np

table = np.arange(2**18, dtype=np.float32)


def apply(params, x):
    return x @ params["w"].T + params["b"]


def baked(x):
    return table.sum() + table * x
"""
ARRAYS = """
def plus(x, params, scale):
    return x + params["b"] * scale
"""
W, B = np.arange(15, dtype=np.float32).reshape(5, 3), np.full(5, 7, np.float32)
X, Y = np.ones((4, 3), np.float32), np.arange(5, dtype=np.float32)


@pytest.fixture(scope="module", params=["false", "true"], ids=["inside", "beside"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replacing")
    (folder / "m.toml").write_text(MANIFEST.replace("EXTERNAL", request.param))
    (folder / "model.py").write_text(MODEL)
    (folder / "arrays.py").write_text(ARRAYS)
    save_file({"w": W, "b": B}, folder / "w.safetensors")
    save_file({"scale": np.array(2, np.float32)}, folder / "s.safetensors")
    return build("m.toml", folder, folder)


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """The same arrays with another `w`."""
    save_file({"w": -W, "b": B}, tmp_path / "v2.safetensors")
    return tmp_path / "v2.safetensors"


def has(bundle: stagec.Bundle, w: np.ndarray[Any, Any], b: np.ndarray[Any, Any] = B, scale: float = 2) -> bool:
    right = np.array_equal(bundle["apply"](X), X @ w.T + b) and np.array_equal(bundle["apply"](X[:1]), X[:1] @ w.T + b)
    return right and np.array_equal(bundle["plus"](Y), Y + b * np.float32(scale))


@pytest.mark.parametrize("mapped", [True, False])
def test_executables_and_equal_arrays_are_shared(
    built: Path, second: Path, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[None] = []
    load = Executable.load
    monkeypatch.setattr(Executable, "load", lambda *given: loads.append(None) or load(*given))
    with stagec.load(built, map_weights=mapped) as bundle:
        bundle.preload()
        assert len(loads) == 4
        view = bundle.with_weights(second, "w.safetensors")
        view.preload()
        assert has(view, -W)
        assert has(bundle, W)
        first, other = (one["apply"].weights for one in (bundle, view))
        b, w = "args[0]['b']", "args[0]['w']"
        assert (first[b] is other[b], first[w] is other[w]) == (True, False)
        # Of another file that is the same, nothing is loaded.
        same = bundle.with_weights(built.parent / "w.safetensors", "w.safetensors")
        assert same["apply"].weights == first
        # A view has views.
        save_file({"scale": np.array(3, np.float32)}, second.parent / "s.safetensors")
        third = view.with_weights(second.parent / "s.safetensors", "s.safetensors")
        assert has(third, -W, scale=3)
    assert len(loads) == 4
    # The others work on.
    assert has(view, -W)
    view.close()
    view.close()
    assert has(third, -W, scale=3)
    assert has(same, W)
    with pytest.raises(stagec.CallError, match="closed"):
        view.with_weights(second, "w.safetensors")


def test_a_view_loads_what_the_first_did_not(built: Path, second: Path) -> None:
    with stagec.load(built).with_weights(second, "w.safetensors") as view:
        assert has(view, -W)
        x = stagec.device_put(X)
        np.testing.assert_array_equal(view["apply"](x), X @ -W.T + B)
        assert "v2" not in view["apply"].usage.as_text()


def test_calls_with_arrays_of_jax(built: Path, second: Path) -> None:
    jnp = pytest.importorskip("jax.numpy")
    with stagec.load(built) as bundle, bundle.with_weights(second, "w.safetensors") as view:
        for one, w in ((bundle, W), (view, -W)) * 2:
            for _ in range(3):  # the last are those that jaxlib remembers
                np.testing.assert_array_equal(one["apply"](jnp.asarray(X)), X @ w.T + B)


def test_memory_is_freed_with_the_last_bundle_that_has_it(built: Path, second: Path) -> None:
    bundle = stagec.load(built)
    view = bundle.with_weights(second, "w.safetensors")
    assert has(bundle, W)
    assert has(view, -W)
    b, w, same, other = (
        weakref.ref(array._buffer)
        for one in (bundle, view)
        for weight in one["apply"].weights.values()
        for array in weight._arrays
    )
    assert b() is same()
    del view  # nobody closes it
    gc.collect()
    assert (b() is None, w() is None, other() is None) == (False, False, True)
    view = bundle.with_weights(second, "w.safetensors")
    assert has(view, -W)
    bundle.close()
    gc.collect()
    assert (b() is None, w() is None) == (False, True)
    assert has(view, -W)
    view.close()
    gc.collect()
    assert b() is None


def test_weights_change_under_load(built: Path, second: Path) -> None:
    bundle, ended = stagec.load(built), Event()
    served = [bundle]

    def call() -> int:
        calls = 0
        while not ended.is_set():
            one = served[0]
            result = one["apply"](X).tobytes()
            assert result in (first, other)
            calls += 1
        return calls

    first, other = ((X @ w.T + B).tobytes() for w in (W, -W))
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call) for _ in range(4)]
        try:
            for swap in range(100):
                path = second if swap % 2 else built.parent / "w.safetensors"
                served[0] = served[0].with_weights(path, "w.safetensors")
        finally:
            ended.set()
        assert all(done.result() for done in calls)


def refused(bundle: stagec.Bundle, *given: Any, **options: Any) -> tuple[str, str]:
    with pytest.raises(stagec.LoadError) as refusal:
        bundle.with_weights(*given, **options)
    return refusal.value.code, str(refusal.value)


def test_everything_that_is_wrong_is_told(built: Path, tmp_path: Path) -> None:
    bundle, path = stagec.load(built), tmp_path / "v2.safetensors"
    save_file({"w": W.T.copy(), "c": B, "table": np.zeros(2**18, np.float32)}, path)
    assert refused(bundle, path, "w.safetensors", sha256="0" * 64) == (
        "weights",
        f"{path}: cannot take the place of w.safetensors in {built}:\n"
        "  it lacks b (f32[5]); save it under this name\n"
        "  w is f32[3,5]; expected f32[5,3]\n"
        "  table is a constant in baked, which cannot change; make it an argument, and bind it\n"
        "  it has c, and nothing is bound to that; leave it out of the file",
    )
    save_file({"scale": np.array(2, np.float16), "other": B}, path)
    assert refused(bundle, path, "s.safetensors") == (
        "weights",
        f"{path}: cannot take the place of s.safetensors in {built}:\n"
        "  scale is f16[]; expected f32[]\n"
        "  it has other, and nothing is bound to that; leave it out of the file",
    )
    files = f"{path}: {built} has the files s.safetensors, w.safetensors"
    assert refused(bundle, path) == ("weights", f"{files}; say which")
    assert refused(bundle, path, "x.safetensors")[1].startswith(f"{files}; it has no x.safetensors: did you mean")
    assert has(bundle, W)


def test_weights_that_are_constants_are_refused_by_name(built: Path, tmp_path: Path) -> None:
    path = tmp_path / "v2.safetensors"
    with stagec.load(only(built, tmp_path / "m.aot", "baked")) as bundle:
        code, what = refused(bundle, path)
    assert (code, what) == (
        "weights",
        f"{path}: no argument in {tmp_path / 'm.aot'} is bound to weights; table of baked is a constant: make them "
        "arguments of the function, and name the file in `bind`",
    )


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: None, "cannot be read: No such file or directory"),
        (Path.mkdir, "cannot be read: it is a folder"),
        (os.mkfifo, "cannot be read: it is not a regular file"),
        (lambda path: path.write_bytes(b"x"), "not a safetensors file: the header runs over the end of the file"),
        (
            lambda path: path.write_bytes(b"\xff" * 8),
            "not a safetensors file: the header runs over the end of the file",
        ),
    ],
)
def test_files_that_are_no_weights(built: Path, tmp_path: Path, make: Callable[[Path], object], what: str) -> None:
    path = tmp_path / "v2"
    make(path)
    assert refused(stagec.load(built), path, "w.safetensors") == ("weights", f"{path}: {what}")


def test_a_digest_is_compared(built: Path, second: Path) -> None:
    sha256 = hashlib.sha256(second.read_bytes()).hexdigest()
    with stagec.load(built) as bundle:
        assert has(bundle.with_weights(second, "w.safetensors", sha256=sha256), -W)
        assert refused(bundle, second, "w.safetensors", sha256="0" * 64) == (
            "weights",
            f"{second}: cannot take the place of w.safetensors in {built}:\n"
            f"  its sha256 is {sha256}; expected {'0' * 64}",
        )


def test_what_is_read_and_not_mapped_is_what_was_checked(built: Path, second: Path) -> None:
    with stagec.load(built, map_weights=False) as bundle:
        view = bundle.with_weights(second, "w.safetensors")
        data = second.read_bytes()
        second.write_bytes(data[:-4] + bytes(4))  # into the same file
        with pytest.raises(stagec.LoadError, match="it changed since, or its sha256 is another"):
            view["apply"](X)
        assert has(bundle, W)


def test_a_signature_is_checked_before_anything_is_parsed(built: Path, second: Path, tmp_path: Path) -> None:
    private, public = write_curve(tmp_path, "key", CURVES["P-256"])
    _, stranger = write_keys(tmp_path, "stranger")
    bundle = stagec.load(built)
    assert refused(bundle, second, "w.safetensors", keys=[public])[0] == "signature"
    checked("sign", second, "--model-signing", "--key", private)
    assert has(bundle.with_weights(second, "w.safetensors", keys=[public]), -W)
    moved = second.rename(tmp_path / "v3.safetensors")
    signature = f"{second}.sig"
    code, what = refused(bundle, moved, "w.safetensors", keys=[public], signature=signature)
    assert (code, "was signed as v2.safetensors; give it that name" in what) == ("signature", True)
    moved.rename(second)
    assert refused(bundle, second, "w.safetensors", keys=[stranger])[0] == "signature"
    assert refused(bundle, second, "w.safetensors", keys=[])[0] == "key"
    assert refused(bundle, second, "w.safetensors", signature=signature)[0] == "key"
    second.write_bytes((2).to_bytes(8, "little") + b"{x")  # not a header, which nobody finds out
    code, what = refused(bundle, second, "w.safetensors", keys=[public])
    assert (code, "no file of it has the sha256" in what) == ("signature", True)
    second.write_bytes(b"x")  # nothing to parse, and nothing to hash
    assert refused(bundle, second, "w.safetensors", keys=[public])[0] == "weights"


@pytest.mark.parametrize("shown", range(1, 9))
def test_the_bytes_that_are_parsed_are_those_that_are_signed(
    built: Path, second: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: int
) -> None:
    """Somebody who can write into the file shows another one at one reading of it, and the signed one at all others."""
    private, public = write_curve(tmp_path, "key", CURVES["P-256"])
    right = second.read_bytes()
    length = int.from_bytes(right[:8], "little")
    header = json.loads(right[8 : 8 + length])
    places = {"w": [20, 80], "b": [0, 20]} if header["b"]["data_offsets"][0] else {"w": [0, 60], "b": [60, 80]}
    header = {name: {**header[name], "data_offsets": place} for name, place in places.items()}
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length
    other = right[:8] + text + right[8 + length :]
    checked("sign", second, "--model-signing", "--key", private)
    opened = second.stat().st_ino
    readings, read = 0, RegularFile.read

    def reading(file: RegularFile, start: int, size: int) -> bytes:
        nonlocal readings
        if os.fstat(file.descriptor).st_ino != opened:
            return read(file, start, size)
        readings += 1
        with second.open("r+b") as writer:
            writer.write(other if readings == shown else right)
        return read(file, start, size)

    monkeypatch.setattr(RegularFile, "read", reading)
    with stagec.load(built, map_weights=False) as bundle:
        given = None
        with contextlib.suppress(stagec.LoadError):
            given = bundle.with_weights(second, "w.safetensors", keys=[public])["apply"](X)
    assert shown <= readings if given is None else np.array_equal(given, X @ -W.T + B)


def test_a_file_that_does_not_fit_is_not_read(built: Path, tmp_path: Path) -> None:
    """A sparse file of terabytes is made in no time; to hash it takes hours."""
    _, public = write_curve(tmp_path, "key", CURVES["P-256"])
    path = tmp_path / "v2.safetensors"
    size = 2**42

    def write(header: object, text: str = "") -> None:
        data = (text or json.dumps(header)).encode()
        with path.open("wb") as file:
            file.write(len(data).to_bytes(8, "little") + data)
            file.truncate(8 + len(data) + size)

    start = time.process_time()
    with stagec.load(built) as bundle:
        write({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, size]}})
        expected = ["it lacks b (f32[5]); save it under this name", "w is f32[1099511627776]; expected f32[5,3]"]
        for options in ({}, {"sha256": "0" * 64}):
            code, what = refused(bundle, path, "w.safetensors", **options)
            assert (code, what.splitlines()[1:]) == ("weights", [f"  {line}" for line in expected])
        assert refused(bundle, path, "w.safetensors", keys=[public])[0] == "signature"
        write({}, "x")
        assert refused(bundle, path, "w.safetensors", keys=[public])[0] == "weights"
        write({})
        assert "its arrays end after 0 bytes" in refused(bundle, path, "w.safetensors")[1]
    assert time.process_time() - start < 5


def test_the_package_of_model_signing_verifies_signed_weights(second: Path, tmp_path: Path) -> None:
    verifying = pytest.importorskip("model_signing.verifying")
    private, public = write_curve(tmp_path, "key", CURVES["P-256"])
    folder = tmp_path / "release"
    folder.mkdir()
    weights = second.rename(folder / second.name)
    checked("sign", weights, "--model-signing", "--key", private)
    verifier = verifying.Config().use_elliptic_key_verifier(public_key=public)
    verifier.verify(folder, Path(f"{weights}.sig"))
    weights.write_bytes(b"x")
    with pytest.raises(ValueError, match="Signature mismatch"):
        verifier.verify(folder, Path(f"{weights}.sig"))


PROCESS = """
import sys
import numpy as np, stagec

def sizes():
    # MiB of memory that no file has, and of the file's pages, where n processes that share one have 1/n each.
    anonymous = mapped = 0
    for line in open("/proc/self/smaps"):
        first, *rest = line.split()
        if not first.endswith(":"):
            of_file = rest[-1:] == [path]
        elif first == "Anonymous:":
            anonymous += int(rest[0])
        elif first == "Pss:" and of_file:
            mapped += int(rest[0])
    return anonymous / 1024, mapped / 1024

bundle, weights, x = sys.argv[1], sys.argv[2], np.zeros(1, np.float32)
path = sys.argv[3]
bundle = stagec.load(bundle, policy="executable_only", check_weights="use")
bundle["small"](x)
before, _ = sizes()
if weights:
    bundle = bundle.with_weights(weights, "large.safetensors")
assert bundle["large"](x).tolist() == [1]
print("called", flush=True)
sys.stdin.readline()
after, mapped = sizes()
print(after - before, mapped, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("kind", ["inside", "beside", "replaced"])
def test_processes_have_one_copy_of_the_weights(tmp_path: Path, kind: str) -> None:
    count, mebibytes = 4, 64
    bundle, path = build_large(tmp_path, 2**24, kind == "beside"), tmp_path / "large.safetensors"
    weights: Path | str = ""
    if kind == "replaced":
        weights = tmp_path / "v2.safetensors"
        weights.write_bytes(path.read_bytes()[:-4] + bytes(4))
    mapped = {"inside": bundle, "beside": path, "replaced": weights}[kind]
    words = [sys.executable, "-c", PROCESS, str(bundle), str(weights), str(mapped)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(COMPILER), *sys.path])}
    processes = [
        subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]

    def answers() -> list[str]:
        return [process.stdout.readline() for process in processes if process.stdout]

    def go_on() -> None:
        for process in processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()

    assert answers() == ["called\n"] * count
    go_on()
    told = np.array([line.split() for line in answers()], float)
    go_on()
    assert [process.wait() for process in processes] == [0] * count
    anonymous, shared = told.sum(axis=0)
    print(f"{count} processes: {shared:.1f} MiB for {mebibytes} MiB of weights, and {anonymous:.1f} MiB of their own")
    assert abs(shared - mebibytes) < 1
    assert anonymous < mebibytes / 2
