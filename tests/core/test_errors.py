"""What a user sees of a mistake."""

import copy
import pickle

import pytest

from stagec.core.messages.errors import Problem, StagecError, blaming
from stagec.core.messages.refusal import LoadError


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("m.toml", "functions.f", "is wrong", "write this"), "m.toml: functions.f: is wrong\n  write this"),
        (Problem("m.toml", "", "is wrong"), "m.toml: is wrong"),
        (Problem("", "", "is wrong"), "is wrong"),
        (Problem("m.toml", "k", "is wrong", "first\n\nsecond"), "m.toml: k: is wrong\n  first\n\n  second"),
        (Problem("m.toml", "k", "is wrong", "do", about="f for cpu"), "m.toml: k: f for cpu: is wrong\n  do"),
        (Problem("m.toml", "k", "is wrong", "do", "f for cpu", "//m:f"), "//m:f: is wrong (m.toml: k)\n  do"),
        (Problem("", "", "is wrong", label="//m:f"), "//m:f: is wrong"),
    ],
)
def test_text_of_a_problem(problem: Problem, text: str) -> None:
    assert str(problem) == text


def test_an_error_shows_all_its_problems() -> None:
    error = StagecError(Problem("a", "", "one", "do"), Problem("b", "k", "two"))
    assert str(error) == "a: one\n  do\nb: k: two"
    assert [problem.what for problem in error.problems] == ["one", "two"]


def test_an_error_of_a_target_names_it() -> None:
    error = StagecError(Problem("a", "", "one", "do"), Problem("b", "k", "two"))
    assert str(error.of("//m:f")) == "//m:f: one (a)\n  do\n//m:f: two (b: k)"
    assert str(error.of("")) == str(error)


def test_an_error_without_problems_is_a_bug() -> None:
    with pytest.raises(ValueError, match="at least one Problem"):
        StagecError()


def test_errors_can_be_copied_and_sent_between_processes() -> None:
    error = StagecError(Problem("a", "k", "one"))
    assert copy.copy(error).problems == error.problems
    assert pickle.loads(pickle.dumps(error)).problems == error.problems


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FileNotFoundError(2, "No such file", "m.aot"), "m.aot: cannot be read: No such file"),
        (FileNotFoundError(2, "No such file", "m.json"), "m.json: cannot be read: No such file"),
        (OSError(22, "it is a folder"), "m.aot: cannot be read: it is a folder"),
        (ValueError("m.aot: it is damaged"), "m.aot: not a bundle: it is damaged\n  give a bundle"),
        (LoadError("format", "it is damaged"), "m.aot: not a bundle: it is damaged\n  give a bundle"),
    ],
)
def test_a_file_is_named_that_a_block_cannot_use(error: Exception, text: str) -> None:
    with pytest.raises(StagecError) as caught, blaming("m.aot", "give a bundle", "not a bundle: "):
        raise error
    assert (str(caught.value), caught.value.__cause__) == (text, error)


def test_other_errors_of_a_block_pass() -> None:
    with pytest.raises(KeyError), blaming("m.aot"):
        raise KeyError("bundle")
    with pytest.raises(LoadError), blaming("m.aot", of=(ValueError,)):
        raise LoadError("format", "damaged")
