"""The tiny transformer's bundle: sharded training, prefill and decode give what the model gives on one device."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import stagec
from examples.transformer import model
from tests.building import COMPILER, ROOT, build, checked

WITHOUT_JAX = """
import runpy, sys
sys.modules["jax"] = None
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Bazel built, or a build here."""
    if "TINY_BUNDLE" in os.environ:
        return Path(os.environ["TINY_BUNDLE"])
    return build("examples/transformer/tiny.toml", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def bundle(path: Path) -> stagec.Bundle:
    return stagec.load(path)


@pytest.fixture(scope="module")
def state(bundle: stagec.Bundle) -> Any:
    return bundle["init"](np.uint32(0))


def test_training_and_writing_without_jax(path: Path) -> None:
    site_packages = [entry for entry in sys.path if entry.endswith("site-packages")]
    demo = ROOT / "examples" / "transformer" / "demo.py"
    done = subprocess.run(
        [sys.executable, "-B", "-c", WITHOUT_JAX, str(demo), str(path), str(ROOT / "LICENSE")],
        env={"PYTHONPATH": os.pathsep.join([*site_packages, str(COMPILER)])},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "target 'cpu-avx2' on 4 devices of this CPU\n" in done.stdout


def test_training_over_four_devices_is_training_on_one(bundle: stagec.Bundle, state: Any) -> None:
    rng, step = np.random.default_rng(0), jax.jit(model.train_step)
    ours, theirs = stagec.device_put(state), state
    for _ in range(3):
        tokens = rng.integers(128, size=(16, 64)).astype(np.int32)
        ours, loss = bundle["train_step"](ours, tokens, np.float32(0.001))
        theirs, expected = step(theirs, tokens, np.float32(0.001))
        np.testing.assert_allclose(float(loss), float(expected), rtol=1e-3)
    assert int(ours.step) == int(theirs.step) == 3
    for one, other in zip(jax.tree.leaves(ours.mean), jax.tree.leaves(theirs.mean), strict=True):
        np.testing.assert_allclose(one.numpy(), np.asarray(other), atol=0.05 * float(np.abs(other).max()))


def test_prefill_and_decode_give_the_logits_of_a_full_pass(bundle: stagec.Bundle, state: Any) -> None:
    # Larger weights than a new model's: with those, all logits are about the same.
    params = jax.tree.map(lambda weight: 5 * weight, state.params)
    tokens = np.random.default_rng(1).integers(128, size=(2, 24)).astype(np.int32)
    expected = np.asarray(jax.jit(model.forward)(params, tokens)[0])
    empty = np.zeros((2, 2, 128, 2, 16), ml_dtypes.bfloat16)
    cache = stagec.device_put(model.Cache(empty, empty, np.int32(0)))  # type: ignore[arg-type]
    found = {}
    for start, end in ((0, 16), (16, 20), *((at, at + 1) for at in range(20, 24))):
        function, piece = ("prefill", tokens[:, start:end]) if end > start + 1 else ("decode", tokens[:, start])
        before = cache
        logits, cache = bundle[function](params, cache, piece)
        # The first one is on one device, and is split for the call.
        assert before.keys.is_deleted() == (start > 0)
        found[end] = logits.numpy()
    assert int(cache.length) == 24
    spread = float(expected.std())
    for end, logits in found.items():
        np.testing.assert_allclose(logits, expected[:, end - 1], atol=0.05 * spread)


def test_its_types_are_those_of_its_state(path: Path) -> None:
    text = checked("stub", path)
    assert "class TrainStepState(TypedDict):\n" in text
    assert "class TrainStepStateObject(Protocol):\n    @property\n    def params(self) -> Any: ...\n" in text
    assert "state: TrainStepState | TrainStepStateObject, " in text.replace("\n        ", " ")
