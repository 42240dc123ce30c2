"""The code itself: style, types, which package imports which, and which file tests which module."""

import ast
import fnmatch
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.building import ROOT
from tools import imports, private_names

FILES = imports.modules()
EDGES = imports.graph(FILES)
EXTENSIONS = {folder.name for folder in imports.PACKAGE_FOLDERS} - {"stagec"}
CORE = [name for name in imports.PACKAGES if not name.startswith("stagec_")]


def name_of(path: Path) -> str:
    """The file of a module as pages name it: below stagec, or below the folder of its extension."""
    if path.is_relative_to(imports.SOURCES):
        return path.relative_to(imports.SOURCES).as_posix()
    return "/".join(path.relative_to(imports.EXTENSIONS).parts[1:])


MODULES = {name_of(path) for path in FILES.values() if path.name != "__init__.py"}
TESTS = {
    path.relative_to(ROOT / "tests").as_posix(): path
    for path in sorted((ROOT / "tests").rglob("test_*.py"))
    if "bazel-" not in str(path.relative_to(ROOT))
} | {
    f"stagec_{path.relative_to(imports.EXTENSIONS).parts[0]}/{path.name}": path
    for path in sorted(imports.EXTENSIONS.glob("*/tests/test_*.py"))
}
"""The tests of each package: those of an extension lie in its folder."""
MARK = "Modules: "


def of_its_name(test: str) -> set[str]:
    """The modules that tests/X/test_Y.py has the name of: Y.py in X, or in a folder of X."""
    folder, _, file = test.rpartition("/")
    return {name for name in MODULES if folder and re.fullmatch(f"{folder}/(.*/)?{file.removeprefix('test_')}", name)}


def written(path: Path) -> list[str]:
    """The modules, and patterns of modules, that the last paragraph of a test file's docstring names."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    last = docstring.rpartition("\n\n")[2]
    return re.findall(r"`([^`]+)`", last) if last.startswith(MARK) else []


WRITTEN = {test: written(path) for test, path in TESTS.items()}


def test_packages_import_what_the_table_says() -> None:
    """tools/imports.py: `PACKAGES` has every import between packages, and none that nobody needs."""
    assert imports.arrows(EDGES) == {name: set(row.imports) for name, row in imports.PACKAGES.items()}


def test_rooms_of_a_package_import_what_the_table_says() -> None:
    assert imports.arrows_between_rooms(EDGES) == {name: set(others) for name, others in imports.ROOMS.items()}


def test_packages_of_others_are_those_of_the_table() -> None:
    used: dict[str, set[str]] = {name: set() for name in imports.PACKAGES}
    for name, path in FILES.items():
        if package := imports.package(name):
            others = {other for other, ours in imports.imports(path, FILES) if not ours}
            used[package] |= others - sys.stdlib_module_names
    assert used == {name: set(row.others) for name, row in imports.PACKAGES.items()}


def test_nothing_imports_in_circles() -> None:
    assert imports.circles(imports.arrows(EDGES)) == []
    assert imports.circles(imports.arrows_between_rooms(EDGES)) == []


def test_no_module_imports_in_a_circle() -> None:
    """Neither when it runs, nor late, nor for the type checker."""
    assert imports.circles(EDGES) == []


def test_the_core_imports_no_extension() -> None:
    """Neither when it runs, nor for the type checker, nor late: it looks them up in `core/builds/extensions.py`."""
    assert [name for name in CORE for other in imports.arrows(EDGES)[name] if other.startswith("stagec_")] == []
    for name, path in FILES.items():
        texts = {node.value for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Constant)}
        named = [text for text in texts if isinstance(text, str) and text.partition(".")[0] in EXTENSIONS]
        known = ("core.builds.frontends", "local.remote")
        assert not named or name.startswith("stagec_") or name in known, f"{name}: {named}"


def test_an_extension_imports_no_other_one() -> None:
    """But for gRPC, which is the server's."""
    for name, others in imports.arrows(EDGES).items():
        if name not in CORE:
            own = name.partition(".")[0]
            below = {"stagec_serve"} if own == "stagec_grpc" else set()
            assert {other.partition(".")[0] for other in others if other not in CORE} <= {own} | below


def test_a_circle_is_found() -> None:
    assert imports.circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]


def test_an_import_by_a_name_in_a_call_is_found(tmp_path: Path) -> None:
    """A circle cannot hide behind `importlib`."""
    calls = {
        "core/a.py": "importlib.import_module('stagec.core.b')",
        "core/b.py": "import_module('stagec.core.c' if new else 'stagec.core.d')",
        "core/c.py": "__import__(name='stagec.core.a')",
        "core/d.py": "importlib.import_module(f'stagec.core.{name}'), importlib.import_module('numpy.random')",
    }
    for name, call in calls.items():
        (tmp_path / "core").mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"def late():\n    {call}\n")
    files = imports.modules(tmp_path, None)
    edges = imports.graph(files)
    assert edges == {"core.a": {"core.b"}, "core.b": {"core.c", "core.d"}, "core.c": {"core.a"}, "core.d": set()}
    assert imports.circles(edges) == [["core.a", "core.b", "core.c"]]
    assert list(imports.imports(files["core.d"], files)) == [("numpy", False)]


def test_the_page_has_the_table() -> None:
    """`python3 tools/imports.py --write` writes it."""
    text = imports.PAGE.read_text("utf-8")
    assert imports.page(text) == text
    assert imports.table() in text


def test_every_package_is_listed() -> None:
    folders = {name_of(path).rpartition("/")[0].replace("/", ".") for path in FILES.values()} - {""}
    assert folders == {*imports.PACKAGES, *imports.ROOMS}


def test_expressions_are_parsed_in_one_place() -> None:
    """Python 3.11's parser is safe for one thread at a time: `expressions` has the lock."""
    parsing = [path.name for path in sorted(FILES.values()) if "ast.parse(" in path.read_text("utf-8")]
    assert parsing == ["expressions.py"]


def test_nothing_is_unpickled_or_evaluated() -> None:
    """What is read is data: docs/security.md."""
    for path in FILES.values():
        others = {other for other, _ in imports.imports(path, FILES)}
        assert {"pickle", "marshal", "shelve", "copyreg"}.isdisjoint(others), path
        calls = [node.func for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
        assert not {"eval", "exec"} & {function.id for function in calls if isinstance(function, ast.Name)}, path


def test_variables_are_named_for_what_they_are() -> None:
    """Not `found` or `one`, which may be anything: neither a variable, nor a parameter, nor a function."""
    vague = []
    others = [path for folder in ("benchmarks", "examples", "rules", "tools") for path in (ROOT / folder).rglob("*.py")]
    for path in (*FILES.values(), *others):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = {getattr(node, field, None) for field in ("id", "arg", "name")}
            if not names.isdisjoint({"found", "one"}):
                vague.append(f"{os.path.relpath(path, ROOT)}:{getattr(node, 'lineno', '')}")
    assert not vague, f"name these for what they are: {', '.join(dict.fromkeys(vague))}"


def test_every_private_name_of_jax_is_listed() -> None:
    """`python tools/private_names.py --write` writes the list."""
    used = private_names.used()
    assert private_names.listed() == private_names.lines(used)
    assert {"jax._src.config.trace_context", "jax._src.pjit.get_ctx_mesh", "PyTreeDef.flatten_up_to"} <= used.keys()
    for alternatives in private_names.SEVERAL:
        assert not used.keys().isdisjoint(alternatives) or "device_context" in alternatives[0]


def test_a_private_name_that_a_release_does_not_have() -> None:
    assert private_names.missing(private_names.listed()) == []
    absent = ["jaxlib._jax.no_such.name", "jax._src.no_such", "LoadedExecutable.no_such", "jaxlib.a or jaxlib.b"]
    assert private_names.missing([*absent, "jaxlib._jax or jaxlib.b", "PyTreeDef.node_data"]) == absent


def test_every_patch_of_jax_is_needed() -> None:
    assert private_names.superfluous() == []


def test_every_module_has_a_test() -> None:
    """A pattern is of a test of many modules together: it is not the test of each of them."""
    tested = {name for test in TESTS for name in (*of_its_name(test), *WRITTEN[test])}
    untested = ", ".join(sorted(MODULES - tested))
    assert not untested, (
        f"no file tests {untested}: write tests/X/test_Y.py for X/Y.py, or end the docstring of the file that tests it "
        f'with a paragraph "{MARK}`X/Y.py`."'
    )


def test_test_files_name_modules_that_are_there() -> None:
    for test, names in WRITTEN.items():
        assert [name for name in names if not any(fnmatch.fnmatchcase(module, name) for module in MODULES)] == [], test


def test_each_test_file_of_a_package_says_what_it_tests() -> None:
    ours = [test for test in TESTS if test.rpartition("/")[0].replace("/", ".") in imports.PACKAGES]
    unclear = ", ".join(test for test in ours if not of_its_name(test) and not WRITTEN[test])
    assert not unclear, (
        f'{unclear}: name it after a module of the package, or end its docstring with a paragraph "{MARK}`X/Y.py`."'
    )


def test_bazel_knows_every_folder_of_tests() -> None:
    lists = (ROOT / "tests" / "BUILD").read_text("utf-8").partition("\nPACKAGES = ")[2].partition("\nexports_files")[0]
    known = {word for words in re.findall(r'"([\w ]+)"', lists) for word in words.split()}
    folders = {test.partition("/")[0].removeprefix("stagec_") for test in TESTS if "/" in test}
    assert folders - known == set(), "add it in tests/BUILD"


def test_files_of_tests_have_names_of_their_own() -> None:
    # One run of pytest cannot collect two files of one name.
    names = [path.name for path in TESTS.values()]
    assert sorted({name for name in names if names.count(name) > 1}) == []


@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", "--no-cache", "."),
        ("ruff", "format", "--no-cache", "--check", "."),
        ("mypy", "--cache-dir=/dev/null", *map(str, imports.PACKAGE_FOLDERS), "rules"),
    ],
    ids=" ".join,
)
def test_style_and_types(command: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
