"""docs/weights.md: each of its blocks; adapters of flax, and weights of 8 and 4 bits.

Modules: `loader/replacing.py`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import stagec
from tests.building import COMPILER, ROOT, build, checked
from tests.signed import CURVES, write_curve

PAGE = (ROOT / "docs" / "weights.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
VERSION, SIGN, MODEL, MANIFEST, PAD, ADAPTERS, SERVE, COMMANDS, PRINTED, ALIGN = (block for _, block in BLOCKS)
VERSIONED = """
[manifest]
name = "models"
version = "1.0.0"
[functions.predict]
entry = "versioned:predict"
args = ["f32[3,3]", "f32[1,3]"]
bind = { w = "weights.safetensors" }
targets = ["cpu-avx2"]
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(COMPILER), *sys.path])}


def run(*words: str | Path, cwd: Path = ROOT) -> str:
    command = [sys.executable, "-B", *map(str, words)]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=cwd, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed).standard_normal
    return {name: draw(shape).astype(np.float32) for name, shape in shapes.items()}


def adapter(rank: int, seed: int) -> dict[str, Any]:
    shapes = {"hidden.lora.lora_a": (64, rank), "hidden.lora.lora_b": (rank, 64)}
    return drawn({**shapes, "output.lora.lora_a": (64, rank), "output.lora.lora_b": (rank, 10)}, seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the page's model, of rank 8, and one of rank 4."""
    folder = tmp_path_factory.mktemp("lora")
    models = folder / "models"
    models.mkdir()
    (models / "lora.py").write_text(MODEL)
    (models / "models.toml").write_text(MANIFEST)
    (models / "lower.py").write_text(MODEL.replace("RANK = 8", "RANK = 4"))
    lower = MANIFEST.replace("models.lora", "models.lower").replace("64,8]", "64,4]").replace("f32[8,", "f32[4,")
    (models / "lower.toml").write_text(lower.replace('"adapter.safe', '"lower.safe').replace('= "models"', '= "lower"'))
    shapes = {"hidden.kernel": (64, 64), "hidden.bias": (64,), "output.kernel": (64, 10), "output.bias": (10,)}
    save_file(drawn(shapes, 0), models / "base.safetensors")
    save_file(adapter(8, 1), models / "adapter.safetensors")
    save_file(adapter(4, 2), models / "lower.safetensors")
    for manifest in ("models", "lower"):
        build(f"models/{manifest}.toml", folder, folder)
    return folder


def test_another_version_signed(folder: Path, tmp_path: Path) -> None:
    _, public = write_curve(tmp_path, "release-ec", CURVES["P-256"])
    assert SIGN == "stagec sign v2.safetensors --model-signing --key release-ec.pem\n"
    save_file(adapter(8, 3), tmp_path / "v2.safetensors")
    checked(*SIGN.split()[1:], cwd=tmp_path)
    with stagec.load(folder / "models.aot") as bundle:
        weights = tmp_path / "v2.safetensors"
        with bundle.with_weights(weights, "adapter.safetensors", keys=[public]) as second:
            assert not np.array_equal(*(one["predict"](np.ones((1, 64), np.float32)) for one in (bundle, second)))


def test_the_block_of_another_version(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(VERSIONED)
    (tmp_path / "versioned.py").write_text("def predict(w, x):\n    return x @ w\n")
    save_file({"w": np.eye(3, dtype=np.float32)}, tmp_path / "weights.safetensors")
    save_file({"w": 2 * np.eye(3, dtype=np.float32)}, tmp_path / "v2.safetensors")
    build("m.toml", tmp_path, tmp_path)
    given = "import numpy\nimages = numpy.ones((1, 3), numpy.float32)\n"
    assert run("-c", f"{given}{VERSION}print(scores)", cwd=tmp_path) == "[[2. 2. 2.]]\n"


def test_adapters(folder: Path, tmp_path: Path) -> None:
    for name, rank, seed in (("french", 4, 2), ("german", 8, 4)):
        save_file(adapter(rank, seed), tmp_path / "given.safetensors")
        (tmp_path / "pad.py").write_text(PAD)
        run("pad.py", "given.safetensors", folder / f"{name}.safetensors", cwd=tmp_path)
    (tmp_path / "adapters.py").write_text(ADAPTERS)
    told = run(tmp_path / "adapters.py", cwd=folder)
    assert re.fullmatch(r"french \d\ngerman \d\n", told)
    x = np.random.default_rng(5).standard_normal((8, 64)).astype(np.float32)
    with stagec.load(folder / "models.aot") as bundle, stagec.load(folder / "lower.aot") as lower:
        adapted = bundle.with_weights(folder / "french.safetensors", "adapter.safetensors")
        padded, small = adapted["predict"](x), lower["predict"](x)
        # Equal where this was written; the order of additions is the executable's.
        np.testing.assert_allclose(padded, small, rtol=0, atol=1e-6 * float(np.abs(small).max()))
        base = {
            path for path, weight in adapted["predict"].weights.items() if bundle["predict"].weights[path] is weight
        }
        assert base == {path for path in adapted["predict"].weights if "lora" not in path}
    command = [sys.executable, "-B", "-m", *SERVE.split(), "--port", "0"]
    with subprocess.Popen(command, env=ENVIRONMENT, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        told = ""
        for line in server.stdout:
            told += line
            if "listening" in line:
                break
        server.terminate()
        server.stdout.read()
    assert server.returncode == 0
    assert re.findall(r"^(predict\S*) ", told, re.MULTILINE) == ["predict", "predict.french", "predict.german"]


def test_weights_of_fewer_bits(tmp_path: Path) -> None:
    example = ROOT / "examples" / "quantized"
    quantize, accuracy = (line.split()[1:] for line in COMMANDS.splitlines())
    (tmp_path / "weights").mkdir()
    run(*quantize[:-1], tmp_path / quantize[-1])
    for name in ("int8", "float8", "int4"):
        written = tmp_path / "weights" / f"{name}.safetensors"
        assert written.read_bytes() == (example / written.name).read_bytes()
    bundle = build("examples/quantized/quantized.toml", tmp_path)
    told, shown = run(accuracy[0], bundle).splitlines(), PRINTED.splitlines()
    assert len(told) == len(shown) == 5
    for ours, wanted in zip(told[1:], shown[1:], strict=True):
        assert ours.split()[:2] == wanted.split()[:2]
        # One image of 597 where another CPU rounds in another way.
        assert abs(float(ours.split()[2][:-1]) - float(wanted.split()[2][:-1])) < 0.2
        assert float(ours.split()[3]) == pytest.approx(float(wanted.split()[3]), abs=0.01)


def test_aligned_files(tmp_path: Path) -> None:
    for length in range(8):
        save_file({"w" * (8 * length + 1): np.ones(32, np.float32), "b": np.ones(16, np.float32)}, tmp_path / "w")
        run("-c", ALIGN, "w", "aligned.safetensors", cwd=tmp_path)
        done = subprocess.run(
            [sys.executable, "-m", "stagec", "inspect", "aligned.safetensors"],
            env=ENVIRONMENT,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "do not start at" not in done.stdout
        assert load_file(tmp_path / "aligned.safetensors").keys() == load_file(tmp_path / "w").keys()
