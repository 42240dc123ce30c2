"""Functions as a server runs them: which requests run together, and that nobody sees it in the result."""

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import stagec
from stagec.loader import crossings
from stagec.loader.once import Once
from stagec_serve import server
from stagec_serve.model import Model
from stagec_serve.refusal import RequestError
from tests.building import ROOT, checked
from tests.bundles import without_executables

OLDER = ROOT / "tests" / "corpus" / "2026-11-bundles" / "plain.aot"
"""Executables of jaxlib 0.10.1, whose results this jaxlib gives too."""


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 16)).astype(np.float32)


def test_requests_are_gathered_where_rows_are_independent(models: dict[str, Model]) -> None:
    assert {name: (model.largest, model.trust) for name, model in models.items() if model.rows} == {
        "ordered": (4, "declared"),
        "predict": (32, "proven"),
        "scaled": (4, "proven"),
        "structured": (4, "proven"),
    }
    what = "no proof that its rows are independent: stablehlo.reduce{} joins rows, or takes some of them"
    write = 'if they are, the manifest may say serve.rows = "independent"'
    assert models["running"].alone == f"{what.format('_window (8x3xf32)')}; {write}"
    assert models["centred"].alone == f"{what.format(' (3xf32)')}; {write}"
    depends = "result: a row's result depends on its place, on other rows, or on padding"
    assert models["scarce"].alone == f"{depends} (bucket batch = 4)"  # although it is declared
    assert models["counted"].alone == "count is the number of rows, which other requests change"
    assert {model.trust for model in models.values() if not model.rows} == {""}
    assert models["draw"].alone == models["pooled"].alone == "the manifest declares no padding of batch"


def test_a_reason_names_the_lines_of_the_model(served: Path, tmp_path: Path) -> None:
    """If the file with these is beside the bundle."""
    place, source = tmp_path / served.name, served.parent.parent / "source"
    shutil.copy(served, place)
    lines = (source / "served.py").read_text("utf-8").splitlines()
    number = next(number for number, line in enumerate(lines, 1) if "x.mean(axis=0)" in line)
    spec, debug = served.with_name("served.centred.spec"), tmp_path / "served.centred.debug.mlir"
    checked("action", "locations", "--spec", spec, "--output", debug, "--import-root", source, cwd=source)
    with stagec.load(place) as bundle:
        assert f" (in served.py:{number}); if they are" in Model(bundle["centred"], "1", "batch").alone


def test_a_dimension_that_not_every_array_starts_with(bundle: stagec.Bundle) -> None:
    model = Model(bundle["pooled"], "1", "n")
    assert (model.rows, model.largest) == ("", 1)
    assert model.alone == "result is f32[3], and its rows are not those of n"
    assert (
        Model(bundle["scaled"], "1", "length").alone == "x is f32[batch,length], and its rows are not those of length"
    )
    assert Model(bundle["predict"], "1").alone == "no dimension is named to gather along"


def test_what_cannot_be_served_is_left_out_by_name(served: Path, bundle: stagec.Bundle, tmp_path: Path) -> None:
    _, left_out = server.models_of(bundle, "batch")
    assert left_out == {"turned": "z is c64[4], and the Open Inference Protocol has no such datatype"}
    with stagec.load(without_executables(served, tmp_path / "without.aot")) as compiling:
        models, left_out = server.models_of(compiling, "batch", "allow_compile")
    assert not models
    assert left_out["draw"] == "draw: the bundle has no executable of it that this server can use"


@given(st.lists(st.integers(0, 10), min_size=1, max_size=3))
def test_a_result_is_that_of_the_rows_alone_in_the_same_bucket(
    models: dict[str, Model], bundle: stagec.Bundle, counts: list[int]
) -> None:
    """To the last bit."""
    requests = [[rows(count, seed)] for seed, count in enumerate(counts)]
    bucket, results = models["predict"].run(requests)
    size = min(size for size in (1, 8, 32) if size >= sum(counts))
    assert bucket == f"batch = {size}"
    for (x,), (label, logits) in zip(requests, results, strict=True):
        padded = np.zeros((size, 16), np.float32)
        padded[: len(x)] = x
        alone = bundle["predict"](padded)
        assert label.tobytes() == alone["label"][: len(x)].tobytes()
        assert logits.tobytes() == alone["logits"][: len(x)].tobytes()


def test_a_mask_is_made(models: dict[str, Model]) -> None:
    x = np.arange(15, dtype=np.float32).reshape(5, 3)
    bucket, ((total,),) = models["pooled"].run([[x]])
    assert bucket == "n = 8"
    np.testing.assert_array_equal(total, x.sum(0))


def test_containers_are_put_together(models: dict[str, Model]) -> None:
    model = models["structured"]
    image = np.ones((3, 2, 3), np.float32)
    ids = np.arange(6, dtype=np.int32).reshape(3, 2)
    scale = np.array([1, 2, 3], np.float32).reshape(3, 1, 1)
    _, ((scaled, turned),) = model.run([[image, ids, np.array([True, False, True]), scale]])
    np.testing.assert_array_equal(scaled, image * scale)
    np.testing.assert_array_equal(turned, ids * np.array([[1], [-1], [1]]))


def test_a_request_of_many_rows_has_parts(models: dict[str, Model]) -> None:
    parts = models["predict"].parts([rows(70)])
    assert [len(x) for (x,) in parts] == [32, 32, 6]
    assert [len(x) for (x,) in models["running"].parts([rows(70)])] == [70]


def test_sizes_that_no_bucket_has(models: dict[str, Model]) -> None:
    with pytest.raises(RequestError) as error:
        models["scaled"].fit([np.zeros((2, 9), np.float32)])
    assert str(error.value) == (
        "scaled: no bucket has these sizes: x is f32[2,9] (buckets: batch = 1, length = 2; batch = 1, length = 8; "
        "batch = 4, length = 2; batch = 4, length = 8; smaller sizes of batch, length are padded)"
    )


class Alone(Model):
    """A model whose calls are those of a Python function, and whose buckets are others."""

    def __init__(self, of: Model, buckets: list[int], call: Callable[[np.ndarray], np.ndarray]) -> None:
        self.__dict__ = {**of.__dict__, "buckets": [{"batch": size} for size in buckets], "calls": []}
        self._function = call

    def _call(self, arrays: Any, kept: Any = None) -> Any:
        size = min(bucket["batch"] for bucket in self.buckets if bucket["batch"] >= len(arrays[0]))
        self.calls.append(size)
        padded = np.zeros((size, 16), np.float32)
        padded[: len(arrays[0])] = arrays[0]
        return {"batch": size}, [self._function(padded)[: len(arrays[0])]] * 2


@pytest.mark.parametrize("buckets", [[2], [1, 2], [3], [1, 8, 32], [8, 9]])
def test_whatever_depends_on_other_rows_is_seen(models: dict[str, Model], buckets: list[int]) -> None:
    """In each bucket by two calls, in the smallest by as many with unusual rows."""
    why = {
        "its place": lambda x: x * np.arange(1, len(x) + 1)[:, None],
        "the last place": lambda x: np.where(np.arange(len(x))[:, None] == len(x) - 1, x + 1, x),
        "the row before": lambda x: x + np.roll(x, 1, 0),
        "all rows": lambda x: x - x.mean(0),
        "the last row": lambda x: x + x[-1],
        "an equal row": lambda x: np.where((x[:, None] == x[None]).all(-1).sum(1, keepdims=True) > 1, 0, x),
        "a huge row": lambda x: x / max(abs(x).max(), 1e6),
        "a row of NaN": lambda x: np.where(np.isnan(x).any(), 0, x),
        "a row of zeros": lambda x: np.where((x == 0).all(1)[:-1].any(), x + 1, x),
    }
    right = Alone(models["predict"], buckets, lambda x: x / 2)
    assert right._warm("batch") == ""
    more = [size for size in buckets if size > 1]
    assert sorted(right.calls) == sorted([*buckets, *more, *more[:1] * 4])
    for what, function in why.items():
        assert Alone(models["predict"], buckets, function)._warm("batch"), what


@pytest.mark.parametrize("buckets", [[2], [3], [1, 8, 32], [8, 9]])
def test_whatever_depends_on_padding_is_seen(models: dict[str, Model], buckets: list[int]) -> None:
    why = {
        "how much there is": lambda x: x * (x != 0).any(1).sum(),
        "whether it is next": lambda x: np.where(np.roll(x == 0, -1, 0) & (x != 0), x + 1, x),
    }
    for what, function in why.items():
        assert Alone(models["predict"], buckets, function)._warm("batch"), what


def test_what_is_not_served_any_more_is_freed(served: Path, models: dict[str, Model], tmp_path: Path) -> None:
    """Its weights too, which can be many: nothing that refers to itself holds them until Python collects garbage."""
    place = tmp_path / "models.aot"
    shutil.copy(served, place)
    gc.disable()
    try:
        with stagec.load(place, policy="executable_only") as bundle:
            loaded, _ = server.models_of(bundle, "batch")
            for model in loaded.values():
                model.run([model._random(model.buckets[0], 0)], model._begun())
            alive = [weakref.ref(model) for model in loaded.values()]
            copied = loaded["predict"].of(bundle, "copied")
            assert str(place) in Path("/proc/self/maps").read_text("utf-8")
            del model, loaded
            assert [model() for model in alive] == [None] * len(alive)  # a copy does not hold what it is a copy of
            del copied
        del bundle
        models["predict"].run([[np.ones((3, 16), np.float32)]])  # jaxlib lets go of numpy's arrays when others come
        assert str(place) not in Path("/proc/self/maps").read_text("utf-8")
    finally:
        gc.enable()


def test_a_copy_names_itself(models: dict[str, Model], bundle: stagec.Bundle) -> None:
    copied = models["predict"].of(bundle, "predict.b")
    with pytest.raises(RequestError, match=r"^predict\.b: no bucket has these sizes"):
        copied.fit([np.ones((3, 17), np.float32)])


def test_what_runs_is_known_after_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an older jaxlib made may fail then, and the function is compiled."""
    fails = json.loads  # of machine code
    for call, kind, target in ((crossings.call, "executable", "cpu-avx2"), (fails, "compiled", "")):
        monkeypatch.setattr(crossings, "_TRIED", Once())
        monkeypatch.setattr(crossings, "call", call)
        with stagec.load(OLDER, policy="measured") as bundle:
            model = Model(bundle["shift"], "1", policy="measured")
            assert (model.kind, model.target, len(model.buckets)) == (kind, target, 2)


def test_a_proof_is_of_what_runs(models: dict[str, Model], bundle: stagec.Bundle) -> None:
    """Of what is compiled here, the executables of other machines have the module: if they have the platform."""
    *executables, exported = (each.offer for each in bundle["predict"].select().candidates)
    running = {each.shapes: exported for each in executables}
    for platform, why in (("cpu", ""), ("rocm", "it is compiled here, and the bundle has no StableHLO of it for cpu")):
        others = [each._replace(platforms=(platform,)) for each in executables]
        said = models["predict"]._why_not_proven("batch", running, others)
        assert said.removeprefix("no proof that its rows are independent: ") == why


def test_other_weights_are_slow_at_first(models: dict[str, Model], bundle: stagec.Bundle) -> None:
    """The event loop makes quick calls itself: not the one that maps weights."""
    x = [rows(3)]
    model = models["predict"].of(bundle, "other", warm=False)
    assert model.seconds(x, 3) == np.inf
    model.run([x])
    assert model.seconds(x, 3) < np.inf
