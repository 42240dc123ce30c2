"""The command line: help, options, and errors of any command.

Modules: `cli/options.py`, `core/builds/version.py`.
"""

import importlib
import json
import re
from pathlib import Path

import pytest

from stagec.cli import ACTIONS, COMMANDS, GROUPS, actions
from stagec.core.builds import extensions
from stagec.core.builds.specs import to_json
from stagec.core.builds.version import VERSION
from stagec.pjrt import packages
from tests.building import checked, stagec
from tests.frontends.workspace import spec


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command: str) -> None:
    text = checked(*command.split(), "--help")
    assert text.startswith(f"usage: stagec {command}")
    assert "--json" in text


def test_help_lists_the_commands_and_that_of_actions_lists_those() -> None:
    texts = {kind: " ".join(checked(*kind.split(), "--help").split()) for kind in ("", "action")}
    for command in COMMANDS:
        kind, _, name = command.rpartition(" ")
        extension = extensions.of_command(command)
        module = f"stagec.cli.{'actions.' if kind else ''}{name.replace('-', '_')}"
        about = extension.commands[command] if extension else importlib.import_module(module).__doc__
        assert f" {name} {about}" in texts[kind]
        assert f" {name} {about}" not in texts["" if kind else "action"]
    assert checked("action") == checked("action", "--help")


def test_every_module_of_an_action_is_one() -> None:
    files = {path.stem.replace("_", "-") for path in Path(actions.__file__).parent.glob("*.py")} - {"--init--"}
    assert files == {name for names in ACTIONS.values() for name in names}


def test_help_is_what_the_program_alone_shows() -> None:
    assert checked() == checked("--help") == checked("help")
    assert checked("help", "build") == checked("build", "--help")
    titles = [line.removesuffix(":") for line in checked().splitlines() if line.endswith(":") and line[0] != " "]
    assert titles == [*GROUPS, *(row.about for row in extensions.EXTENSIONS if row.commands), "options"]
    assert len([name for name in COMMANDS if not name.startswith("action ")]) <= 30
    assert len(COMMANDS) == len({*COMMANDS})


def test_the_version() -> None:
    assert checked("--version") == f"stagec {VERSION}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inpsect", "x"], 'stagec: error: no command "inpsect": did you mean "inspect"?\n'),
        (["wholly"], 'stagec: error: no command "wholly": stagec --help lists what there is\n'),
        (["action", "compil", "x"], 'stagec action: error: no command "compil": did you mean "compile"?\n'),
        (["compile", "x"], 'stagec: error: no command "compile": stagec --help lists what there is\n'),
        (["action", "jaxpr", "--spek", "x"], 'stagec action jaxpr: error: no option --spek: did you mean "--spec"?\n'),
        (["inspect", "x", "--rovs", "3"], 'stagec inspect: error: no option --rovs: did you mean "--rows"?\n'),
        (["inspect", "--jsno"], 'stagec inspect: error: no option --jsno: did you mean "--json"?\n'),
        (["inspect", "x", "--most=3", "--wholly=4"], "no option --wholly: stagec inspect --help lists what there is\n"),
        (["inspect", "x", "y"], "stagec inspect: error: unrecognized arguments: y\n"),
        (["inspect", "x", "--rows", "0"], "argument --rows: write a whole number, 1 or more, not '0'\n"),
        (["inspect", "x", "--sizes", "--locate", "y"], "argument --locate: not allowed with argument --sizes\n"),
        (["bench", "x", "--threads", "0"], "argument --threads: write a whole number, 1 or more, not '0'\n"),
        (["bench", "x", "--threads", "2", "two"], "argument --threads: write a whole number, 1 or more, not 'two'\n"),
        (["bench", "x", "--starts", "-1"], "argument --starts: write a whole number, 0 or more, not '-1'\n"),
        (["bench", "x", "--seconds", "nan"], "argument --seconds: write a number of more than 0, not 'nan'\n"),
    ],
)
def test_misspelt_words_and_numbers_that_mean_nothing(words: list[str], said: str) -> None:
    done = stagec(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: stagec")
    assert done.stderr.endswith(said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspect", "x", "--most", "0"], "--most is for --sizes: leave it out\n"),
        (["explain", "x", "--plugin", "cuda=x"], "--plugin is for two artifacts: leave it out\n"),
        (["explain", "x", "y", "--executable-only"], "--executable-only is for a bundle alone: leave it out\n"),
        (["explain", "x", "y", "--log", "z"], "--log is for one folder: leave it out\n"),
        (["explain", "x", "--log", "z", "--target", "t"], "--target is for a bundle alone: leave it out\n"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(words: list[str], said: str) -> None:
    done = stagec(*words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize("command", ["export", "compile"])
def test_a_wrong_spec_is_said(command: str, tmp_path: Path) -> None:
    """Its file is named, and what to give: a manifest has none, and a plan many."""
    (tmp_path / "m.toml").write_text("[manifest]\n")
    (tmp_path / "plan.json").write_text("{}")
    for file in ("m.toml", "plan.json", "missing.json"):
        done = stagec("action", command, "--spec", file, "--exported", "x", "--output", "y", cwd=tmp_path)
        if command == "export":
            done = stagec("action", command, "--spec", file, "--output", "y", cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        what = "cannot be read: No such file" if file == "missing.json" else "not the spec of "
        assert done.stderr.startswith(f"{file}: {what}")
        assert file == "missing.json" or "\n  give one of the specs in the plan of the manifest" in done.stderr


def test_an_export_without_an_import_root(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "model.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "f.spec").write_text(to_json(spec()))
    words = ("action", "export", "--spec", "f.spec", "--output", "f.exported")
    done = stagec(*words, cwd=tmp_path)
    said = "pkg/m.toml: functions.f.entry: no module 'pkg'\n  pkg is in this folder: add --import-root .\n"
    assert (done.returncode, done.stderr) == (2, said)
    checked(*words, "--import-root", ".", cwd=tmp_path)


def test_the_beginning_of_an_option_is_enough(zoo: Path) -> None:
    assert checked("inspect", zoo, "--sizes", "--row", "2") == checked("inspect", zoo, "--sizes", "--rows", "2")


def test_the_command_is_there_to_tell_it(tmp_path: Path) -> None:
    """A text that is nested too deeply overflows the stack of MLIR's parser."""
    (tmp_path / "deep.mlir").write_text("module {" * 100_000)
    done = stagec("inspect", "deep.mlir", "--locate", "tanh", cwd=tmp_path)
    message = "deep.mlir: what reads it ended with SIGSEGV\n  give a file of output group debug\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_arguments_may_come_from_a_file(zoo: Path, tmp_path: Path) -> None:
    (tmp_path / "arguments").write_text(f"--json\n{zoo}\n")
    assert json.loads(checked("inspect", f"@{tmp_path / 'arguments'}"))["name"] == "zoo"


@pytest.mark.skipif(packages.folder("jax_plugins.xla_cuda13") is not None, reason="jax-cuda13-pjrt is installed")
def test_describing_a_device_takes_the_plugin(tmp_path: Path) -> None:
    done = stagec("describe-device", "--output", tmp_path / "device.toml")
    assert (done.returncode, done.stdout) == (2, "")
    what, write, where = done.stderr.splitlines()
    assert what == "the plugin that compiles for cuda is not installed: jax-cuda13-pjrt"
    assert write.startswith("  write jax-cuda13-pjrt==")
    assert "cuda_lock" in write + where
    assert list(tmp_path.iterdir()) == []


def test_an_operand_behind_an_option(tmp_path: Path) -> None:
    """As a Bazel target puts what it has behind the words of a person."""
    done = stagec("explain", "a.aot", "--import-root", ".", "b.aot", cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "a.aot: no such file")
    done = stagec("explain", "a.aot", "--import-root", ".", "b.aot", "c.aot", cwd=tmp_path)
    assert re.search(r"unrecognized arguments: .*c\.aot\n$", done.stderr)  # Python 3.14 takes b.aot by itself
