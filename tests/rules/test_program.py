"""What python_program makes can be started from anywhere, as often as links lead to it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif("PROGRAM" not in os.environ, reason="Bazel builds the program")


def run(program: Path, *arguments: str, cwd: Path, **env: str) -> dict[str, Any]:
    done = subprocess.run(
        [program, *arguments], cwd=cwd, env={"PATH": os.environ["PATH"], **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_it_finds_its_files_from_any_folder(tmp_path: Path) -> None:
    result = run(Path(os.environ["PROGRAM"]), "a b", "", cwd=tmp_path)
    data, *rest = result["arguments"]
    assert Path(data).is_absolute()
    assert result["data"] == ["data of the program\n"]
    assert rest == ["a b", ""]
    assert result["folder"] == str(tmp_path)
    assert result["greeting"] == f"it's {data}"
    assert result["library"] == "library"


def test_it_runs_through_links(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "first").symlink_to(os.environ["PROGRAM"])
    (tmp_path / "bin" / "second").symlink_to("../first")
    assert run(tmp_path / "bin" / "second", cwd=tmp_path)["library"] == "library"


def test_packages_of_the_machine_are_not_seen(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text("NAME = 'intruder'\n")
    assert run(Path(os.environ["PROGRAM"]), cwd=tmp_path, PYTHONPATH=str(tmp_path))["library"] == "library"


def test_without_its_runfiles_it_says_what_to_build(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes(Path(os.environ["PROGRAM"]).read_bytes())
    copy.chmod(0o755)
    done = subprocess.run([copy], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "its runfiles are missing; build it with Bazel: bazel build " in done.stderr
    assert "//tests/rules:program" in done.stderr
