"""The blocks of code in pages: the files of a user's workspace, and the commands."""

import re

from tests.building import ROOT


def blocks(page: str) -> list[tuple[str, str]]:
    """The language and the text of each block of code in a page."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)


def files(*pages: str) -> dict[str, str]:
    """The files of a user's repository in pages: blocks that begin with a comment with the path. Two blocks add up."""
    texts: dict[str, str] = {}
    for page in pages:
        for _, text in blocks(page):
            if name := re.match(r"# (\S+)\n", text):
                texts[name[1]] = texts.get(name[1], "") + text
    return texts


def commands(page: str) -> list[str]:
    """The lines of a page's blocks for a shell."""
    return [line for language, text in blocks(page) if language == "sh" for line in text.splitlines()]
