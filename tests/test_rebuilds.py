"""What an edit of a file builds again, in a package of forty modules that names all of them as `deps` of all functions.

Which actions ran is what Bazel's build events say.

Modules: `cli/actions/imports.py`.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.nested import NestedBazel, actions, environment, spawns, telling, workspace_files
from tests.users import User

MODULES = [f"f{number}" for number in range(40)]
BUILD = """load("@models_manifest//:defs.bzl", "aot_manifest")

aot_manifest(
    name = "models",
    data = glob(["**/*.txt"]),
    deps = glob(["**/*.py"]),
)
"""
FILES = {
    **{f"{name}.py": f"def f(x):\n    return x + {number}\n" for number, name in enumerate(MODULES)},
    # Two share a module, one reads a resource of a namespace package, one takes what is there.
    "f0.py": "from models.shared import scale\n\ndef f(x):\n    return x * scale\n",
    "f1.py": "from models import shared\n\ndef f(x):\n    return x + shared.scale\n",
    "f2.py": "import importlib.resources\n\ndef f(x):\n"
    '    return x * int(importlib.resources.files("models.parts").joinpath("two.txt").read_text())\n',
    "f3.py": "from models.parts import table\n\ndef f(x):\n    return x * table.three\n",
    "f4.py": "try:\n    from models.optional import factor\nexcept ImportError:\n    factor = 1\n\n"
    "def f(x):\n    return x * factor\n",
    "shared.py": "scale = 2\n",
    "optional.py": "factor = 4\n",
    "parts/table.py": "three = 3\n",
    "parts/two.txt": "2",
    "parts/other.txt": "nobody reads this",
}


class Workspace(NestedBazel):
    """The package, and the Bazel that builds it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder / "workspace")
        self.models = self.root / "models"
        (self.models / "parts").mkdir(parents=True)
        manifest = '[manifest]\nname = "models"\nversion = "1"\nreproducible = false\n'
        for name in MODULES:
            manifest += f'[functions.{name}]\nentry = "models.{name}:f"\nargs = ["f32[4]"]\nplatforms = ["cpu"]\n'
        manifest += 'targets = ["cpu-avx2"]\ngolden = {}\n'  # of the last
        for path, text in {
            **{self.root / file: text for file, text in workspace_files("rebuilt").items()},
            **{self.models / file: text for file, text in FILES.items()},
            self.root / ".bazelrc": "build --nosandbox_debug\n",
            self.models / "BUILD": BUILD,
            self.models / "models.toml": manifest,
        }.items():
            path.write_text(text)
        self.options = self.with_packages(environment(folder / "environment", User(None, sys.executable)))
        self.events, self.log = folder / "events.json", folder / "execution.json"

    def build(self, *options: str, functions: Sequence[str] = ()) -> list[str]:
        """Build functions, or else the bundle; return the functions that were exported."""
        targets = [f"//models:models.{name}" for name in functions] or ["//models"]
        done = self.run("build", *targets, *telling(self.events), *self.options, *options)
        assert done.returncode == 0, done.stderr
        return [name.removeprefix("models.") for _, name in actions(self.events, ["StagecExport"])]

    def build_with_cache(self, cache: Path, functions: Sequence[str]) -> list[str]:
        """Build functions with a cache that machines share; return those that were exported, and not in the cache."""
        self.build(f"--disk_cache={cache}", f"--execution_log_json_file={self.log}", functions=functions)
        exported = [spawn for spawn in spawns(self.log, ["StagecExport"]) if "cache" not in spawn["runner"]]
        return sorted(Path(spawn["listedOutputs"][0]).name.split(".")[1] for spawn in exported)

    def calculated(self) -> int:
        """How many golden outputs the last build calculated."""
        return len(actions(self.events, ["StagecGolden"]))

    def edit(self, file: str, old: str, new: str) -> None:
        """Replace the only occurrence of `old`."""
        text = (self.models / file).read_text()
        assert text.count(old) == 1
        (self.models / file).write_text(text.replace(old, new))

    def output(self, name: str, ending: str = "exported") -> bytes:
        """What was exported of a function."""
        return (self.root / "bazel-bin" / "models" / f"models.{name}.{ending}").read_bytes()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path_factory.mktemp("rebuilds"))
    try:
        assert workspace.build() == sorted(MODULES)
        yield workspace
    finally:
        workspace.run("shutdown")


@pytest.fixture
def built(workspace: Workspace) -> Workspace:
    workspace.build()
    return workspace


def test_one_edit_is_one_export(built: Workspace) -> None:
    built.edit("f7.py", "x + 7", "x + 70")
    assert (built.build(), built.calculated()) == (["f7"], 0)
    assert built.build() == []
    built.edit("f39.py", "x + 39", "x + 390")
    assert (built.build(), built.calculated()) == (["f39"], 1)


def test_an_edit_after_a_restart_of_bazel_is_one_export(built: Workspace) -> None:
    built.run("shutdown")
    built.edit("f8.py", "x + 8", "x + 80")
    assert built.build() == ["f8"]


def test_a_shared_module_is_of_those_that_import_it(built: Workspace) -> None:
    built.edit("shared.py", "2", "20")
    assert built.build() == ["f0", "f1"]


def test_a_new_import_is_seen(built: Workspace) -> None:
    before = built.output("f9")
    built.edit("f9.py", "x + 9", "x + 9 + __import__('models.f10').f10.f(x)")
    assert built.build() == ["f9"]
    built.edit("f10.py", "x + 10", "x + 11")
    assert built.build() == ["f10", "f9"]
    assert built.output("f9") != before
    built.edit("f9.py", " + __import__('models.f10').f10.f(x)", "")
    assert built.build() == ["f9"]
    assert built.output("f9") == before
    built.edit("f10.py", "x + 11", "x + 12")
    assert built.build() == ["f10"]


def test_a_resource_is_of_those_that_read_it(built: Workspace) -> None:
    before = built.output("f2")
    (built.models / "parts" / "two.txt").write_text("22")
    assert built.build() == ["f2"]
    assert built.output("f2") != before
    (built.models / "parts" / "other.txt").write_text("and this neither")
    assert built.build() == []


def test_a_module_of_a_namespace_package(built: Workspace) -> None:
    before = built.output("f3")
    built.edit("parts/table.py", "three = 3", "three = 33")
    assert built.build() == ["f3"]
    assert built.output("f3") != before


def test_files_that_are_added_and_deleted_are_seen(built: Workspace) -> None:
    names = ("f3", "f4", "f5", "f6")
    before = {name: built.output(name) for name in names}
    init = built.models / "parts" / "__init__.py"  # of what was a namespace package
    package = built.models / "f6" / "__init__.py"  # it comes before f6.py
    optional = built.models / "optional.py"
    package.parent.mkdir()
    init.write_text("class table:\n    three = 333\n")
    package.write_text("def f(x):\n    return x * 66\n")
    optional.unlink()
    built.build(functions=names)
    assert [name for name in names if built.output(name) == before[name]] == ["f5"]
    init.write_text("class table:\n    three = 444\n")
    assert built.build(functions=names) == ["f3"]
    init.unlink()
    package.unlink()
    optional.write_text(FILES["optional.py"])
    built.build(functions=names)
    assert {name: built.output(name) for name in names} == before


def test_a_file_that_is_added_is_of_those_that_may_look_for_it(built: Workspace) -> None:
    new, names, text = built.models / "new.py", built.models / "parts" / "new.txt", "def f(x):\n    return x + "
    new.write_text("number = 1\n")
    assert (built.build(), built.calculated()) == ([], 0)
    new.write_text("number = 2\n")
    assert built.build() == []
    new.unlink()
    assert built.build() == []
    names.write_text("1")
    assert built.build() == ["f2"]  # which reads a resource there
    names.unlink()
    assert built.build() == ["f2"]
    lists, computes = built.models / "f20.py", built.models / "f21.py"
    lists.write_text(f"import os\n\n{text}len(os.listdir('models'))\n")
    computes.write_text(
        f"import importlib\n\ntry:\n    number = importlib.import_module('models.ne' + 'w').number\n"
        f"except ImportError:\n    number = 0\n\n{text}number\n"
    )
    assert built.build() == ["f20", "f21"]
    before = {name: built.output(name) for name in ("f20", "f21")}
    said = {name: built.output(name, "exported.unread").decode().splitlines()[-1] for name in before}
    assert said == {
        "f20": "# built again whenever a file is added: it lists the files of models",
        "f21": "# built again whenever a file is added: it imports new from models, which no source says",
    }
    new.write_text("number = 7\n")
    assert built.build() == ["f20", "f21"]
    assert [name for name in before if built.output(name) == before[name]] == []
    new.unlink()
    assert built.build() == ["f20", "f21"]
    assert {name: built.output(name) for name in before} == before
    lists.write_text(FILES["f20.py"])
    computes.write_text(FILES["f21.py"])
    assert built.build() == ["f20", "f21"]


def test_a_sandbox_says_the_same(built: Workspace) -> None:
    assert b"models/parts/other.txt" in built.output("f2", "exported.unread").split()
    for name in ("f2", "f11"):
        said = built.output(name, "exported.unread")
        (built.root / "bazel-bin" / "models" / f"models.{name}.exported").unlink()
        assert built.build("--strategy=StagecExport=sandboxed") == [name]
        assert built.output(name, "exported.unread") == said
    built.edit("f12.py", "x + 12", "x + 120")
    assert built.build("--strategy=StagecExport=sandboxed") == ["f12"]


def test_caches_that_machines_share_have_all_inputs_in_their_keys(built: Workspace, tmp_path: Path) -> None:
    functions = ("f13", "f14")

    def on_another_machine() -> list[str]:
        built.run("clean")
        return built.build_with_cache(tmp_path, functions)

    assert on_another_machine() == ["f13", "f14"]
    built.edit("f13.py", "x + 13", "x + 130")
    assert built.build_with_cache(tmp_path, functions) == ["f13"]  # what was built here before says so
    assert on_another_machine() == ["f14"]  # f13 is in the cache, and f14 with the other f13.py
    built.edit("f13.py", "x + 130", "x + 13")
    assert on_another_machine() == []
