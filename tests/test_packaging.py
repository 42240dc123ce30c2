"""The wheel: what a serving machine installs, in a virtual environment of its own, without jax."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pip
import pytest

from stagec.runtime.jaxlib_lines import version as jaxlib_version
from stagec.version import VERSION
from tests.building import COMPILER, ROOT, build

SCRIPT = """
import importlib.util, sys
import numpy as np
import stagec

assert importlib.util.find_spec("jax") is None
assert importlib.util.find_spec("pydantic") is None
bundle = stagec.load(sys.argv[1])
state = bundle["init"](np.uint32(0))
result = bundle["predict"](state["params"], np.zeros((8, 64), np.float32))
print(stagec.__version__, sorted(bundle), result["digit"].shape, result["digit"].dtype)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel; sources are copied first, because setuptools writes beside them."""
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    for path in [
        *COMPILER.glob("stagec/**/*.py"),
        *COMPILER.glob("stagec/targets/*.toml"),
        *(COMPILER / n for n in ("stagec/py.typed", "pyproject.toml", "README.md")),
    ]:
        target = source / path.relative_to(COMPILER)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source)
    (file,) = out.glob("*.whl")
    return file


def _run(*command: str | Path, **env: str) -> str:
    path = os.pathsep.join(entry for entry in sys.path if entry.endswith("site-packages"))
    done = subprocess.run(
        list(map(str, command)), env={**os.environ, "PYTHONPATH": path, **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_needs_numpy_and_jaxlib_only(wheel: Path) -> None:
    assert wheel.name == f"stagec-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"stagec-{VERSION}.dist-info/METADATA").decode()
    required = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if "Requires-Dist" in line]
    plain = [line for line in required if "extra ==" not in line]
    assert sorted(re.split(r"[<>=]", line)[0] for line in plain) == ["jaxlib", "numpy"]
    extras = {
        extra: {re.split(r"[<>=;]", line)[0].strip() for line in required if f'extra == "{extra}"' in line}
        for extra in ("compiler", "signing")
    }
    assert extras == {"compiler": {"flatbuffers", "jax", "pydantic"}, "signing": {"cryptography"}}


def test_the_wheel_has_the_checked_in_hardware(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if name.endswith(".toml")}
    wanted = {f"stagec/targets/{file.name}": file.read_bytes() for file in (COMPILER / "stagec/targets").glob("*.toml")}
    assert packed == wanted
    assert "stagec/targets/nvidia.toml" in packed


def test_a_fresh_environment_loads_the_digits_bundle(wheel: Path, tmp_path: Path) -> None:
    bundle = os.environ.get("DIGITS_BUNDLE") or build("examples/digits/digits.toml", tmp_path, ROOT)
    environment = tmp_path / "env"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    # pip by its folder: on PYTHONPATH it would take what lies beside it for installed.
    _run(
        sys.executable,
        Path(pip.__file__).parent,
        "--python",
        python,
        "install",
        "--quiet",
        wheel,
        f"jaxlib=={jaxlib_version()}",
        PYTHONPATH="",
    )
    said = _run(python, "-c", SCRIPT, Path(bundle).absolute(), PYTHONPATH="")
    assert said.split() == [VERSION, "['init',", "'predict',", "'train_step']", "(8,)", "int32"]
    commands = _run(environment / "bin" / "stagec", "--help", PYTHONPATH="")
    assert "inspect" in commands
    assert "h100-sxm" in _run(environment / "bin" / "stagec", "targets", PYTHONPATH="")
