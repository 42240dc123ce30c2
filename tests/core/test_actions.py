"""How reports run commands: as Bazel's actions do."""

from stagec.core.builds import actions


def test_the_command_is_there() -> None:
    assert actions.ENTRY.is_file()
    assert actions.command()[-1] == str(actions.ENTRY)
