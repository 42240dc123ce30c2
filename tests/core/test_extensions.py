"""The table of extensions, and faces of packages.

Modules: `core/builds/extensions.py`, `core/faces.py`.
"""

import importlib
import subprocess
import sys
import tomllib
import traceback
from pathlib import Path

import pytest

import stagec
from stagec.core.builds import extensions
from stagec.core.builds.extensions import EXTENSIONS, Extension, sources
from stagec.core.builds.frontends import TRACERS
from stagec.core.builds.version import VERSION
from stagec.core.faces import lazily
from stagec.core.messages.errors import StagecError
from tests.building import COMPILER, EXTENSIONS as FOLDERS


def alone(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command where only the core is on the path, beside packages of others."""
    packages = [entry for entry in sys.path if entry.endswith("site-packages")]
    path = ":".join([str(COMPILER), *packages])
    command = [sys.executable, "-s", "-S", str(COMPILER / "stagec" / "__main__.py"), *words]
    return subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True)


def test_each_folder_is_a_row() -> None:
    assert sorted(Path(folder).name for folder in FOLDERS) == sorted(extension.name for extension in EXTENSIONS)


@pytest.mark.parametrize("extension", EXTENSIONS, ids=lambda extension: extension.name)
def test_an_extension_is_whole(extension: Extension) -> None:
    folder = COMPILER / "extensions" / extension.name
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["version"]) == (f"stagec-{extension.name}", VERSION)
    assert not [name for name in project["dependencies"] if name.startswith("stagec")]  # an index may have that name
    assert f"pip install ./compiler ./compiler/extensions/{extension.name}" in (folder / "README.md").read_text()
    assert extension.is_installed
    commands = {command.rpartition(" ")[2].replace("-", "_"): about for command, about in extension.commands.items()}
    for command, about in commands.items():
        assert importlib.import_module(f"{extension.package}.commands.{command}").__doc__ == about
    modules = folder / extension.package / "commands"
    written = {path.stem for path in modules.glob("*.py")} - {"__init__"}
    assert written == set(commands)


def test_the_core_alone_names_what_is_missing() -> None:
    done = alone("push", "x.aot", "example.com/x:1")
    what = "stagec push needs the extension registry, which is not installed"
    how = "in a clone of stagec, pip install ./compiler/extensions/registry"
    assert (done.returncode, done.stderr) == (2, f"{what}\n  {how}\n")
    assert (
        f"a server of bundles (in a clone of stagec, {how.rpartition('/')[0].partition(', ')[2]}/serve):"
        in alone().stdout
    )
    assert 'did you mean "push"?' in alone("psuh").stderr


def test_a_module_of_an_extension_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "EXTENSIONS", (Extension("absent", "what is not there"),))
    with pytest.raises(StagecError, match="stagec needs the extension absent"):
        extensions.imported("stagec_absent.frontend", "to trace a:b, stagec")
    assert extensions.imported("stagec.core.faces", "anything").lazily is lazily


def test_modules_of_frontends_are_there() -> None:
    for row in TRACERS.values():
        for module in (row.module, row.tracer, *row.preloaded):
            importlib.import_module(module)


def test_a_face_imports_nothing_before_a_name_is_used() -> None:
    script = "import sys, stagec, stagec_arrays; assert 'numpy' not in sys.modules; stagec_arrays.ShapeDtypeStruct"
    done = subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True)
    assert done.returncode == 0, done.stderr
    attribute = lazily("stagec.core", {"faces": ("lazily",)}, ("builds",))
    assert attribute("lazily") is lazily
    assert attribute("builds").__name__ == "stagec.core.builds"
    with pytest.raises(AttributeError, match=r"module 'stagec.core' has no attribute 'other'"):
        attribute("other")


def ours_in(error: BaseException) -> list[str]:
    """The frames of stagec in a traceback."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(sources())]


def test_tracebacks_show_no_frames_of_stagec(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: object) -> object:
        return x + undefined  # type: ignore[name-defined, operator]  # noqa: F821

    wrapped = stagec.jit(broken)
    for call in (wrapped, wrapped.trace, wrapped.lower, wrapped.eval_shape):
        with pytest.raises(NameError) as error:
            call(1.0)
        assert ours_in(error.value) == []
        assert traceback.extract_tb(error.value.__traceback__)[-1].name == "broken"
    with stagec.load(zoo) as bundle:
        with pytest.raises(stagec.CallError) as refused:
            bundle["mlp"](1)
        assert ours_in(refused.value) == []
        monkeypatch.setenv("JAX_TRACEBACK_FILTERING", "off")
        with pytest.raises(stagec.CallError) as refused:
            bundle["mlp"](1)
        assert ours_in(refused.value)
