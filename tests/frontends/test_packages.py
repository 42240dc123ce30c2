"""Packages that come with a model's dependencies, beside those of stagec's environment."""

from importlib import metadata
from pathlib import Path

import pytest

from tests.building import checked, stagec, write_specs

MANIFEST = """
[manifest]
name = "m"
version = "1"
[functions.f]
entry = "model:f"
args = ["f32[4]"]
platforms = ["cpu"]
"""


def installed(folder: Path, name: str, version: str, text: str) -> None:
    """Write what an installed package of one module consists of."""
    (folder / f"{name}-{version}.dist-info").mkdir(parents=True)
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (folder / f"{name}.py").write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "m.toml").write_text(MANIFEST)
    write_specs("m.toml", tmp_path, tmp_path)
    return tmp_path


def words(*roots: str) -> list[str]:
    """The command that exports the function with these import roots."""
    found = ["action", "export", "--spec", "m.f.spec", "--output", "m.f.exported"]
    return [*found, *(word for folder in (".", *roots) for word in ("--import-root", folder))]


def test_packages_come_behind_the_environment_and_sources_before(root: Path) -> None:
    packages = root / "pip" / "site-packages"
    installed(packages, "sortedcontainers", metadata.version("sortedcontainers"), "raise ValueError('of packages')")
    installed(packages, "stagec_test_scale", "1.0", "scale = 3")
    (root / "model.py").write_text(
        "import stagec_test_scale\nfrom sortedcontainers import SortedDict\n"
        "def f(x):\n    return x * stagec_test_scale.scale\n"
    )
    checked(*words("pip/site-packages", "lib"), cwd=root)
    (root / "lib").mkdir()
    (root / "lib" / "sortedcontainers.py").write_text("raise ValueError('of sources')")
    assert "ValueError: of sources" in stagec(*words("pip/site-packages", "lib"), cwd=root).stderr


def test_another_version_than_in_the_environment_is_told(root: Path) -> None:
    installed(root / "first" / "site-packages", "Opt.Einsum", "0.1", "")
    installed(root / "elsewhere", "numpy", "1.26.4", "")
    (root / "model.py").write_text("def f(x):\n    return x\n")
    done = stagec(*words("first/site-packages", "elsewhere"), cwd=root)
    numpy, einsum = metadata.version("numpy"), metadata.version("opt_einsum")
    assert done.returncode == 2
    assert done.stderr == (
        f"m.toml: functions.f: elsewhere in deps has numpy 1.26.4, stagec's environment has "
        f"{numpy}, and Python takes that\n"
        f"  write numpy=={numpy} in the lock of elsewhere,\n"
        "  or numpy==1.26.4 in stagec's: stagec.python(lock = ...)\n"
        "m.toml: functions.f: first/site-packages in deps has Opt.Einsum 0.1, stagec's environment has "
        f"{einsum}, and Python takes that\n"
        f"  write opt_einsum=={einsum} in the lock of first/site-packages,\n"
        "  or Opt.Einsum==0.1 in stagec's: stagec.python(lock = ...)\n"
    )


def test_the_same_version_is_the_same_with_zeros_at_its_end(root: Path) -> None:
    installed(root / "pip", "opt_einsum", metadata.version("opt_einsum") + ".0", "")
    (root / "model.py").write_text("def f(x):\n    return x\n")
    checked(*words("pip"), cwd=root)
