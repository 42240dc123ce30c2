"""An action in a process of its own, as Bazel runs it in a sandbox of links: it says what a worker says."""

import platform
import subprocess
from pathlib import Path

import pytest

from tests.building import COMPILER, PYTHON, action_environment, write_specs
from tests.worker.test_worker import AT_HOME, DEATHS, export

MANIFEST = """
[manifest]
name = "m"
version = "1"
[functions.changing]
entry = "models.changing:f"
args = ["f32[4]"]
platforms = ["cpu"]
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository, planned, with its specs in bazel-out."""
    root = tmp_path_factory.mktemp("root")
    for folder in ("models", "bazel-out"):
        (root / folder).mkdir()
    (root / "models" / "m.toml").write_text(MANIFEST)
    (root / "models" / "undeclared.py").write_text("one = 1\n")
    (root / "models" / "data.txt").write_text("data")
    write_specs("models/m.toml", root, root / "bazel-out")
    return root


def alone(root: Path, sandbox: Path, source: str) -> tuple[int, str]:
    """Export a function whose module has this source in a sandbox with links to its inputs; status and stderr."""
    (root / "models" / "changing.py").write_text(source)
    declared = ["models/changing.py", "bazel-out/m.changing.spec"]
    for path in declared:
        (sandbox / path).parent.mkdir(exist_ok=True)
        (sandbox / path).symlink_to(root / path)
    words = [*export("m.changing"), "--source", "models/changing.py", "--unread", "bazel-out/unread"]
    (sandbox / "bazel-out" / "0.params").write_text("\n".join(words))
    done = subprocess.run(
        [*PYTHON, str(COMPILER / "stagec" / "__main__.py"), "action", "export", "@bazel-out/0.params"],
        cwd=sandbox,
        env={
            **action_environment(),
            "STAGEC_PYTHON_ABI": "",
            "STAGEC_PYTHON_VERSION": platform.python_version(),
            "JAX_PLATFORMS": "cpu",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("import models.undeclared\ndef f(x):\n    return x\n", "models/undeclared.py"),
        ("def f(x):\n    return x + len(open('models/data.txt').read())\n", "models/data.txt"),
        ("def f(x):\n    return x + len(open('models/nowhere.txt').read())\n", ""),
    ],
    ids=["import", "open", "a file that is nowhere"],
)
def test_a_file_that_is_not_declared_is_named(root: Path, tmp_path: Path, source: str, file: str) -> None:
    status, output = alone(root, tmp_path, source)
    assert status == 2
    hint = f"{file} is not an input of this action\n  name it in deps, or in data where it is read\n"
    assert output.endswith(hint) == bool(file)
    assert output.count("not an input of this action") == bool(file)


@pytest.mark.parametrize("death", DEATHS)
def test_a_process_that_dies_is_told(root: Path, tmp_path: Path, death: str) -> None:
    status, output = alone(root, tmp_path, f"import os\ndef f(x):\n    {death}\n")
    assert status == 1
    last = output.splitlines()[-1]
    assert last.startswith(f"stagec: {DEATHS[death]}")
    assert last.endswith(" MiB of memory")
    assert ("models/changing.py" in output) == ("11" in death)  # Python says where it was


def test_a_process_that_stays_behind_is_not_waited_for(root: Path, tmp_path: Path) -> None:
    source = (
        "import subprocess, sys\ndef f(x):\n    subprocess.Popen(['sleep', '20'], stdout=-3, stderr=-3)\n    return x\n"
    )
    assert alone(root, tmp_path, source) == (0, "")


def test_a_model_has_a_home_that_is_thrown_away(root: Path, tmp_path: Path) -> None:
    (sandbox := tmp_path / "sandbox").mkdir()
    status, output = alone(root, sandbox, AT_HOME)
    assert status == 0, output
    assert not Path(output.partition("at home in ")[2].split()[0]).exists()
