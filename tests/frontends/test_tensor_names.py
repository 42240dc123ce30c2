"""Names that a manifest gives to the arrays of a function, for servers."""

from pathlib import Path

import pytest

from tests.building import build

MANIFEST = """
[manifest]
name = "m"
version = "1.0.0"
[functions.f]
entry = "f:f"
args = ["f32[3]", {{ a = "f32[3]" }}]
platforms = ["cpu"]
[functions.f.serve]
{names}
"""


@pytest.mark.pinned(but=3)
@pytest.mark.parametrize(
    ("names", "text"),
    [
        (
            'inputs = { X = "first" }\noutputs = { "result[\'c\']" = "d" }',
            "m.toml: functions.f.serve.inputs['X']: no array of the inputs has this path\n"
            '  did you mean "x"?\n'
            "m.toml: functions.f.serve.outputs[\"result['c']\"]: no array of the outputs has this path\n"
            "  did you mean \"result['b']\"?\n",
        ),
        (
            'inputs = { "more[\'a\']" = "x" }',
            'm.toml: functions.f.serve.inputs["more[\'a\']"]: "x" is the path of another array\n  write another name\n',
        ),
    ],
)
def test_names_of_no_array(tmp_path: Path, names: str, text: str) -> None:
    (tmp_path / "f.py").write_text("def f(x, more):\n    return {'b': x + more['a']}\n")
    (tmp_path / "m.toml").write_text(MANIFEST.format(names=names))
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(AssertionError) as error:
        build("m.toml", out, tmp_path)
    assert text in str(error.value)
