"""Stubs of bundles: mypy accepts calls that are right, and refuses those that are wrong.

Modules: `bundle/calls.py`, `cli/stub.py`.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stagec.audit.stubs import stub
from stagec.bundle.archive import Archive
from stagec.core.trees.keyed import Item, Keyed
from tests.building import COMPILER, ROOT, checked, stagec, write_specs
from tests.bundles import edited_index

CALLS = """
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import stagec

if TYPE_CHECKING:
    from digits_types import DigitsBundle
    from zoo_types import ZooBundle

zoo = cast("ZooBundle", stagec.load("zoo.aot"))
digits = cast("DigitsBundle", stagec.load("digits.aot"))
x, whole = np.zeros(4, np.float32), np.zeros(4, np.int32)


@dataclass
class Point:
    x: Any
    y: Any


@dataclass
class Cloud:
    mean: Any
    points: list[Point]
    unit: str


y = zoo["mlp"]({"b": x, "w": x}, x)
y.shape
zoo["update"](zoo["update"]({"x": x, "y": [x]}, 1.5), np.float32(2))
zoo["named"](x, x, shift=1, power=2)
zoo["named"].variants["cube"].flat(x, x, shift=x)
zoo["from_file"](x)
zoo["from_file"]({"dense": {"bias": x, "kernel": x}}, x)
zoo["pooled"](x)["mean"].sum()
zoo["pooled"](x, valid=x > 0)
zoo["typed"](zoo["typed"](Cloud(x, [], "m"), 1), 2)
zoo["typed"]({"mean": x, "points": [{"x": x, "y": x}, Point(x, x)]}, 1)["points"]
zoo["turned"]({"dial": (x, x), "table": {"a": x, "b": x}, "unit": {}}, 1)
zoo["mlp"](stagec.device_put({"b": x, "w": x}), x)
params = digits["init"](np.uint32(0))["params"]
digits["predict"](params, x)
zoo["mpl"]  # E: no overload
zoo["mlp"]({"b": x}, x)  # E: missing key "w"
zoo["mlp"]({"b": x, "v": x, "w": x}, x)  # E: extra key "v"
zoo["mlp"]({"b": x, "w": x})  # E: too few arguments
zoo["mlp"]({"b": x, "w": [x]}, x)  # E: incompatible types
zoo["mlp"]({"b": x, "w": x}, whole)  # E: incompatible type
zoo["mlp"]({"b": x, "w": x}, x=x)  # E: unexpected keyword argument
zoo["named"](x, x, shift=1, power=4)  # E: no overload
zoo["typed"](Point(x, x), 1)  # E: incompatible type
zoo["update"]({"x": x, "y": (x,)}, 1)  # E: incompatible types
digits["predict"](params["hidden"], x)  # E: incompatible type
"""


def portable(manifest: str, out: Path) -> Path:
    """Build a bundle of the exported artifacts of a manifest alone."""
    arguments: list[str | Path] = []
    plan = write_specs(manifest, ROOT, out)
    for export in plan["exports"]:
        stem = out / export["name"]
        written = ["--output", f"{stem}.exported", "--description", f"{stem}.exported.json"]
        checked("action", "export", "--spec", f"{stem}.spec", *written, "--import-root", ROOT)
        arguments += ["--export", f"{export['name']}:{stem}.exported:{stem}.spec:{stem}.exported.json"]
    name = plan["bundle"]["name"]
    checked("action", "bundle", "--name", name, "--version", "1", "--output", out / f"{name}.aot", *arguments)
    return out / f"{name}.aot"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return portable("examples/digits/digits.toml", tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What mypy knows of numpy and stagec after its first run."""
    return tmp_path_factory.mktemp("mypy")


def mypy(cache: Path, folder: Path, *files: str) -> list[str]:
    """What mypy says of files in a folder, line by line, without notes."""
    pytest.importorskip("mypy", reason="tests/newest.lock has none")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--no-error-summary",
            "--follow-imports=silent",
            f"--cache-dir={cache}",
            *files,
        ],
        cwd=folder,
        env={**os.environ, "MYPYPATH": f"{COMPILER}:{folder}"},
        capture_output=True,
        text=True,
    )
    return [line for line in (done.stdout + done.stderr).splitlines() if ": note:" not in line]


def test_mypy_accepts_right_calls_and_refuses_wrong_ones(zoo: Path, digits: Path, tmp_path: Path, cache: Path) -> None:
    for bundle, name in ((zoo, "zoo_types.pyi"), (digits, "digits_types.pyi")):
        assert checked("stub", bundle, "--output", tmp_path / name) == ""
    (tmp_path / "calls.py").write_text(CALLS)
    expected = {n: line.partition("# E: ")[2] for n, line in enumerate(CALLS.splitlines(), 1) if "# E: " in line}
    found = dict[int, str]()
    for line in mypy(cache, tmp_path, "calls.py", "zoo_types.pyi", "digits_types.pyi"):
        place = re.fullmatch(r"calls\.py:(\d+): error: (.*)", line)
        assert place, line
        found.setdefault(int(place[1]), place[2].lower())
    assert found.keys() == expected.keys()
    assert [(found[n], wanted) for n, wanted in expected.items() if wanted not in found[n]] == []


def test_the_page_shows_what_inspect_prints(digits: Path) -> None:
    page = (ROOT / "docs" / "bazel.md").read_text()
    (shown,) = re.findall(r"^```text\n(  train_step.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert shown in checked("inspect", digits)


def test_what_an_editor_shows(zoo: Path) -> None:
    text = checked("stub", zoo)
    assert '        """mlp(params, x, /) -> f32[batch,4]\n          params.b  f32[4]\n' in text
    assert "    w: NDArray[np.float32]  # f32[16,4]\n" in text
    assert "    b: NDArray[np.int8]  # i8[4]\n" in text
    assert "    from zoo_types import ZooBundle\n" in text
    done = json.loads(checked("stub", zoo, "--json"))
    assert done["output"] is None
    assert "mlp" in done["functions"]


def test_names_that_python_does_not_take(zoo: Path, tmp_path: Path, cache: Path) -> None:
    """Trees of a bundle that somebody else wrote may have any keys and names; nothing of them becomes code."""

    def edit(index: dict[str, object]) -> None:
        function = index["functions"]["mlp"]  # type: ignore[index]
        leaf = {"custom": 'a"""\nimport os\nb', "auxdata": "", "children": ["*"]}
        parameters = {"dict": {"class": "*", 'no"""name\\': leaf}}
        function["in_tree"] = {"tuple": [{"tuple": [parameters]}, {"dict": {"a b": "*"}}]}
        function["static"] = {"n=__import__('os').system('id'), m": 1, "power": 'a"]\n', "class": True}

    bundle = edited_index(zoo, tmp_path / "odd.aot", edit)
    text = stub(Archive(bundle), "odd_types")
    (tmp_path / "odd_types.pyi").write_text(text)
    assert "import os" not in text.splitlines()
    tree = ast.parse(text)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Call) and "system" in ast.unparse(node)]
    assert "power: Literal['a\"]\\n'] = ..., **others: Any" in " ".join(text.split())
    assert mypy(cache, tmp_path, "odd_types.pyi") == []


def test_types_of_libraries(zoo: Path, tmp_path: Path, cache: Path) -> None:
    """Nodes that have key entries are dicts of these, and what holds no array may be left out; keys may be numbers."""

    def node(name: str, *entries: object) -> dict[str, str]:
        return {"custom": name, "auxdata": Keyed(entries, {}).to_bytes().hex()}  # type: ignore[arg-type]

    def edit(index: dict[str, Any]) -> None:
        function = index["functions"]["mlp"]
        static = {**node("lib:Static"), "children": []}
        item = {**node("lib:Item", Item("w")), "children": ["*"]}
        state = {**node("lib:State", "static", "item"), "children": [static, item]}
        layers = {"dict": [[key, "*"] for key in range(2)]}
        function["in_tree"] = {"tuple": [{"tuple": [state, layers]}, {"dict": {}}]}

    text = stub(Archive(edited_index(zoo, tmp_path / "lib.aot", edit)), "lib_types")
    (tmp_path / "lib_types.pyi").write_text(text)
    assert "class MlpParamsItem(TypedDict):\n    w: NDArray[np.float32]  # f32[4]\n" in text
    assert "    static: NotRequired[Any]\n    item: MlpParamsItem | Any  # lib:Item\n" in text
    assert "class MlpParamsObject(Protocol):\n    @property\n    def item(self) -> Any: ...\n\n" in text
    assert "params: MlpParams | MlpParamsObject," in text
    assert "x: dict[int, NDArray[np.float32]]," in text
    assert mypy(cache, tmp_path, "lib_types.pyi") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["BUNDLE", "--output", "zoo-types.pyi"],
            "zoo-types.pyi: a stub is imported by its name, and this file's name is not a module name\n"
            "  write for example --output zoo_types.pyi\n",
        ),
        (
            ["BUNDLE", "--output", "out/zoo.py"],
            "out/zoo.py: a stub is imported by its name, and this file's name is not a module name\n"
            "  write for example --output out/zoo.pyi\n",
        ),
        (["none.aot"], "none.aot: no such file\n  give a bundle (.aot)\n"),
        (["BUNDLE.txt"], "BUNDLE.txt: not a bundle: it does not end as a zip file does\n  give a bundle (.aot)\n"),
    ],
)
def test_what_is_refused(zoo: Path, tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "BUNDLE.txt").write_text("something else")
    done = stagec("stub", *(zoo if word == "BUNDLE" else word for word in words), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_children_without_arrays_may_be_left_out(zoo: Path, tmp_path: Path, cache: Path) -> None:
    """As in a call, and where a result is the next argument."""
    empty = {"tuple": []}

    def edit(index: dict[str, Any]) -> None:
        function = index["functions"]["mlp"]
        table = {"dict": {"base": None, "parts": empty, "w": "*"}}
        function["in_tree"] = {"tuple": [{"tuple": [table, "*", "*"]}, {"dict": {"mask": None}}]}

    text = stub(Archive(edited_index(zoo, tmp_path / "left.aot", edit)), "left_types")
    (tmp_path / "left_types.pyi").write_text(text)
    assert "    base: NotRequired[None]\n    parts: NotRequired[tuple[()]]\n    w: NDArray[np.float32]" in text
    assert "mask: None = ..." in text
    (tmp_path / "used.py").write_text(
        "import numpy as np\nfrom left_types import Mlp\n\n"
        "X = np.ones(4, np.float32)\n\n\ndef use(mlp: Mlp) -> None:\n"
        '    mlp({"w": X}, X, X)\n'
        '    mlp({"w": X, "base": None}, X, X, mask=None)\n'
        '    mlp({"base": None}, X, X)\n'
    )
    (complaint,) = mypy(cache, tmp_path, "used.py")
    assert "used.py:10" in complaint
    assert 'Missing key "w"' in complaint
