"""examples/kalman, built by Bazel with an environment that has no JAX: its functions are traced by stagec itself."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.export
import numpy as np
import pytest

from tests.building import ROOT
from tests.nested import NestedBazel

SOURCE = ROOT / "examples" / "kalman"


@pytest.fixture(scope="module")
def kalman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NestedBazel]:
    folder = tmp_path_factory.mktemp("kalman")
    root = folder / "stagec" / "examples" / "kalman"
    shutil.copytree(SOURCE, root, ignore=shutil.ignore_patterns("__pycache__", "bazel-*"))
    bazel = NestedBazel(folder, root)
    try:
        yield bazel
    finally:
        bazel.run("shutdown")


def test_it_is_built_and_runs(kalman: NestedBazel) -> None:
    done = kalman.run("run", "//:demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "running its target 'cpu-avx2'; jax is not importable" in done.stdout
    external = Path(kalman.run("info", "output_base").stdout.strip()) / "external"
    found = {path.name for path in external.glob("*stagec_python/site-packages/jax*")}
    assert found == {"jaxlib", "jaxlib-0.10.2.dist-info"}


def test_goldens_explanations_and_texts_are_made(kalman: NestedBazel) -> None:
    tested = kalman.run("test", "//:kalman.golden_test")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    explained = kalman.run("run", "//:kalman.explain", "--", str(kalman.root / "bazel-bin" / "kalman.aot"))
    assert explained.returncode == 0, explained.stdout + explained.stderr
    texts = kalman.run("build", "//:kalman", "--output_groups=jaxpr,debug")
    assert texts.returncode == 0, texts.stderr
    assert "= scan[" in (kalman.root / "bazel-bin" / "kalman.track.jaxpr.txt").read_text()
    assert '"model.py":' in (kalman.root / "bazel-bin" / "kalman.track.debug.mlir").read_text()


def test_jax_reads_calls_and_differentiates_what_was_exported(kalman: NestedBazel) -> None:
    exported = jax.export.deserialize(bytearray((kalman.root / "bazel-bin" / "kalman.track.exported").read_bytes()))
    params = {"motion": np.float32(-4.6), "sensor": np.float32(1.4)}
    measured = np.random.default_rng(0).normal(size=(3, 100)).cumsum(axis=1).astype(np.float32)
    found = exported.call(params, measured)  # three are in no bucket

    def likelihood(motion: float, track: np.ndarray) -> float:
        """The filter, one track at a time, in 64 bits."""
        step, noise = np.array([[1, 1], [0, 1.0]]), np.exp(motion) * np.array([[0.25, 0.5], [0.5, 1]])
        mean, covariance, total = np.zeros(2), 10 * np.eye(2), 0.0
        for position in track:
            mean, covariance = step @ mean, step @ covariance @ step.T + noise
            surprise, variance = position - mean[0], covariance[0, 0] + np.exp(1.4)
            gain = covariance[:, 0] / variance
            total -= (surprise**2 / variance + np.log(2 * np.pi * variance)) / 2
            mean, covariance = mean + gain * surprise, covariance - np.outer(gain, covariance[0])
        return total

    np.testing.assert_allclose(found["log_likelihood"], [likelihood(-4.6, track) for track in measured], 1e-4)
    gradient = jax.grad(lambda params: exported.call(params, measured)["log_likelihood"].sum())(params)
    ends = (sum(likelihood(motion, track) for track in measured) for motion in (-4.6 + 1e-4, -4.6 - 1e-4))
    high, low = ends
    np.testing.assert_allclose(gradient["motion"], (high - low) / 2e-4, 2e-3)


def test_a_function_of_jaxs_is_refused_with_the_key_to_write(kalman: NestedBazel) -> None:
    manifest = kalman.root / "kalman.toml"
    text = manifest.read_text()
    manifest.write_text(text.replace('frontend = "arrays"\n', "", 1))
    try:
        done = kalman.run("build", "//:kalman.track")
    finally:
        manifest.write_text(text)
    assert done.returncode == 1
    said = """functions.track.frontend: to trace model:track, stagec needs the package jax, which is not installed
  write frontend = "arrays" for a function of stagec_arrays.numpy,
  or add jax to the lock of stagec.python(lock = ...); outside Bazel, pip install jax=="""
    assert said in done.stderr
    assert "Traceback" not in done.stderr
