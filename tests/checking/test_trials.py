"""Calling a function of a bundle from the command line, without JAX.

Modules: `cli/run.py`.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import stagec
from stagec.checking import trials
from tests.building import checked, stagec as command


def test_random_arguments_are_of_every_kind(zoo: Path) -> None:
    bundle = stagec.load(zoo)
    for name in ("draw", "fourier", "named-cube", "turned", "typed", "update"):
        function = trials.find(bundle, name)
        first, again = (trials.random_arguments(function.descriptions[0], 7) for _ in range(2))
        assert [array.tobytes() for array in first.values()] == [array.tobytes() for array in again.values()]
        results, seconds = trials.call(function, first)
        avals = [(tuple(map(int, aval.shape)), aval) for aval in function.descriptions[0].out_avals]
        assert [array.shape[: len(shape)] for array, (shape, _) in zip(results.values(), avals, strict=True)] == [
            shape for shape, _ in avals
        ]
        assert len(seconds) == 2


def test_run_with_random_arguments(zoo: Path, tmp_path: Path) -> None:
    outputs = []
    for name in ("a.npz", "b.npz"):
        text = checked("run", zoo, "mlp", "--random", "--seed", "3", "--output", tmp_path / name)
        outputs.append((tmp_path / name).read_bytes())
    assert outputs[0] == outputs[1]
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        result = file["result"]
    first, second = text.splitlines()
    assert first.startswith("mlp for cpu: first call ")
    statistics = (result.min(), result.astype(np.float64).mean(), result.max())
    assert second == "  result: float32[1,4]  minimum {:.6g}, mean {:.6g}, maximum {:.6g}".format(*statistics)


def test_run_with_random_arguments_of_a_bucket(zoo: Path, tmp_path: Path) -> None:
    text = checked("run", zoo, "attention", "--random", "--bucket", "batch=2", "seq=5")
    assert text.splitlines()[1].startswith("  result: float32[2,5,8]  minimum ")


def test_run_with_arguments_of_a_file(zoo: Path, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    shapes = {"args[0]['b']": (4,), "args[0]['w']": (16, 4), "args[1]": (4, 16)}
    arrays = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    np.savez(tmp_path / "x.npz", **arrays)  # type: ignore[arg-type]
    words = ("run", zoo, "mlp", "--inputs", "x.npz", "--output", "y.npz", "--target", "cpu", "--json")
    told = json.loads(checked(*words, cwd=tmp_path))
    b, w, x = arrays.values()
    wanted = stagec.load(zoo)["mlp"]({"w": w, "b": b}, x)
    with np.load(tmp_path / "y.npz", allow_pickle=False) as file:
        np.testing.assert_array_equal(file["result"], wanted)
    assert (told["function"], told["target"], set(told["seconds"])) == ("mlp", "cpu", {"first", "second"})
    assert told["results"]["result"]["shape"] == [4, 4]


def test_bfloat16_comes_through_a_file(zoo: Path, tmp_path: Path) -> None:
    function = trials.find(stagec.load(zoo), "narrow")
    arguments = trials.random_arguments(function.descriptions[0], 0)
    np.savez(tmp_path / "x.npz", **arguments)  # type: ignore[arg-type]
    with np.load(tmp_path / "x.npz", allow_pickle=False) as file:
        read = {name: file[name] for name in file.files}
    assert read["args[0]"].dtype.kind == "V"
    (first, _), (again, _) = (trials.call(function, given) for given in (arguments, read))
    assert {name: array.tobytes() for name, array in first.items()} == {n: a.tobytes() for n, a in again.items()}
    assert trials.summary(first["result['a']"])["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("nothing", "--random"), "there is no function 'nothing'; write one of attention, "),
        (("named", "--random"), "there is no function 'named'; write one of attention, "),
        (
            ("mlp", "--inputs", "other.npz"),
            "mlp: args[0]['b'] is missing; args[0]['w'] is missing; args[0] is not an argument\n",
        ),
        (
            ("mlp", "--inputs", "objects.npz"),
            "objects.npz: not an .npz file of plain arrays\n  write it with numpy.savez\n",
        ),
        (("mlp", "--inputs", "text.npz"), "text.npz: not an .npz file of plain arrays\n  write it with numpy.savez\n"),
        (("mlp", "--inputs", "none.npz"), "none.npz: cannot be read: No such file or directory\n"),
        (("mlp", "--random", "--bucket", "batch=2"), "mlp has no such bucket; its buckets are: batch=1, batch=4\n"),
        (("loop", "--random", "--bucket", "n=2"), "loop has no such bucket; its buckets are: none\n"),
        (
            ("mlp", "--random", "--bucket", "4"),
            "--bucket: not the sizes of dimensions\n  write for example --bucket batch=8\n",
        ),
        (("mlp", "--random", "--target", "tpu"), "zoo.aot: no target 'tpu'; the bundle has cpu\n"),
    ],
)
def test_what_cannot_be_run(zoo: Path, tmp_path: Path, words: tuple[str, ...], what: str) -> None:
    array = np.zeros(4, np.float32)
    np.savez(tmp_path / "other.npz", **{"args[0]": array, "args[1]": array})  # type: ignore[arg-type]
    np.savez(tmp_path / "objects.npz", **{"args[0]": np.array([None])})  # type: ignore[arg-type]
    (tmp_path / "text.npz").write_text("text")
    (tmp_path / "zoo.aot").symlink_to(zoo)
    done = command("run", "zoo.aot", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(what)
