"""How reports run commands: as Bazel's actions do."""

import re

from stagec.core.builds import actions
from tests.building import ROOT


def test_the_environment_is_that_of_the_rules() -> None:
    text = (ROOT / "rules" / "toolchain.bzl").read_text("utf-8")
    block = text[text.index("        env = dict(env, **{") : text.index("        execution_requirements")]
    fixed = dict(re.findall(r'"(\w+)": "([^"]*)",', block))
    assert fixed == {**actions.ENVIRONMENT, "LC_ALL": "C.UTF-8", "PYTHONNOUSERSITE": "1", "TZ": "UTC"}


def test_the_command_is_there() -> None:
    assert actions.ENTRY.is_file()
    assert actions.command()[-1] == str(actions.ENTRY)
