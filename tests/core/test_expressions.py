"""Expressions are parsed and never evaluated; every refusal is a ValueError, in any number of threads."""

import ast
from concurrent.futures import ThreadPoolExecutor

import pytest

from stagec.core.sizes import expressions


def test_an_expression_is_a_tree() -> None:
    assert ast.unparse(expressions.parse(" 2*(n + 1) ")) == "2 * (n + 1)"
    assert isinstance(expressions.parse("open('/dev/null', 'w')"), ast.Call)


@pytest.mark.parametrize("text", ["", "1 +", "a = 1", "import os", "a; b", "\0", "(" * 1000, "-" * 100_000 + "1"])
def test_what_is_not_an_expression(text: str) -> None:
    with pytest.raises(ValueError, match="not an expression: "):
        expressions.parse(text)


def test_a_mistake_in_a_file_has_its_line() -> None:
    assert [node.lineno for node in expressions.module("a = 1\n\nb = 2\n").body] == [1, 3]
    with pytest.raises(ValueError, match="line 2: "):
        expressions.module("a = 1\nb = = 2\n")
    with pytest.raises(ValueError, match="null bytes"):
        expressions.module("a = '\0'")


def test_threads_may_parse_at_once() -> None:
    """Python 3.11's parser counts the depth of all threads together."""
    deep = "(" * 90 + "n" + ")" * 90
    with ThreadPoolExecutor(8) as threads:
        assert {ast.unparse(tree) for tree in threads.map(expressions.parse, [deep] * 400)} == {"n"}
