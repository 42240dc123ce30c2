"""docs/arrays.md: what it tells people to write works.

Modules: `stagec_arrays/*.py`, `stagec_arrays/numpy/*.py`.
"""

import re
from typing import Any

from tests.building import ROOT


def test_the_pages_programs_run() -> None:
    page = (ROOT / "docs" / "arrays.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "docs/arrays.md", "exec"), names)
    assert "batch" in str(names["exported"])
    assert "Python's if" in str(names["message"])
    assert "write a[0, 1] = 5, not a[0][1] = 5" in str(names["lost"])
    assert str(names["underivable"]).startswith("docs/arrays.md:2: reduce_window has a derivative only for sums")
    assert "an unregistered type `stagec_arrays.namespace.linalg:EighResult`" in str(names["unregistered"])
    found: Any = names["found"]
    assert found.eigenvalues.shape == (3,)
