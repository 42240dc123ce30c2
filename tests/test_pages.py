"""The pages: generated parts are current, links lead somewhere, manifests are valid, and every command is run."""

import ast
import io
import json
import os
import re
import tokenize
import tomllib
from pathlib import Path

import pip
import pytest

import stagec
import stagec_arrays
from stagec.bundle.expiry import readable_until
from stagec.manifest import load_manifest, plan
from tests.building import COMPILER, ROOT
from tools import imports
from tools.pages.generated import PAGES, PYTHON, Page
from tools.pages.hooks import OUTSIDE

WRITTEN = sorted({*OUTSIDE, *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))})
TEXTS = {path: (ROOT / path).read_text("utf-8") for path in WRITTEN}
PROSE = {path: re.sub(r"```.*?```|`(?:[^`\n]|\n(?!\n))*`", "``", text, flags=re.DOTALL) for path, text in TEXTS.items()}
"""Pages without code."""
DEFAULTS = {
    python: re.findall(r"^jax==(\S+)", (COMPILER / lock).read_text("utf-8"), re.MULTILINE)[0]
    for python, lock in (("3.11,", "requirements.lock"), ("3.12 and newer", "newest/requirements.lock"))
}
"""The JAX that a workspace without a lock builds with, by the Python as pages name it."""
REFUSED = (
    r"(?<![Tt]here )\b(?:is|are|was|were) no (?!longer\b|more\b|matter\b)",
    r"\b(?:am|is|are|was|were|be|been) told\b",
    r"\blaid over\b",
    r"\bfill\w* (?:\w+ ){0,4}up\b",
    r"\btexts\b",
    r"\bthe most (?:is|are)\b",
    r"\bof (?:Bazel|JAX|NumPy|Python|XLA|malloc|numpy|pip|stagec)'s(?=[.,;:)]| (?:that|which|is|are)\b)",
    r"\banew\b",
    r"\b(?:inside|outside) of\b",
    r"\bfor ever\b",
    r"\bnobody's\b",
    r"\b[Ww]hoever\b",
    r"\b(?:is|are) wanted\b",
)
"""What plain English says in another way: "is not a", "pad", "string", "again", "inside", "expected"."""
_WORDS = {tokenize.STRING, tokenize.COMMENT}
PROGRAMS = r"    (?:\./bazelw|tools/\w|python3|openssl|\.venv/)"
RUN_ELSEWHERE = {
    "./bazelw run //docs:serve": "tests/test_site.py",
    **{f"tools/cluster {command}": "tests/test_remote_execution.py" for command in ("start", "status", "remove")},
    "python3.12 tools/on_device prepare build/on_device --device h100-sxm h200 --jax 0.11.2": "tests/fake_device",
    "python3 tools/on_device run build/on_device --output build/on_device_results": "tests/fake_device",
    "./bazelw run //:init -- --workspace ../mine models/net.py:predict": "tests/test_readme.py",
}


def is_code(path: Path) -> bool:
    """Whether a file is Python, Starlark, or a script of a shell."""
    if path.suffix in (".bzl", ".py", ".sh") or path.name == "BUILD":
        return path.is_file()
    return not path.suffix and path.is_file() and path.read_bytes()[:2] == b"#!"


def refused_in(path: Path) -> list[str]:
    """Return what of REFUSED is in the strings and comments of a file of code."""
    text = path.read_text("utf-8")
    parts = list(enumerate(text.splitlines(), 1))
    if path.suffix != ".sh" and not re.match("#!.*sh$", text, re.MULTILINE):  # the others have Python's syntax
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        parts = [(token.start[0], token.string) for token in tokens if token.type in _WORDS]
    return [
        f"{os.path.relpath(path, ROOT)}:{line}: {match[0]}"
        for line, part in parts
        for pattern in REFUSED
        for match in re.finditer(pattern, part)
    ]


def commands(page: str) -> list[str]:
    return [line.strip() for line in TEXTS[page].splitlines() if re.match(PROGRAMS, line)]


@pytest.mark.parametrize("page", [page for page in PAGES if page.path not in PYTHON], ids=lambda page: page.path)
def test_the_generated_part_is_current(page: Page) -> None:
    assert (ROOT / page.path).read_text("utf-8") == page.current(ROOT), "run: ./bazelw run //docs:generate"


def test_every_public_name_is_on_one_page() -> None:
    public = {*stagec.__all__, *stagec_arrays.__all__} - {"__version__", "lax", "nn", "numpy", "random"}
    assert sorted(name for names in PYTHON.values() for name in names) == sorted(public)


@pytest.mark.parametrize("page", WRITTEN)
def test_links_lead_to_files(page: str) -> None:
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(([^)\s:#]+)(?:#[^)\s]*)?\)", PROSE[page])
    assert [link for link in links if not (folder / link).exists()] == []


@pytest.mark.parametrize("page", WRITTEN)
def test_links_say_where_they_lead(page: str) -> None:
    """They have the title of a page or of a section, or other words."""
    assert re.findall(r"\[[\w/.-]+\.md\]\([^)]*\)", PROSE[page]) == []


@pytest.mark.parametrize("page", WRITTEN)
def test_the_words_are_plain(page: str) -> None:
    text = " ".join(PROSE[page].split())
    assert [match[0] for pattern in REFUSED for match in re.finditer(pattern, text)] == []


@pytest.mark.parametrize(
    "package", sorted({path.parent for path in imports.modules().values()}), ids=lambda path: path.name
)
def test_words_of_code(package: Path) -> None:
    """Docstrings, messages and comments of the package read like the pages."""
    assert [place for path in sorted(package.glob("*.py")) for place in refused_in(path)] == []


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "rules", "tests", "tools"])
def test_words_of_code_outside_the_package(folder: str) -> None:
    """Those of Python, Starlark and shell scripts."""
    paths = sorted(path for path in (ROOT / folder).rglob("*") if is_code(path))
    assert [place for path in paths for place in refused_in(path)] == []


@pytest.mark.parametrize("page", WRITTEN)
def test_code_is_marked_as_code(page: str) -> None:
    """No backtick is left over, and what looks like a tag of HTML is code; anchors of the reference are none."""
    text = re.sub(r"^(?: {4}.*|<!--.*-->|<a id=\"[\w.]+\"></a>)$", "", PROSE[page], flags=re.MULTILINE)
    assert re.findall(r"(?<!`)`(?!`)|</?\w+[^>]*>", text) == []


@pytest.mark.parametrize("page", WRITTEN)
def test_every_command_is_run(page: str) -> None:
    script = [line.strip() for line in (ROOT / ".ci" / "run").read_text("utf-8").splitlines()]
    # The suite "release" is for people: it takes too long for each change.
    suites = re.findall(r'(?s)name = "(?:thorough|release)",.*?\n\)', (ROOT / "tests" / "BUILD").read_text("utf-8"))
    tests = {f"//tests:{name}" for suite in suites for name in re.findall(r'"(\w+)",', suite)}
    for command in commands(page):
        if command.startswith(".venv/bin/python -m pytest tests/"):  # a part of the whole run
            assert [path for path in command.split()[3:] if not (ROOT / path).exists()] == []
        elif command.startswith("./bazelw test "):  # another one
            assert "./bazelw test //... //tests:thorough" in script
            targets = {target for target in command.split()[2:] if not target.startswith("//examples/")}
            assert {"//...", *tests} >= targets, f"{page}: {command}"
        else:
            assert command in script or command in RUN_ELSEWHERE, f"{page}: {command}"


def test_pages_have_commands() -> None:
    assert sum(len(commands(page)) for page in WRITTEN) > 20


def test_what_readme_says_to_paste_prints_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    ((code, printed),) = re.findall(
        r"paste this:\n\n```python\n(.*?)```\n\n```text\n(.*?)```", TEXTS["README.md"], re.DOTALL
    )
    exec(code, {})
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("page", ["README.md", "docs/install.md", "docs/serving.md"])
def test_pip_installs_into_a_virtual_environment(page: str) -> None:
    """Debian and Ubuntu refuse everything else."""
    words = re.findall(r"([^\s`]*)pip install [^\n`]*compiler", TEXTS[page])
    assert words
    assert {*words} == {".venv/bin/"}


def test_readme_is_short() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 160


@pytest.mark.parametrize("page", [page for page in WRITTEN if "```toml\n" in TEXTS[page] and page.startswith("docs/")])
def test_manifests_are_valid(page: str, tmp_path: Path) -> None:
    """A block may leave out the manifest's header and the target cpu; one that has only targets, the functions."""
    (tmp_path / "h200.autotune.textproto").touch()
    for number, block in enumerate(re.findall(r"^```toml\n(.*?)^```$", TEXTS[page], re.MULTILINE | re.DOTALL)):
        written = tomllib.loads(block)
        text = block
        if "manifest" not in written:
            text += '\n[manifest]\nname = "page"\nversion = "1"\n'
        if "cpu" not in written.get("targets", {}):
            text += '\n[targets.cpu]\nplatform = "cpu"\nisa = "AVX2"\n'
        if "functions" not in written:
            text += '\n[functions.f]\nentry = "m:f"\nargs = ["f32"]\ntargets = ["cpu"]\n'
        elif any("targets" not in function for function in written["functions"].values()):
            text = re.sub(r"^(entry = .*)", r'\1\nplatforms = ["cpu"]', text, flags=re.MULTILINE)
        path = tmp_path / f"block{number}.toml"
        path.write_text(text)
        plan(load_manifest(path))


def test_every_message_in_the_table_is_one_of_the_code() -> None:
    section = TEXTS["docs/troubleshooting.md"].partition("\n## Building\n")[2].partition("\n## ")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(messages) > 15
    sources = [
        *(COMPILER / "stagec").rglob("*.py"),
        *(path for end in ("bzl", "py", "sh") for path in (ROOT / "rules").rglob(f"*.{end}")),
        *(Path(pip.__file__).parent / "_internal").rglob("*.py"),  # whose words are passed on
    ]
    code = "\n".join(path.read_text("utf-8") for path in sources)
    assert [message for message in messages if message not in code] == []


def test_every_command_has_its_exit_statuses() -> None:
    """Those that end with another status than 0 and 2 by themselves."""
    section = TEXTS["docs/troubleshooting.md"].partition("\n## Exit status")[2]
    returning = {
        path.stem.replace("_", "-")
        for path in (COMPILER / "stagec" / "cli").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Answer" and len(node.args) == 3
    }
    assert len(returning) >= 9
    assert {name for name in returning if f"`{name}" not in section} == set()


def test_the_page_lists_what_a_manifest_declares() -> None:
    text = (ROOT / "rules" / "private" / "manifest.bzl").read_text("utf-8")
    declared = set(re.findall(r'(?:name \+ |\(aot_\w+, )"\.(\w+)"', text)) - {"imports"}  # which is for exports alone
    for pattern in re.findall(r'(?:"%s|name \+ ")\.(golden_\w*%s\w*test)', text):
        declared |= {pattern.replace("%s", which) for which in ("", "cuda_", "tpu_")}
    declared = {name.replace("__", "_") for name in declared} - {"golden_optimized_test"}  # none for CPUs
    section = TEXTS["docs/bazel.md"].partition("\n## Targets\n")[2].partition("\n## ")[0]
    listed = re.findall(r"`<manifest>\.(\w+)`", section)
    assert len(declared) > 15
    assert sorted(listed) == sorted(declared)


def test_the_page_lists_every_output_group_of_a_bundle() -> None:
    text = (ROOT / "rules" / "private" / "bundle.bzl").read_text("utf-8")
    groups = re.search(r"^_TEXTS = \[(.*)\]$", text, re.MULTILINE)
    assert groups
    section = TEXTS["docs/bazel.md"].partition("\n## Output groups\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)`", section, re.MULTILINE)) == sorted(
        [*re.findall(r'"(\w+)"', groups[1]), "profile"]
    )


def test_the_matrix_lists_the_known_builds_of_jaxlib() -> None:
    builds = json.loads((COMPILER / "stagec" / "patches" / "known_builds.json").read_text("utf-8"))
    pythons: dict[str, set[str]] = {}
    for build in builds:
        if build["library"] == "libjax_common.so" and not build["python"].endswith("t"):
            version = build["python"].removeprefix("cp3")
            pythons.setdefault(build["version"], set()).add(f"3.{version}")
    section = TEXTS["docs/install.md"].partition("<!-- jaxlib -->")[2].partition("<!-- end -->")[0]
    rows = re.findall(r"^\| (\d.*?) \| (.*?) \|$", section, re.MULTILINE)
    shown = {version: set(row.split(", ")) for versions, row in rows for version in versions.split(", ")}
    assert shown == pythons


def test_the_index_links_every_page() -> None:
    links = re.findall(r"\]\(([^)#]+)", TEXTS["docs/index.md"])
    assert {os.path.normpath(f"docs/{link}") for link in links} == {*WRITTEN} - {"docs/index.md"}


def test_the_site_has_every_page() -> None:
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(OUTSIDE.get(page, os.path.relpath(page, "docs")) for page in WRITTEN)


@pytest.mark.parametrize("page", ["README.md", "docs/releases.md"])
def test_the_day_until_which_jax_reads_what_the_default_exports(page: str) -> None:
    said = re.findall(
        r"(\S+) for (\S+), the default on Python (3\.11,|3\.12 and newer)",
        " ".join((ROOT / page).read_text("utf-8").split()),
    )
    assert said == [(readable_until(jax), jax, python) for python, jax in DEFAULTS.items()]


@pytest.mark.parametrize("page", ["README.md", "docs/bazel.md", "docs/accelerators.md", "docs/install.md"])
def test_pages_name_what_is_built_with_without_a_lock(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert [jax for jax in DEFAULTS.values() if not re.search(rf"\b{re.escape(jax)}\b(?!\.\d)", text)] == []
