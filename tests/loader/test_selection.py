"""What of a bundle runs, and why the rest does not: verdicts, policies and the text of each refusal.

Modules: `loader/padding.py`, `loader/load.py`, `pjrt/host.py`.
"""

import datetime
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jaxlib
import numpy as np
import pytest

import stagec
from stagec.bundle import expiry
from stagec.core.builds import releases
from stagec.core.sizes.avals import parse_aval
from stagec.loader.selection import _ORDER, Asked, Offer, select
from stagec.pjrt import accelerators, host
from stagec.pjrt.host import Host, Platform
from tests.building import COMPILER, ROOT, checked, stagec as command
from tests.bundles import (
    edited,
    edited_descriptions,
    edited_index,
    only,
    whole_index,
    with_index,
    without_executables,
)

PLATFORMS = {"cpu": Platform(), "tpu": Platform("this machine has no TPU")}
HERE = Host("0.10.1", frozenset({"avx2", "fma"}), PLATFORMS, "x86_64")
RELEASED = releases.release("0.10.1").day
BEFORE = "2026-05-17"
EXECUTABLE = Offer(
    "executable",
    "f.cpu.xla",
    ("cpu",),
    target="cpu",
    device_kind="haswell",
    architecture="x86_64",
    requires=("avx2",),
    nr_devices=1,
    versions={"jaxlib": "0.10.1"},
    bucket={"batch": 4},
    static_avals=(parse_aval("f32[4]"),),
    shapes=((4,),),
)
EXPORTED = Offer("exported", "f.exported", ("tpu", "cpu"), nr_devices=1, readable_until="2027-05-01")
TPU = EXECUTABLE._replace(
    member="f.v5e.xla",
    platforms=("tpu",),
    target="v5e",
    device_kind="TPU v5 lite",
    architecture="",
    requires=(),
)
WITH_TPUS = HERE._replace(platforms={**HERE.platforms, "tpu": Platform("", ["TPU v5 lite"] * 4, {"libtpu": "0.0.41"})})


def verdicts(*offers: Offer, here: Host = HERE, **asked: Any) -> list[tuple[str, str]]:
    return [(c.code, c.reason) for c in select("f", offers, here, Asked(**asked)).candidates]


def test_the_first_that_fits_is_chosen() -> None:
    assert verdicts(EXECUTABLE, EXPORTED) == [("chosen", "runs as it is"), ("fits", "f.cpu.xla comes first")]
    assert verdicts(EXPORTED) == [("chosen", "is compiled at the first call")]


def test_a_cpu_gets_the_most_demanding_target_that_it_can_run() -> None:
    demanding = EXECUTABLE._replace(member="f.avx512.xla", target="avx512", requires=("avx2", "avx512f"))
    assert verdicts(demanding, EXECUTABLE) == [
        ("cpu-feature", "this machine's CPU has no avx512f"),
        ("chosen", "runs as it is"),
    ]
    capable = HERE._replace(cpu_flags=HERE.cpu_flags | {"avx512f"})
    assert [code for code, _ in verdicts(demanding, EXECUTABLE, here=capable)] == ["chosen", "fits"]


@pytest.mark.parametrize(
    ("offer", "here", "asked", "code", "reason"),
    [
        (EXECUTABLE, HERE, {"target": "v5e"}, "target", "the target that was asked for is v5e"),
        (TPU, HERE, {}, "platform", "this machine has no TPU"),
        (
            EXECUTABLE,
            HERE._replace(architecture="aarch64", cpu_flags=frozenset({"asimd"})),
            {},
            "architecture",
            "its machine code is for x86_64, and this machine is aarch64",
        ),
        (
            EXECUTABLE,
            HERE._replace(cpu_flags=frozenset()),
            {},
            "cpu-feature",
            "it needs avx2, and what this machine's CPU has cannot be read: "
            "/proc/cpuinfo is not there or has no flags; mount /proc",
        ),
        (EXPORTED, HERE, {"platform": "tpu"}, "platform", "this machine has no TPU"),
        (EXECUTABLE, HERE, {"platform": "tpu"}, "platform", "it is for cpu, not for tpu"),
        (
            TPU._replace(device_kind="TPU v4"),
            WITH_TPUS,
            {},
            "device-kind",
            "it is for TPU v4, here is TPU v5 lite",
        ),
        (TPU._replace(nr_devices=8), WITH_TPUS, {}, "device-count", "it runs on 8 devices, 4 are here"),
        (
            EXECUTABLE._replace(nr_devices=2),
            HERE,
            {"num_devices": 1},
            "device-count",
            "it runs on 2 devices, 1 were named",
        ),
        (
            EXECUTABLE._replace(requires=("avx2", "avx512f", "avx512bw")),
            HERE,
            {},
            "cpu-feature",
            "this machine's CPU has no avx512bw, avx512f",
        ),
        (
            EXECUTABLE._replace(versions={"jaxlib": "0.9.2"}),
            HERE,
            {},
            "jaxlib-version",
            "it was compiled with jaxlib 0.9.2, here is 0.10.1",
        ),
        (
            TPU._replace(versions={"jaxlib": "0.10.1", "libtpu": "0.0.40"}),
            WITH_TPUS,
            {},
            "plugin-version",
            "it was compiled with libtpu 0.0.40, here is 0.0.41",
        ),
        (
            EXECUTABLE._replace(platforms=("cuda",), versions={"jaxlib": "0.10.1", "jax-cuda12-pjrt": "0.10.1"}),
            HERE._replace(platforms={"cuda": Platform(versions={"jax-cuda13-pjrt": "0.10.1"})}),
            {},
            "plugin-version",
            "it was compiled with jax-cuda12-pjrt 0.10.1, here is jax-cuda13-pjrt 0.10.1",
        ),
        (
            EXECUTABLE._replace(unknown_calls=("their_kernel",)),
            HERE,
            {},
            "custom-call",
            "it calls their_kernel, which jaxlib does not have",
        ),
        (EXECUTABLE, HERE, {"shapes": ((3,),)}, "shape", "it is for batch = 4"),
        (EXECUTABLE._replace(bucket={}), HERE, {"shapes": ((3,),)}, "shape", "it is for f32[4]"),
        (EXPORTED, HERE, {"policy": "executable_only"}, "policy", "compiling is not allowed (executable_only)"),
        (
            EXPORTED._replace(readable_until=BEFORE),
            HERE,
            {},
            "expired",
            "JAX promises that releases until 2026-05-17 read it, and jaxlib 0.10.1 is of 2026-05-18; "
            "install an older jaxlib, or build the bundle again with a newer jax in your lock",
        ),
        (
            EXPORTED._replace(readable_until=BEFORE, versions={"jaxlib": "0.9.2"}),
            HERE,
            {},
            "expired",
            "JAX promises that releases until 2026-05-17 read it, and jaxlib 0.10.1 is of 2026-05-18; "
            "install jaxlib 0.9.2, which made it, or build the bundle again with a newer jax in your lock",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "-" in value else "",
)
def test_each_verdict(offer: Offer, here: Host, asked: dict[str, Any], code: str, reason: str) -> None:
    assert verdicts(offer, here=here, **asked) == [(code, reason)]


def test_what_made_an_artifact_reads_it_for_ever() -> None:
    old = EXPORTED._replace(readable_until=BEFORE, versions={"jaxlib": HERE.jaxlib})
    assert verdicts(old)[0][0] == "chosen"
    assert verdicts(EXPORTED._replace(readable_until=RELEASED))[0][0] == "chosen"


def test_each_release_reads_what_those_of_the_six_months_before_it_made() -> None:
    """Of the releases that stagec knows; the day on which they read changes nothing."""
    days = {version: release.day for version, release in releases.known().items()}
    for made, day in days.items():
        old = EXPORTED._replace(readable_until=expiry.readable_until(made), versions={"jaxlib": made})
        for reads, its_day in days.items():
            within = (
                its_day <= day or (datetime.date.fromisoformat(its_day) - datetime.date.fromisoformat(day)).days < 181
            )
            assert (verdicts(old, here=HERE._replace(jaxlib=reads))[0][0] == "chosen") == within


def test_a_release_of_an_unknown_day_is_tried() -> None:
    old = EXPORTED._replace(readable_until=RELEASED, versions={"jaxlib": "0.9.2"})
    assert verdicts(old, here=HERE._replace(jaxlib="0.12.7")) == [
        (
            "chosen",
            "is compiled at the first call; JAX promises that releases until 2026-05-18 read it, and this stagec does "
            "not know of which day jaxlib 0.12.7 is",
        )
    ]
    assert verdicts(EXPORTED._replace(readable_until="unknown"), here=HERE._replace(jaxlib="0.12.7")) == [
        ("chosen", "is compiled at the first call")
    ]


def made_elsewhere(zoo: Path, out: Path) -> Path:
    """Write a bundle of which jaxlib 0.9.9 made all, and whose artifact of `loop` this one reads by its promise."""

    def edit(index: dict[str, Any]) -> None:
        index["functions"]["loop"] |= {"readable_until": releases.release(jaxlib.__version__).day}
        index["functions"]["loop"]["versions"] |= {"jaxlib": "0.9.9"}

    skewed = edited_descriptions(
        zoo, out.with_suffix(".skewed"), "loop", lambda d: d["versions"].update(jaxlib="0.9.9")
    )
    return edited_index(skewed, out, edit)


@pytest.mark.parametrize("day", ["2020-01-01", "2026-11-17", "2026-11-19", "2031-02-03"])
def test_the_clock_decides_nothing(zoo: Path, tmp_path: Path, day: str) -> None:
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if not library:
        pytest.skip("there is no libfaketime (Debian: libfaketime)")
    path = made_elsewhere(zoo, tmp_path / "x.aot")
    script = (
        "import datetime, sys, numpy, stagec\n"
        "assert str(datetime.date.today()) == sys.argv[2]\n"
        "result = stagec.load(sys.argv[1])['loop'](numpy.arange(8, dtype=numpy.float32))\n"
        "print(len(result))"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(COMPILER), *sys.path]),
        "LD_PRELOAD": str(library),
        "FAKETIME": f"@{day} 12:00:00",
        "TZ": "UTC",
    }
    words = [sys.executable, "-W", "error", "-c", script, path, day]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    why = f"not cpu: it was compiled with jaxlib 0.9.9, here is {jaxlib.__version__}"
    assert (done.returncode, done.stdout) == (0, "2\n")
    assert done.stderr == f"{path}: loop is compiled here ({why})\n"  # Python shows warnings that nobody asked for


def test_the_log_says_once_what_is_compiled_or_falls_back(
    zoo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for a function, whatever its sizes; and nothing of what runs as it is."""
    caplog.set_level("INFO", "stagec")
    stagec.load(zoo).preload()
    assert not [record for record in caplog.records if "loop" in record.getMessage()]
    caplog.clear()
    path = edited_descriptions(zoo, tmp_path / "x.aot", "mlp", lambda d: d["versions"].update(jaxlib="0.9.9"))
    mlp = stagec.load(path)["mlp"]
    params = {"w": np.ones((16, 4), np.float32), "b": np.zeros(4, np.float32)}
    for size in (1, 4, 4):
        mlp(params, np.ones((size, 16), np.float32))
    why = f"not cpu: it was compiled with jaxlib 0.9.9, here is {jaxlib.__version__}"
    assert caplog.record_tuples == [("stagec", logging.WARNING, f"{path}: mlp is compiled here ({why})")]
    caplog.clear()
    bare = without_executables(zoo, tmp_path / "y.aot")
    stagec.load(bare)["loop"](X)
    why = "the bundle has no executable of it"
    assert caplog.record_tuples == [("stagec", logging.INFO, f"{bare}: loop is compiled here ({why})")]


def test_the_log_says_which_target_is_left_out(zoo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def edit(index: dict[str, Any]) -> None:
        more = {**index["targets"]["cpu"], "requires": [*index["targets"]["cpu"]["requires"], "amx-fp8"]}
        index["targets"]["newer"] = more
        entries = index["functions"]["loop"]["executables"]
        entries.append({**entries[0], "target": "newer"})

    caplog.set_level("INFO", "stagec")
    path = edited_index(zoo, tmp_path / "x.aot", edit)
    stagec.load(path)["loop"](X)
    why = "not newer: this machine's CPU has no amx-fp8"
    expected = f"{path}: loop runs what was compiled for cpu ({why})"
    assert caplog.record_tuples == [("stagec", logging.INFO, expected)]


def test_a_jaxlib_of_an_unknown_day_compiles_and_says_so(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made_elsewhere(zoo, tmp_path / "x.aot")
    until = releases.release(jaxlib.__version__).day
    monkeypatch.setattr(releases, "known", dict)
    with pytest.warns(RuntimeWarning) as said:
        assert len(stagec.load(path)["loop"](X)) == 2
    assert [str(warning.message) for warning in said] == [
        f"{path}: loop.exported is compiled; JAX promises that releases until {until} read it, and this stagec does "
        f"not know of which day jaxlib {jaxlib.__version__} is"
    ]


def test_a_portable_artifact_is_compiled_for_buckets_only() -> None:
    assert verdicts(EXECUTABLE, EXPORTED, shapes=((3,),))[1] == ("shape", "the shapes are in no bucket")
    assert verdicts(EXPORTED, shapes=((3,),))[0][0] == "chosen"


def test_tuning_flags_are_no_features(zoo: Path) -> None:
    required = {flag for d in stagec.load(zoo)["loop"].descriptions for flag in d.target.requires}
    assert "avx2" in required
    assert not [flag for flag in required if flag.startswith("prefer")]


def test_select_tells_every_candidate(zoo: Path) -> None:
    bundle = stagec.load(zoo)
    shapes = [{"w": "f32[16,4]", "b": "f32[4]"}, "f32[4,16]"]
    assert bundle.select("mlp", shapes).as_text() == (
        "mlp\n"
        "  mlp.cpu.batch1.xla  shape   it is for batch = 1\n"
        "  mlp.cpu.batch4.xla  chosen  runs as it is\n"
        "  mlp.exported        fits    mlp.cpu.batch4.xla comes first\n"
    )
    assert bundle.select("named-cube", ["f32[3]", "f32[7]"], shift="f32[]").chosen is not None
    assert bundle.select("draw", ["key<fry>[]"]).chosen is not None
    with pytest.raises(stagec.CallError, match="named has variants; ask one of them: named-cube, named-square"):
        bundle.select("named")
    sharded = bundle.select("sharded", devices=stagec.devices("cpu", 2))
    assert {candidate.code for candidate in sharded.candidates} == {"device-count"}


X = np.arange(8, dtype=np.float32)


def without(*flags: str) -> Any:
    here = host.cpu_flags()
    return lambda: here - set(flags)


def test_a_cpu_without_the_features_gets_what_it_can_run(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = stagec.load(zoo)["loop"](X)
    monkeypatch.setattr(host, "cpu_flags", without("avx2"))
    bundle = stagec.load(zoo)
    assert bundle.target == ""
    assert bundle["loop"].descriptions == ()
    np.testing.assert_allclose(bundle["loop"](X)[0][0], expected[0][0], rtol=1e-5)
    with pytest.raises(stagec.CallError, match="mlp: x is f32\\[3,16\\]"):
        bundle["mlp"]({"w": np.zeros((16, 4), np.float32), "b": np.zeros(4, np.float32)}, np.zeros((3, 16), np.float32))


def test_a_function_that_cannot_run_says_so_when_it_is_called(zoo: Path, tmp_path: Path) -> None:
    path = edited_descriptions(zoo, tmp_path / "x.aot", "loop", lambda d: d["versions"].update(jaxlib="0.1.2"))
    here = stagec.load(zoo)["loop"].descriptions[0].versions["jaxlib"]
    bundle = stagec.load(path, policy="executable_only")
    with pytest.raises(stagec.LoadError) as refusal:
        bundle["loop"](X)
    assert (refusal.value.code, str(refusal.value)) == (
        "jaxlib-version",
        f"{path}: loop cannot run here; cpu: it was compiled with jaxlib 0.1.2, here is {here}; "
        "compiling: compiling is not allowed (executable_only)",
    )
    assert len(stagec.load(path)["loop"](X)) == 2  # compiled


def test_a_bundle_for_two_cpus_on_one_without_the_newer(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that lacks an instruction set gets the code without it, not SIGILL; one that has it gets the newer."""
    new = "avx512_of_tomorrow"

    def add(members: dict[str, bytes]) -> None:
        index = whole_index(members)
        executables = index["functions"]["loop"]["executables"]
        description = json.loads(members[executables[0]["description"]])
        description["target"]["name"] = "new"
        description["target"]["requires"] = sorted([*description["target"]["requires"], new])
        members["loop.new.json"] = json.dumps(description).encode()
        executables.append({**executables[0], "target": "new", "description": "loop.new.json"})
        hardware = description["target"].items()
        index["targets"]["new"] = {k: v for k, v in hardware if k not in ("name", "compiler_options")}
        written = with_index(index, members)
        members.clear()
        members.update(written)

    path = edited(zoo, tmp_path / "x.aot", add)
    bundle = stagec.load(path, policy="executable_only")
    verdicts = {c.offer.target: (c.code, c.reason) for c in bundle.select("loop").candidates}
    assert verdicts["new"] == ("cpu-feature", f"this machine's CPU has no {new}")
    assert verdicts["cpu"] == ("chosen", "runs as it is")
    np.testing.assert_array_equal(bundle["loop"](X)[1], stagec.load(zoo)["loop"](X)[1])
    here = host.cpu_flags()
    monkeypatch.setattr(host, "cpu_flags", lambda: here | {new})
    assert [d.target.name for d in stagec.load(path)["loop"].descriptions] == ["new"]


def test_a_portable_artifact_is_checked_before_it_is_compiled(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(members: dict[str, bytes]) -> None:
        members["loop.exported"] = members["loop.exported"][:-1] + b"x"

    path = edited(zoo, tmp_path / "x.aot", edit)
    monkeypatch.setattr(host, "cpu_flags", without("avx2"))
    with stagec.load(path) as bundle, pytest.raises(stagec.LoadError) as refusal:
        bundle["loop"](X)
    assert refusal.value.code == "digest"
    assert str(refusal.value).startswith(f"{path}: loop.exported is not what the index says: its sha256 is ")


def test_a_portable_artifact_of_another_calling_convention(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serialized = (zoo.parent / "zoo.loop.exported").read_bytes()
    newer = replace(stagec.Exported.deserialize(serialized), calling_convention_version=11).serialize()

    def edit(members: dict[str, bytes]) -> None:
        index = whole_index(members)
        members["loop.exported"] = newer
        members.update(with_index(index, members))

    path = edited(zoo, tmp_path / "x.aot", edit)
    monkeypatch.setattr(host, "cpu_flags", without("avx2"))
    with stagec.load(path) as bundle, pytest.raises(stagec.LoadError) as refusal:
        bundle["loop"](X)
    assert (refusal.value.code, str(refusal.value)) == (
        "compile",
        "the exported artifact cannot be compiled here: loop has version 11 of the calling convention, "
        "this version of stagec knows 9 and 10",
    )


@pytest.mark.parametrize(
    ("edit", "code", "text"),
    [
        (
            lambda d: d["versions"].update(jaxlib="9.9.9"),
            "jaxlib-version",
            "it was compiled with jaxlib 9.9.9, here is ",
        ),
        (
            lambda d: d["target"].update(architecture="riscv64"),
            "architecture",
            f"its machine code is for riscv64, and this machine is {os.uname().machine}",
        ),
        (
            lambda d: d["target"].update(architecture=64),
            "format",
            "targets.cpu.architecture: expected a string, not 64",
        ),
        (lambda d: d["target"].update(requires=["avx99"]), "cpu-feature", "this machine's CPU has no avx99"),
        (lambda d: d["custom_calls"].update(other="unknown"), "custom-call", "it calls other, which jaxlib does not"),
        (lambda d: d["target"].update(platform="tpu"), "platform", "this machine has no TPU: no /dev/accel[0-9]* or "),
    ],
    ids=["jaxlib", "architecture", "damaged architecture", "CPU", "custom call", "platform"],
)
def test_version_skew_and_other_machines(zoo: Path, tmp_path: Path, edit: Any, code: str, text: str) -> None:
    if code == "platform" and accelerators.refusal("tpu") == "":
        pytest.skip("this machine has a TPU")
    path = only(edited_descriptions(zoo, tmp_path / "x.aot", "loop", edit), tmp_path / "y.aot", "loop")
    with pytest.raises(stagec.LoadError) as refusal:
        stagec.load(path, policy="executable_only")
    assert refusal.value.code == code
    assert text in str(refusal.value)


HIDDEN = """
import sys
import numpy as np
import stagec

hidden, listed = sys.argv[1:]
x = np.eye(5, dtype=np.float32)
for path in (hidden, listed, hidden):
    try:
        stagec.load(path, policy="executable_only")["factorize"](x)
        print("ran")
    except stagec.LoadError as error:
        print(error.code, error)
"""


def test_a_custom_call_that_the_description_does_not_name(zoo: Path, tmp_path: Path) -> None:
    """XLA looks for its handler when it loads the executable, and finds it only where the process has registered it.

    So the list says what the loader registers, and is not a permission: an executable is code (docs/security.md).
    """
    listed = only(zoo, tmp_path / "listed.aot", "factorize")

    def hide(description: dict[str, Any]) -> None:
        assert description.pop("custom_calls")
        description["custom_calls"] = {}

    hidden = edited_descriptions(listed, tmp_path / "hidden.aot", "factorize", hide)
    words = [sys.executable, "-c", HIDDEN, hidden, listed]
    environment = {"PYTHONPATH": os.pathsep.join([str(COMPILER), *sys.path])}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    assert re.match("executable jaxlib does not load the executable: NOT_FOUND: .*lapack_", first)
    assert others == ["ran", "ran"]


def test_a_process_without_the_compiler(zoo: Path, tmp_path: Path) -> None:
    """As Bazel's library //compiler:runtime: it runs executables, and says what it cannot compile."""
    path = edited_index(zoo, tmp_path / "x.aot", lambda index: index["functions"]["loop"].update(executables=[]))
    rooms = shutil.ignore_patterns("stages", "backends", "frontends", "manifest", "__pycache__")
    shutil.copytree(COMPILER / "stagec", tmp_path / "lib" / "stagec", ignore=rooms)
    script = """
import sys
import numpy as np
import stagec
x = np.ones(8, np.float32)
with stagec.load(sys.argv[1]) as bundle:
    print(bundle["mlp"]({"w": np.ones((16, 4), np.float32), "b": x[:4]}, np.ones((1, 16), np.float32)).shape)
    try:
        bundle["loop"](x)
    except stagec.LoadError as error:
        print(error.code, error)
"""
    packages = [entry for entry in sys.path if entry.endswith("site-packages")]
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "lib"), *packages])}
    words = [sys.executable, "-B", "-s", "-c", script, str(path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "(1, 4)",
        "compile the exported artifact cannot be compiled here: No module named 'stagec.backends'",
    ]


def test_an_unknown_policy(zoo: Path) -> None:
    known = "'allow_compile' or 'executable_only' or 'measured' or 'measured_only'"
    with pytest.raises(ValueError, match=f"policy is 'always'; write {known}"):
        stagec.load(zoo, policy="always")  # type: ignore[arg-type]


def test_explain_what_runs(zoo: Path, tmp_path: Path) -> None:
    text = checked("explain", zoo, "--function", "loop")
    assert text == ("loop\n  loop.cpu.xla   chosen  runs as it is\n  loop.exported  fits    loop.cpu.xla comes first\n")
    path = edited_descriptions(zoo, tmp_path / "y.aot", "loop", lambda d: d["target"].update(requires=["avx99"]))
    path = only(path, tmp_path / "x.aot", "loop")
    done = command("explain", path, "--function", "loop", "--executable-only", "--json")
    assert done.returncode == 1
    (function,) = json.loads(done.stdout)["functions"]
    assert [(c["member"], c["code"]) for c in function["candidates"]] == [
        ("loop.cpu.xla", "cpu-feature"),
        ("loop.exported", "policy"),
    ]
    assert function["candidates"][0]["reason"] == "this machine's CPU has no avx99"
    done = command("explain", tmp_path / "none.aot")
    assert (done.returncode, done.stderr) == (2, f"{tmp_path}/none.aot: no such file (not-found)\n")


class TestPadding:
    """Calls of other sizes than the buckets'."""

    def test_a_call_between_buckets_is_filled_up(self, zoo: Path) -> None:
        pooled = stagec.load(zoo)["pooled"]
        x = np.arange(15, dtype=np.float32).reshape(5, 3)
        result = pooled(x)
        np.testing.assert_array_equal(result["rows"], x * 2)
        np.testing.assert_allclose(result["mean"], x.mean(axis=0))

    @pytest.mark.parametrize("size", [1, 2, 3, 8])
    def test_the_mask_tells_what_is_real(self, zoo: Path, size: int) -> None:
        x = np.ones((size, 3), np.float32)
        result = stagec.load(zoo)["pooled"](x)
        assert result["rows"].shape == (size, 3)
        np.testing.assert_array_equal(result["mean"], [1, 1, 1])

    def test_a_mask_of_the_callers_own(self, zoo: Path) -> None:
        x = np.arange(9, dtype=np.float32).reshape(3, 3)
        result = stagec.load(zoo)["pooled"](x, valid=np.array([True, False, True]))
        np.testing.assert_array_equal(result["mean"], x[[0, 2]].mean(axis=0))

    def test_device_arrays_are_filled_up_too(self, zoo: Path) -> None:
        x = np.ones((3, 3), np.float32)
        result = stagec.load(zoo)["pooled"](stagec.device_put(x))
        np.testing.assert_array_equal(np.asarray(result["rows"]), x * 2)

    def test_nothing_fits(self, zoo: Path) -> None:
        with pytest.raises(stagec.CallError) as refusal:
            stagec.load(zoo)["pooled"](np.ones((9, 3), np.float32))
        assert str(refusal.value) == (
            "pooled: x is f32[9,3]; expected f32[2,3] or f32[8,3] "
            "(buckets: n = 2; n = 8; smaller sizes of n are padded)"
        )

    def test_select_tells_the_bucket(self, zoo: Path) -> None:
        chosen = stagec.load(zoo).select("pooled", ["f32[3,3]"]).chosen
        assert chosen is not None
        assert chosen.offer.bucket == {"n": 8}


def test_the_documentation_has_every_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    by_status = {"memory", "execution"}  # of XLA's errors (`pjrt/failures.py`)
    others = {stagec.LoadError: {*_ORDER, "memory"}, stagec.CallError: set(), stagec.RunError: by_status}
    for kind, not_written_so in others.items():
        section = text.partition(f": `{kind.__name__}`\n")[2].partition("\n## ")[0]
        documented = re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE)
        listed = re.findall(r'"([a-z-]+)"', (kind.__doc__ or "").partition("Codes:")[2])
        assert documented == listed
        sources = [path.read_text() for path in (COMPILER / "stagec").rglob("*.py")]
        raised = {code for one in sources for code in re.findall(rf'\b{kind.__name__}\(\s*"([a-z-]+)"', one)}
        assert raised | not_written_so == set(listed)


@pytest.mark.parametrize("page", ["loading.md", "performance.md"])
def test_the_examples_of_the_documentation(zoo: Path, page: str) -> None:
    """All that run in one process."""
    text = (ROOT / "docs" / page).read_text()
    scripts = [script for script in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if '"zoo.aot"' in script]
    for script in (script for script in scripts if "stagec.distributed" not in script):
        exec(script.replace('"zoo.aot"', repr(str(zoo))), {})
    assert scripts


def test_the_manifest_of_the_documentation(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "loading.md").read_text().partition("```toml\n")[2].partition("```")[0]
    path = tmp_path / "m.toml"
    path.write_text('[manifest]\nname = "m"\nversion = "1"\n[targets.cpu]\nplatform = "cpu"\nisa = "AVX2"\n' + text)
    assert "m.pooled.cpu.n8" in checked("action", "plan", "m.toml", cwd=tmp_path)
