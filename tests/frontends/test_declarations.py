"""Names that a manifest gives to the arrays of a function, and state that it says servers keep."""

from dataclasses import replace
from pathlib import Path

import pytest

from stagec.core.builds.specs import function_spec
from stagec.core.messages.errors import StagecError
from stagec.frontends import declarations
from tests.building import build

MANIFEST = """
[manifest]
name = "m"
version = "1.0.0"
[functions.f]
entry = "f:f"
args = ["f32[3]", {{ a = "f32[3]" }}]
donate_argnames = ["more"]
platforms = ["cpu"]
[functions.f.serve]
{names}
"""


def test_two_arrays_of_one_name(tmp_path: Path) -> None:
    """One tensor of a request would be both. Also where the arguments come from Python, and from no planner."""
    (tmp_path / "f.py").write_text("def f(x, more):\n    return {'b': x + more['a']}\n")
    names = "inputs = { x = 'first', \"more['a']\" = 'second' }"
    (tmp_path / "m.toml").write_text(MANIFEST.format(names=names))
    (out := tmp_path / "out").mkdir()
    build("m.toml", out, tmp_path)
    spec = function_spec((out / "m.f.spec").read_text())
    serve = {"inputs": dict.fromkeys(("x", "more['a']"), "one")}
    with pytest.raises(StagecError) as error:
        declarations.check(replace(spec, serve=serve), (out / "m.f.exported").read_bytes(), ["x", "more"])
    assert str(error.value) == (
        'm.toml: functions.f.serve.inputs["more[\'a\']"]: "one" is the name of x\n  write another name'
    )


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
        (
            "state.first = { argument = 'mor', result = 'res' }\nstate.second = { argument = \"more['a']\" }\n"
            "inputs = { \"more['a']\" = 'y' }",
            "m.toml: functions.f.serve.inputs[\"more['a']\"]: no array of the inputs has this path\n"
            "  write one of x\n"
            "m.toml: functions.f.serve.state.first.argument: no array of the arguments is at mor\n"
            '  did you mean "more"?\n'
            "m.toml: functions.f.serve.state.first.result: no array of the results is at res\n"
            '  did you mean "result"?\n'
            "m.toml: functions.f.serve.state.second: a call consumes it, because it is donated, and no result takes "
            "its place\n"
            "  name a result, or do not donate it\n",
        ),
        (
            "state.first = { argument = 'x', result = 'result' }\n"
            "state.second = { argument = 'more', result = 'result' }",
            "m.toml: functions.f.serve.state.second: more['a'] is f32[3], and result['b'] is f32[3]\n"
            "  return the arrays that the function takes, in the same structure\n",
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
