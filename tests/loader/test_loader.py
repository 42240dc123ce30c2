"""What the loader accepts and refuses, and the text of each refusal.

Modules: `loader/bundle.py`, `loader/function.py`, `loader/loaded.py`, `loader/variant.py`.
"""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import stagec
from stagec.core.builds.version import VERSION
from stagec.core.data.strict_json import DEEPEST
from stagec.pjrt import host
from stagec.pjrt.arrays import DeviceArray
from tests.building import COMPILER
from tests.bundles import edited, edited_descriptions, edited_index


@pytest.fixture(scope="module")
def bundle(zoo: Path) -> stagec.Bundle:
    return stagec.load(zoo)


PARAMS = {"w": np.ones((16, 4), np.float32), "b": np.zeros(4, np.float32)}
IMAGES = np.ones((4, 16), np.float32)


# What a message ends with: how the call is written.
CALL = "\n  the call is mlp(params, x, /) -> f32[batch,4]"
PARAMS_ROWS = "\n    params.b  f32[4]\n    params.w  f32[16,4]"
X_ROW = "\n    x         f32[batch,16]"
CUBE, SQUARE = (f"\n  named(x, unused, /, *, shift, power={power}) -> f32[3]" for power in (3, 2))


def test_a_bundle_is_a_mapping_from_names_to_functions(bundle: stagec.Bundle) -> None:
    assert (bundle.name, bundle.version, bundle.target) == ("zoo", "0", "cpu")
    assert len(bundle) == 18
    assert "mlp" in bundle
    assert repr(bundle["mlp"]) == "Function(mlp: batch1, batch4)"
    assert repr(bundle).startswith("Bundle(zoo 0, target cpu: attention, draw, ")


def test_a_function_says_how_it_is_called_and_padded(bundle: stagec.Bundle) -> None:
    assert bundle["mlp"].usage.signature == "mlp(params, x, /) -> f32[batch,4]"
    assert bundle["mlp"].padding == {}
    assert bundle["pooled"].padding == {"n": {"fill": -1, "mask": "valid"}}
    with pytest.raises(stagec.CallError, match="say which static arguments"):
        _ = bundle["named"].usage


def test_a_key_of_jax_is_its_words(bundle: stagec.Bundle) -> None:
    import jax

    expected = bundle["draw"](np.array([0, 7], np.uint32))
    jax.tree.map(np.testing.assert_array_equal, bundle["draw"](jax.random.key(7)), expected)
    with pytest.raises(stagec.CallError, match="draw: key has dtype key<rbg>; expected uint32 \\(key<fry>"):
        bundle["draw"](jax.random.key(7, impl="rbg"))


@pytest.mark.parametrize(
    ("args", "kwargs", "code", "text"),
    [
        ((PARAMS,), {}, "structure", f"mlp: args: expected 2 elements, not 1{CALL}{PARAMS_ROWS}{X_ROW}"),
        (
            (PARAMS,),
            {"x": IMAGES},
            "structure",
            f"mlp: args: expected 2 elements, not 1; x: by position, not by keyword{CALL}{PARAMS_ROWS}{X_ROW}",
        ),
        (
            (PARAMS, IMAGES),
            {"scale": 1},
            "structure",
            f"mlp: kwargs: unexpected key 'scale'{CALL}{PARAMS_ROWS}{X_ROW}",
        ),
        (({"w": PARAMS["w"]}, IMAGES), {}, "structure", f"mlp: params: key 'b' is missing{CALL}{PARAMS_ROWS}"),
        (
            ([PARAMS["w"]], IMAGES),
            {},
            "structure",
            f"mlp: params: expected a dict, not a list of 1{CALL}{PARAMS_ROWS}",
        ),
        (
            (PARAMS, [IMAGES]),
            {},
            "structure",
            f"mlp: x: expected an array, not a list of 1{CALL}\n    x  f32[batch,16]",
        ),
        ((PARAMS, None), {}, "structure", f"mlp: x: expected an array, not None{CALL}\n    x  f32[batch,16]"),
        (
            (PARAMS, IMAGES.astype(np.float16)),
            {},
            "dtype",
            "mlp: x has dtype float16; expected float32 (f32[batch,16])",
        ),
        (
            (PARAMS, IMAGES[:3]),
            {},
            "shape",
            "mlp: x is f32[3,16]; expected f32[1,16] or f32[4,16] (buckets: batch = 1; batch = 4)",
        ),
        (
            ({**PARAMS, "b": np.zeros(5, np.float32)}, IMAGES),
            {},
            "shape",
            "mlp: params['b'] is f32[5]; expected f32[4] (buckets: batch = 1; batch = 4)",
        ),
    ],
)
def test_a_call_that_does_not_fit(
    bundle: stagec.Bundle, args: tuple[Any, ...], kwargs: dict[str, Any], code: str, text: str
) -> None:
    with pytest.raises(stagec.CallError) as refusal:
        bundle["mlp"](*args, **kwargs)
    assert (refusal.value.code, str(refusal.value)) == (code, text)


def test_python_numbers_take_the_dtype_of_the_parameter(bundle: stagec.Bundle) -> None:
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(bundle["named"](x, np.zeros(7, np.float32), shift=2, power=3), x**3 + 2)
    with pytest.raises(stagec.CallError, match=r"shift is a Python complex; expected float32"):
        bundle["named"](x, np.zeros(7, np.float32), shift=2j, power=2)


def test_arrays_of_64_bits_become_those_of_32(bundle: stagec.Bundle) -> None:
    flat = bundle["mlp"].flat(PARAMS, IMAGES)
    expected = bundle["mlp"](PARAMS, IMAGES)
    wide = IMAGES.astype(np.float64)
    for called, given in ((bundle["mlp"], (PARAMS, wide)), (flat, (PARAMS["b"], PARAMS["w"], wide))):
        for _ in range(3):
            np.testing.assert_array_equal(np.squeeze(called(*given)), expected)


def test_static_arguments_choose_the_variant(bundle: stagec.Bundle) -> None:
    x, unused = np.arange(3, dtype=np.float32), np.zeros(7, np.float32)
    named = bundle["named"]
    assert repr(named) == "Function(named: cube, square)"
    assert named.variants["square"].static == {"power": 2}
    np.testing.assert_array_equal(named(x, unused, shift=0, power=2), x**2)
    np.testing.assert_array_equal(named.variants["cube"](x, unused, shift=0), x**3)
    np.testing.assert_array_equal(named.variants["cube"](x, unused, shift=0, power=3), x**3)
    assert {d.artifact for d in named.descriptions} == {"named-square", "named-cube"}
    for function, static, text in (
        (named, {}, f"named: say which static arguments: power=3; power=2{CUBE}{SQUARE}"),
        (named, {"power": 4}, f"named was not built with power=4, but with power=3; power=2{CUBE}{SQUARE}"),
        (named.variants["cube"], {"power": 2}, f"named-cube was not built with power=2, but with power=3{CUBE}"),
    ):
        with pytest.raises(stagec.CallError) as refusal:
            function(x, unused, shift=0, **static)
        assert (refusal.value.code, str(refusal.value)) == ("static", text)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Cloud:
    mean: Any
    points: Any
    unit: str = "m"


VECTOR = np.arange(3, dtype=np.float32)


@pytest.mark.parametrize(
    "cloud",
    [
        {"mean": VECTOR, "points": [{"x": VECTOR, "y": VECTOR}, (VECTOR, VECTOR)]},
        {"mean": VECTOR, "points": [Point(VECTOR, VECTOR)] * 2, "unit": "m"},
        Cloud(VECTOR, [Point(VECTOR, VECTOR)] * 2),
    ],
    ids=["plain", "with its static field", "objects with the same fields"],
)
def test_types_of_the_model_are_dicts_of_their_fields(zoo: Path, cloud: Any) -> None:
    result = stagec.load(zoo, types=[])["typed"](cloud, 1)
    assert list(result) == ["mean", "points"]
    np.testing.assert_array_equal(result["points"][0]["x"], VECTOR + 1)
    np.testing.assert_array_equal(result["points"][1]["y"], VECTOR - 1)


def test_types_that_are_given(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Point, "__module__", "tests.zoo.zoo")
    result = stagec.load(zoo, types=[Point])["typed"]({"mean": VECTOR, "points": [Point(VECTOR, VECTOR)] * 2}, 1)
    assert isinstance(result["points"][0], Point)
    assert isinstance(result, dict)


def test_types_that_are_imported(zoo: Path) -> None:
    from tests.zoo import zoo as model

    cloud = model.Cloud(VECTOR, [model.Point(VECTOR, VECTOR)] * 2, "m")
    result = stagec.load(zoo)["typed"](cloud, 1)
    assert isinstance(result, model.Cloud)
    assert isinstance(result.points[0], model.Point)
    assert result.unit == "m"


@pytest.mark.parametrize(
    ("cloud", "text"),
    [
        (Cloud(VECTOR, [], "cm"), "cloud: unit is 'cm', it was 'm' when the function was built"),
        (VECTOR, "cloud: expected tests.zoo.zoo:Cloud, or a dict of its fields: mean, points are missing"),
        ({"mean": VECTOR, "points": [], "x": 1}, "cloud: unexpected key 'x'"),
        (
            {"mean": VECTOR, "points": [{"x": VECTOR}, {}]},
            "cloud.points[0]: expected tests.zoo.zoo:Point, or a dict of its fields: y is missing",
        ),
    ],
)
def test_objects_that_do_not_fit(bundle: stagec.Bundle, cloud: Any, text: str) -> None:
    with pytest.raises(stagec.CallError) as refusal:
        bundle["typed"](cloud, 1)
    said, shown = str(refusal.value).split("\n  ", 1)
    assert (refusal.value.code, said) == ("structure", f"typed: {text}")
    assert (
        shown
        == """\
the call is typed(cloud, shift, /) -> result
    cloud                 tests.zoo.zoo:Cloud(unit='m')
    cloud.mean            f32[3]
    cloud.points          list of 2
    cloud.points[0..1]    tests.zoo.zoo:Point
    cloud.points[0..1].x  f32[3]
    cloud.points[0..1].y  f32[3]"""
    )


def test_numpy_arguments_are_never_overwritten(bundle: stagec.Bundle) -> None:
    state = {"x": np.arange(4, dtype=np.float32), "y": [np.float32(1)]}
    result = bundle["update"](state, np.float32(1))
    np.testing.assert_array_equal(state["x"], [0, 1, 2, 3])
    np.testing.assert_array_equal(result["x"], [1, 2, 3, 4])


def test_donated_device_arrays_are_consumed(bundle: stagec.Bundle) -> None:
    update = bundle["update"]
    state = stagec.device_put({"x": np.arange(4, dtype=np.float32), "y": [np.float32(1)]})
    result = update(state, np.float32(1))
    assert isinstance(result["x"], DeviceArray)
    assert state["x"].is_deleted()
    assert repr(state["x"]) == "DeviceArray(deleted, shape=(4,), dtype=float32)"
    np.testing.assert_array_equal(np.asarray(result["x"]), [1, 2, 3, 4])
    assert float(result["y"][0]) == 2
    with pytest.raises(stagec.CallError) as refusal:
        update(state, np.float32(1))
    assert (refusal.value.code, str(refusal.value)) == (
        "deleted",
        "update: state['x'] was donated to an earlier call; pass that call's result",
    )
    with pytest.raises(stagec.CallError, match="this array was donated to a call; use the call's result"):
        state["x"].numpy()


def test_donated_arrays_of_a_function_with_ordered_effects_are_consumed(bundle: stagec.Bundle) -> None:
    state, unused, x = np.ones(4, np.float32), np.zeros(2, np.float32), np.ones(3, np.float32)
    kept = stagec.device_put(state)
    result = bundle["effectful"](kept, unused, x)
    assert kept.is_deleted()
    np.testing.assert_array_equal(result["state"].numpy(), state * 2 + 3)


def test_device_put_does_not_share_the_callers_memory() -> None:
    values = np.zeros(1024, np.float32)
    array = stagec.device_put(values)
    values[:] = 1
    assert np.asarray(array).sum() == 0


def refusal_of(path: Path, **options: Any) -> tuple[str, str]:
    """Code and text of the error of a bundle, of which every function is asked for."""
    with pytest.raises(stagec.LoadError) as refusal:
        dict(stagec.load(path, **options))
    return refusal.value.code, str(refusal.value).replace(str(path), "zoo.aot")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take /proc away")
def test_without_proc_it_says_why_it_compiles(zoo: Path) -> None:
    code = "import sys, numpy as np, stagec; stagec.load(sys.argv[1])['loop'](np.arange(8, dtype=np.float32))"
    words = [
        "unshare",
        "--mount",
        "--propagation=unchanged",  # the root of a chroot may not be a mount, and unshare would refuse it
        "sh",
        "-c",
        'mount --make-private /proc && mount -t tmpfs none /proc && exec "$@"',
        "sh",
        sys.executable,
        "-c",
        code,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(COMPILER), *sys.path])}
    done = subprocess.run([*words, str(zoo)], env=environment, capture_output=True, text=True)
    if "Operation not permitted" in done.stderr or "permission denied" in done.stderr.lower():
        pytest.skip("this container may not mount")
    assert done.returncode == 0, done.stderr
    (told,) = (line for line in done.stderr.splitlines() if line.startswith(f"{zoo}: loop is compiled here"))
    assert "not cpu: it needs " in told
    assert "cannot be read: /proc/cpuinfo is not there or has no flags; mount /proc" in told


def test_a_missing_file(tmp_path: Path) -> None:
    assert refusal_of(tmp_path / "none.aot") == ("not-found", "zoo.aot: no such file")


def test_a_file_that_is_no_bundle(tmp_path: Path) -> None:
    path = tmp_path / "text.aot"
    path.write_text("hello")
    assert refusal_of(path) == ("not-a-bundle", "zoo.aot: not a bundle: it does not end as a zip file does")


def test_a_zip_without_index(zoo: Path, tmp_path: Path) -> None:
    path = edited(zoo, tmp_path / "x.aot", lambda members: members.pop("index.json"))
    assert refusal_of(path) == ("not-a-bundle", "zoo.aot: not a bundle: its first member is not index.json")


def test_a_truncated_bundle(zoo: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.aot"
    path.write_bytes(zoo.read_bytes()[:-1000])
    assert refusal_of(path)[0] == "not-a-bundle"


def test_an_executable_is_checked_before_xla_sees_it(zoo: Path, tmp_path: Path) -> None:
    def edit(members: dict[str, bytes]) -> None:
        members["loop.cpu.xla"] = members["loop.cpu.xla"][:-1] + b"x"

    path = edited(zoo, tmp_path / "x.aot", edit)
    loaded = stagec.load(path)
    with pytest.raises(stagec.LoadError) as refusal:
        loaded["loop"](np.ones(8, np.float32))
    assert refusal.value.code == "digest"
    assert str(refusal.value).startswith(f"{path}: loop.cpu.xla is not what the index says: its sha256 is ")


def refusal_of_call(path: Path) -> tuple[str, str]:
    with stagec.load(path) as bundle, pytest.raises(stagec.LoadError) as refusal:
        bundle["loop"](np.zeros(8, np.float32))
    return refusal.value.code, str(refusal.value).replace(str(path), "zoo.aot")


def test_a_description_is_checked_before_it_is_read(zoo: Path, tmp_path: Path) -> None:
    def edit(members: dict[str, bytes]) -> None:
        members["loop.cpu.json"] = members["loop.cpu.json"].replace(b"{", b"[", 1)

    code, text = refusal_of_call(edited(zoo, tmp_path / "x.aot", edit))
    assert code == "digest"
    assert text.startswith("zoo.aot: loop.cpu.json is not what the index says: its sha256 is ")


def test_a_description_of_another_format(zoo: Path, tmp_path: Path) -> None:
    path = edited_descriptions(zoo, tmp_path / "x.aot", "loop", lambda description: description.update(format=9))
    assert refusal_of_call(path) == (
        "format",
        "zoo.aot: loop.cpu.json: its format is 9, and this stagec reads 1: compile it again",
    )


def test_a_description_that_the_index_does_not_agree_with(zoo: Path, tmp_path: Path) -> None:
    path = edited_index(zoo, tmp_path / "x.aot", lambda index: index["targets"]["cpu"].update(requires=[]))
    what = "zoo.aot: loop.cpu.json: it is not of the target that the index has"
    assert refusal_of_call(path) == ("format", what)


def test_arguments_that_the_executable_does_not_take(zoo: Path, tmp_path: Path) -> None:
    # XLA would read behind their end.
    path = edited_descriptions(
        zoo, tmp_path / "x.aot", "loop", lambda description: description.update(in_avals=["f32[9]"])
    )
    what = "zoo.aot: loop.cpu.json: its arguments are not those that the index has"
    assert refusal_of_call(path) == ("format", what)


def test_a_function_is_checked_when_it_is_asked_for(zoo: Path, tmp_path: Path) -> None:
    """Each time, and no other function is the worse for it."""

    def edit(index: dict[str, Any]) -> None:
        index["functions"]["mlp"]["executables"][0]["bucket"] = {}

    with stagec.load(edited_index(zoo, tmp_path / "x.aot", edit)) as bundle:
        for _ in range(2):
            with pytest.raises(stagec.LoadError, match=r"functions.mlp.executables\[0\].bucket"):
                bundle["mlp"]
        bundle["loop"](np.arange(8, dtype=np.float32))
        assert bundle["loop"] is bundle["loop"]
        with pytest.raises(stagec.LoadError, match=r"functions.mlp.executables\[0\].bucket"):
            _ = bundle.target  # that of all functions
    with pytest.raises(stagec.CallError, match="the bundle was closed"):
        bundle[list(bundle)[-1]]


def test_a_function_that_is_nested_too_deep(zoo: Path, tmp_path: Path) -> None:
    deep: Any = []
    for _ in range(DEEPEST):
        deep = [deep]
    path = edited_index(zoo, tmp_path / "x.aot", lambda index: index["functions"]["mlp"]["static"].update(x=deep))
    assert refusal_of(path) == ("format", f"zoo.aot: functions.jsonl: nested deeper than {DEEPEST} levels")


def test_a_bucket_without_a_size(zoo: Path, tmp_path: Path) -> None:
    def edit(index: dict[str, Any]) -> None:
        index["functions"]["mlp"]["executables"][0]["bucket"] = {}

    what = "zoo.aot: functions.jsonl: functions.mlp.executables[0].bucket: the size of batch is missing"
    assert refusal_of(edited_index(zoo, tmp_path / "x.aot", edit)) == ("format", what)


def test_a_member_too_many(zoo: Path, tmp_path: Path) -> None:
    path = edited(zoo, tmp_path / "x.aot", lambda members: members.update(extra=b""))
    assert refusal_of(path) == ("digest", "zoo.aot: the index does not list the members that the file has")


def test_a_zip_that_another_program_wrote(zoo: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.aot"
    with zipfile.ZipFile(zoo) as source, zipfile.ZipFile(path, "w") as archive:
        for name in source.namelist():
            archive.writestr(name, source.read(name))
    what = "zoo.aot: not a bundle: the file is not as this version of stagec writes it"
    assert refusal_of(path) == ("not-a-bundle", what)


def test_a_compressed_member(tmp_path: Path) -> None:
    path = tmp_path / "x.aot"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("index.json", "{}" * 100)
    assert refusal_of(path) == ("not-a-bundle", "zoo.aot: not a bundle: index.json is compressed")


def test_another_format(zoo: Path, tmp_path: Path) -> None:
    path = edited_index(zoo, tmp_path / "x.aot", lambda index: index.update(format=99))
    what = f"its format is 99, and this stagec reads 1: build it again with stagec {VERSION}"
    assert refusal_of(path) == ("format", f"zoo.aot: index.json: {what}")


def test_an_unknown_target(zoo: Path) -> None:
    assert refusal_of(zoo, target="h200") == ("no-target", "zoo.aot: no target 'h200'; the bundle has cpu")


def test_a_cpu_without_the_features(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cpu_flags", lambda: frozenset(host_flags_without("avx2", "fma")))
    assert refusal_of(zoo, policy="executable_only") == (
        "cpu-feature",
        "zoo.aot: attention cannot run here; cpu: this machine's CPU has no avx2, fma; "
        "compiling: compiling is not allowed (executable_only)",
    )


def host_flags_without(*names: str) -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":")[1].split()) - set(names)
    raise AssertionError("no flags in /proc/cpuinfo")


IMPORTS = """
import sys
sys.path[:0] = {path!r}
import stagec
{body}
print(sorted(name for name in sys.modules if "." not in name))
"""

SLOW = {"bisect", "copy", "dataclasses", "mmap", "tomllib", "zipfile"}
"""Of Python's own what takes a millisecond, or what weights and errors alone need."""


def imported_by(body: str) -> set[str]:
    path = [str(COMPILER), *(entry for entry in sys.path if entry.endswith("site-packages"))]
    script = IMPORTS.format(path=path, body=body)
    # Without what the site of an installed Python imports.
    done = subprocess.run([sys.executable, "-B", "-S", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1].replace("'", '"')))


def test_importing_stagec_imports_nothing_heavy() -> None:
    assert not imported_by("") & {"numpy", "jaxlib", "pydantic", "jax", "argparse", *SLOW}


def test_loading_and_calling_imports_numpy_and_jaxlib_only(zoo: Path) -> None:
    call = f"import numpy; stagec.load({str(zoo)!r})['loop'](numpy.ones(8, numpy.float32))"
    modules = imported_by(call)
    assert {"numpy", "jaxlib"} <= modules
    assert not modules & {"jax", "pydantic", "flatbuffers", "scipy"}
    # With some Pythons, numpy and jaxlib import a part of these.
    assert not (modules - imported_by("import numpy, jaxlib.xla_client")) & SLOW


def test_a_first_call_imports_what_it_needs(zoo: Path) -> None:
    call = f"import numpy; stagec.load({str(zoo)!r})['loop'](numpy.ones(8, numpy.float32))"
    later = (
        "bundle.members",
        "core.trees.node_types",
        "trust.attestation",
        "loader.flat",
        "checking.golden",
        "checking.trials",
        "pjrt.custom_calls",
        "pjrt.making",
        "pjrt.static_data",
        "stages.locations",
    )
    for name in later:
        assert importlib.util.find_spec(f"stagec.{name}"), name
        call += f"; assert 'stagec.{name}' not in sys.modules, {name!r}"
    assert "numpy" in imported_by(call)


def test_a_process_that_loads_and_calls_reads_few_lines(zoo: Path) -> None:
    call = f"import numpy; stagec.load({str(zoo)!r})['loop'](numpy.ones(8, numpy.float32))"
    own = "[module.__file__ for name, module in sys.modules.items() if name.split('.')[0] == 'stagec']"
    assert "numpy" in imported_by(
        f"{call}; lines = sum(open(file).read().count('\\n') for file in {own})\nassert 3000 < lines < 7000, lines"
    )


def test_the_import_test_can_fail() -> None:
    assert "argparse" in imported_by("import argparse")
