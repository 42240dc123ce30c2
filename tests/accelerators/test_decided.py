"""What compilers of devices decided, run on CPUs: it gives what JAX gives, and a wrong decision does not.

`python -m tests.accelerators.table` does it with all functions of decided.toml.


Modules: `stagec_insight/decided.py`, `stagec_insight/commands/emulate.py`.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from stagec.bundle.archive import Archive
from stagec.checking import golden
from stagec.core.messages.refusal import LoadError
from stagec_insight import decided, emulation
from tests.accelerators import table
from tests.backends.deviceless import installed
from tests.building import build, stagec

pytestmark = installed(**{"jax-cuda13-pjrt": "jax_plugins.xla_cuda13", "libtpu": "libtpu"})

FOR_ALL = ["cache_update", "mlp", "exchanges_eight"]
"""Functions of which each device's program is run."""
CHANGED = ["convolution_gradients", "fully_sharded_step_eight", "lstm", "sorting", "transformer_step"]
"""Functions whose program for an H200 is changed."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    only = [*FOR_ALL, *(f"{name}.h200" for name in CHANGED), *(f"{name}.h200-8" for name in CHANGED), "solve.v5e-2x2"]
    return build(table.MANIFEST, tmp_path_factory.mktemp("decided"), only=only, hlo=["tpu"])


def test_programs_of_each_device_give_what_jax_gives(bundle: Path) -> None:
    """Those for CUDA are in the executables; those for TPUs beside them."""
    told = table.compare(bundle)
    assert [row for row in told["checks"] if not row["ok"]] == []
    ran = {(row["function"], row["target"].removesuffix(", on CPUs")) for row in told["checks"]}
    one, eight = ("b200", "h200", "v5e-2x2", "v6e-4x4"), ("b200-8", "h200-8", "v5e-2x4", "v6e-2x4")
    wanted = {(name, of) for name in FOR_ALL for of in (eight if name.endswith("eight") else one)}
    changed = {(name, "h200-8" if name.endswith("eight") else "h200") for name in CHANGED}
    assert ran == wanted | changed
    # libtpu has its own kernel, of which nothing is published.
    (refused,) = told["refused"]
    assert (refused["function"], refused["target"]) == ("solve", "v5e-2x2")
    why = r'[\w.-]+: custom-call "LuDecompositionBlock": it has no reference implementation'
    assert re.fullmatch(why, refused["why"])


def test_the_page_has_what_is_built(bundle: Path) -> None:
    """Rows about kernels: both cells of functions that are built for both devices here, and the first of the others."""
    page, made = _cells(table.shown("kernels")[1]), _cells(table.kernels(bundle.parent))
    assert list(page) == list(_cells(table.shown("decided")[1]))
    assert set(made) == {*FOR_ALL, *CHANGED}
    for name, cells in made.items():
        assert [cell for cell in cells if cell] == page[name][: 2 if name in FOR_ALL else 1], name


def _cells(rows: str) -> dict[str, list[str]]:
    lines = ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows.splitlines()[2:])
    return {name: cells for name, *cells in lines}


def test_a_program_that_is_not_there_is_named(bundle: Path) -> None:
    done = stagec("emulate", bundle, "mlp", "--platform", "tpu", "--json")
    rows = json.loads(done.stdout)["refused"]
    assert (done.returncode, [row["target"] for row in rows]) == (1, ["v5e-2x2", "v6e-4x4"])
    wanted = "the executable does not say it; write --hlo mlp.v5e-2x2=FILE, of output group hlo_proto"
    assert rows[0]["why"] == wanted


Change = Callable[[str], str]


def replaced(pattern: str, by: str, which: int = 0) -> Change:
    """Replace one place of a text, counted from 0 or from the end."""

    def change(text: str) -> str:
        places = list(re.finditer(pattern, text))
        place = places[which]
        return text[: place.start()] + place.expand(by) + text[place.end() :]

    return change


STEP, CONVOLUTION, SPLIT = "transformer_step", "convolution_gradients", "fully_sharded_step_eight"
CHANGES: dict[str, tuple[str, Change]] = {
    "a swapped operand of a difference": (STEP, replaced(r"subtract\((%\S+), (%\S+)\)", r"subtract(\2, \1)")),
    "a wrong part of an array": (STEP, replaced(r"\[0:32\], \[64:128\]", "[0:32], [0:64]")),
    "a wrong constant": (STEP, replaced(r"constant\(0\.015625\)", "constant(0.5)")),
    "a wrong mask": (STEP, replaced("direction=GE", "direction=GT")),
    "an operand of a product that is not added": (STEP, replaced('"beta":1', '"beta":0')),
    "another factor of a product": (STEP, replaced('"alpha_real":1', '"alpha_real":2')),
    "a wrong order of parts": (STEP, replaced(r"concatenate\((%\S+), (%\S+), ", r"concatenate(\2, \1, ")),
    "exchanged dimensions": (STEP, replaced(r"dimensions=\{3,0,4,1,2\}", "dimensions={3,1,4,0,2}")),
    "a wrong layout": (STEP, replaced(r"f32\[4,64,32\]\{2,1,0\} bitcast", "f32[4,64,32]{1,2,0} bitcast")),
    "a wrong layout between computations": (STEP, replaced(r"\{2,1,0\} parameter\(0\)", "{1,2,0} parameter(0)")),
    "a transposition that is lost": (
        STEP,
        replaced(r"(f32\[4,4,32,32\]\{3,2,1,0\} transpose.*)dimensions=\{0,1,3,2\}", r"\1dimensions={0,1,2,3}"),
    ),
    "a wrong begin of a maximum": (STEP, replaced(r"constant\(-inf\)", "constant(1000)")),
    "memory of a parameter that is not donated": (STEP, replaced(r"\{0\}: \(\d+,", "{0}: (5,")),
    "a wrong part of a patch": (
        CONVOLUTION,
        replaced(r"(slice=\{\[0:2:1\], \[0:15:2\], )\[1:16:2\]", r"\1[2:17:2]"),
    ),
    "wrong padding": (CONVOLUTION, replaced("padding=0_0x0_1x", "padding=0_0x1_0x")),
    "wrong zeros between": (CONVOLUTION, replaced("padding=0_0_0x2_1_1x2_1_1", "padding=0_0_0x2_1_1x1_2_1")),
    "a wrong stride": (CONVOLUTION, replaced(r"slice=\{\[0:2\], \[0:16\]", "slice={[0:2], [1:17]")),
    "a dropped collective": (SPLIT, replaced(r" all-reduce-start\((%\S+)\), .*", r" copy(\1)")),
    "another dropped collective": (SPLIT, replaced(r"(f32\[\]) all-reduce-start\((%\S+)\), .*", r"\1 copy(\2)")),
    "wrong groups of devices": (SPLIT, replaced(r"replica_groups=\[4,2\]<=\[8\]", "replica_groups=[4,2]<=[2,4]T(1,0)")),
    "a wrong part for a device": (SPLIT, replaced(r"\{0, 0, 1, 1, 2, 2, 3, 3\}", "{0, 0, 1, 1, 3, 3, 2, 2}")),
    "results of an exchange that change places": (
        SPLIT,
        replaced(r"all-gather-start\((%loop\S+), (%wrapped\S+)\)", r"all-gather-start(\2, \1)"),
    ),
    "a loop that turns too seldom": ("lstm", replaced(r"constant\(6\)", "constant(5)")),
    "a wrong gate": ("lstm", replaced(r"\[96:128\]", "[64:96]")),
    "a wrong order": ("sorting", replaced(r"(lt_to\S+ = .*)direction=LT", r"\1direction=GT")),
    "a wrong axis": ("sorting", replaced("iota_dimension=1", "iota_dimension=0")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_wrong_decision_is_noticed(bundle: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    function, change = CHANGES[what]
    readable = emulation.readable
    texts = []

    def changed(module: object) -> str:
        texts.extend([readable(module), change(readable(module))])
        return texts[-1]

    monkeypatch.setattr(emulation, "readable", changed)
    try:
        outcomes = list(decided.check(Archive(bundle), [function], "cuda"))
        noticed = any(isinstance(outcome, golden.Refused) or not outcome.ok for outcome in outcomes)
    except LoadError:  # XLA sees it
        noticed = True
    assert noticed
    before, after = texts
    assert before != after
