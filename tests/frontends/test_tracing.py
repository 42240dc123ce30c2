"""What a function is traced with: variables of its manifest, settings of its own, callbacks dropped or refused.

Modules: `frontends/jax/export.py`, `frontends/jax/arguments.py`, `manifest/environment.py`.
"""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stagec
from tests import building
from tests.frontends.workspace import export, spec

MODEL = """\
import os

import equinox
import jax
import jax.numpy as jnp

SCALE = float(os.environ.get("SCALE", "1"))


def scaled(x):
    jax.debug.print("{}", x.mean())
    return x * SCALE + int(os.environ["OFFSET"])


def checked(x):
    return equinox.error_if(x, x.sum() > 0, "too large")  # checked


def drawn(seed):
    return jax.random.normal(jax.random.key(seed), (3,)), jnp.arange(3) / 3, jax.random.PRNGKey(seed)
"""
MANIFEST = """
[manifest]
name = "m"
version = "1"
enable_x64 = true
prng_impl = "rbg"
environment = { SCALE = "3", OFFSET = "1" }
host_callbacks = "drop"
[functions.wide]
entry = "pkg.model:drawn"
args = ["u32[]"]
targets = ["cpu-avx2"]
[functions.narrow]
entry = "pkg.model:drawn"
args = ["u32[]"]
targets = ["cpu-avx2"]
enable_x64 = false
prng_impl = "threefry2x32"
[functions.scaled]
entry = "pkg.model:scaled"
args = ["f64[2]"]
environment = { OFFSET = "2" }
targets = ["cpu-avx2"]
golden = {}
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("workspace")
    (root / "pkg").mkdir()
    (root / "pkg" / "model.py").write_text(MODEL)
    (root / "pkg" / "m.toml").write_text(MANIFEST)
    return root


@pytest.fixture(scope="module")
def bundle(workspace: Path) -> Path:
    out = workspace / "out"
    out.mkdir()
    return building.build("pkg/m.toml", out, workspace)


def test_functions_of_one_manifest_have_settings_of_their_own(bundle: Path) -> None:
    loaded = stagec.load(bundle)

    def drawn(seed: Any) -> Any:
        return jax.random.normal(jax.random.key(seed), (3,)), jnp.arange(3) / 3, jax.random.PRNGKey(seed)

    seed = np.uint32(7)
    for name, enable_x64, prng_impl in (("wide", True, "rbg"), ("narrow", False, "threefry2x32")):
        with jax.enable_x64(enable_x64), jax.default_prng_impl(prng_impl):
            expected = [np.asarray(value) for value in jax.jit(drawn)(seed)]
        results = loaded[name](seed)
        assert [(value.dtype, value.shape) for value in results] == [(value.dtype, value.shape) for value in expected]
        for value, wanted in zip(results, expected, strict=True):
            np.testing.assert_array_equal(value, wanted)
    assert loaded["wide"](seed)[1].dtype == np.float64
    np.testing.assert_array_equal(loaded["scaled"](np.float64([1, 2])), [5, 8])


def test_variables_are_components_of_what_is_built(bundle: Path) -> None:
    made_from = json.loads((bundle.parent / "m.scaled.exported.json").read_text())["components"]
    told = {name: row["value"] for name, row in made_from.items() if name.startswith("environment variable")}
    assert told == {"environment variable OFFSET": "2", "environment variable SCALE": "3"}
    assert made_from["key host_callbacks"]["value"] == "drop"


def test_a_library_sees_the_variables_when_it_is_imported(workspace: Path) -> None:
    line = MODEL[: MODEL.index("# checked")].count("\n") + 1
    refused = spec(entry="pkg.model:checked", host_callbacks="drop")
    status, stderr, _ = export(workspace, refused)
    told, _, rest = stderr.partition("_errors.py:")
    assert (status, told, rest[rest.index(")") :]) == (
        2,
        f"pkg/m.toml: functions.f: pkg/model.py:{line}: a host callback (pure_callback) of equinox "
        f"{metadata.version('equinox')} (equinox/",
        ") cannot be built ahead of time\n"
        '  write environment = { EQX_ON_ERROR = "nan" }: its checks then give NaN where they fail; with "off" it '
        "checks nothing\n"
        '  host_callbacks = "drop" would not help: this callback has results\n',
    )
    artifacts = {}
    for value in ("nan", "off"):
        declared = spec(entry="pkg.model:checked", environment={"EQX_ON_ERROR": value})
        status, stderr, output = export(workspace, declared)
        assert (status, stderr) == (0, "")
        artifacts[value] = jax.export.deserialize(bytearray(output.read_bytes()))
    x = np.ones((2, 3), np.float32)
    assert np.isnan(artifacts["nan"].call(x)).all()
    np.testing.assert_array_equal(artifacts["nan"].call(-x), -x)
    np.testing.assert_array_equal(artifacts["off"].call(x), x)
