"""`policy="measured"`: what an older jaxlib made runs where that was measured, and everything else as before.

The corpus has a bundle of jaxlib 0.10.1, which is older than those that the tests run with.

Modules: `bundle/crossings.py`, `loader/crossings.py`.
"""

import datetime
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import jaxlib
import numpy as np
import pytest

import stagec
from stagec.bundle import crossings
from stagec.bundle.archive import Archive
from stagec.bundle.crossings import Jaxlib
from stagec.bundle.description import LARGEST, Description
from stagec.bundle.index import numbers
from stagec.core.data import child, thunks
from stagec.loader import crossings as first_calls
from stagec.loader.once import Once
from stagec.loader.selection import Asked, select
from stagec.patches import known_builds
from stagec.pjrt import abi, compatibility, host
from tests.building import ROOT, checked, stagec as command
from tests.bundles import edited, edited_descriptions, whole_index, with_index
from tests.loader.test_selection import EXECUTABLE, EXPORTED, HERE
from tools import crossing

HERE_NOW = jaxlib.__version__
CORPUS = ROOT / "tests" / "corpus" / "2026-11-bundles"
PLAIN, SEVERAL = CORPUS / "plain.aot", CORPUS / "several.aot"
OLDER = "0.10.1"
RELEASES = ("0.10.2", "0.11.0", "0.11.2", "0.12.0.1")
X = np.array([1, 2, 3], np.float32)
MEASURED = f"runs as it is; jaxlib {OLDER} made it, and its operations were measured here"


@pytest.fixture(autouse=True)
def first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is the first in a process that runs what an older jaxlib made."""
    monkeypatch.setattr(first_calls, "_TRIED", Once())


def with_table(monkeypatch: pytest.MonkeyPatch, **measured: Any) -> None:
    """Let the table have one row, of this machine, for the older jaxlib and this one."""
    pair = {
        "measured": "2026-11-27",
        "programs": 1,
        "ran": 1,
        "equal": 1,
        "differs": {},
        "fails": {},
        "unproven": [],
        **measured,
    }
    row = {
        "architecture": host.architecture(),
        "cpu": sorted(crossings.vectors(host.cpu_flags())),
        "builds": {OLDER: ["0" * 32], HERE_NOW: [compatibility.build_id()]},
        "kinds": {OLDER: ["kernel", "copy", "fft fft c64 c64"]},
        "pairs": {f"{OLDER} {HERE_NOW}": pair},
    }
    monkeypatch.setattr(crossings, "_table", lambda: [row])


def verdicts(bundle: stagec.Bundle) -> dict[str, tuple[str, str]]:
    (name,) = bundle
    return {candidate.offer.member: (candidate.code, candidate.reason) for candidate in bundle.select(name).candidates}


def test_an_executable_of_an_older_jaxlib_runs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real thing: bytes of 0.10.1, the table of the repository, one first call in a child, and nothing compiled."""
    caplog.set_level(logging.INFO, "stagec")
    children: list[Any] = []
    call = child.call
    monkeypatch.setattr(child, "call", lambda function, *words: children.append(function) or call(function, *words))
    with stagec.load(PLAIN, policy="measured_only") as bundle:
        assert verdicts(bundle) == {
            "shift.cpu-avx2.n1.xla": ("chosen", MEASURED),
            "shift.cpu-avx2.n3.xla": ("chosen", MEASURED),
            "shift.exported": ("policy", "compiling is not allowed (measured_only)"),
        }
        np.testing.assert_array_equal(bundle["shift"](X), np.array([8, 9, 10], np.float32))
        bundle.preload()  # the other size has the same kinds of operations
    assert children == [first_calls.call]
    (told,) = (record.getMessage() for record in caplog.records)
    what = f"shift runs what was compiled for cpu-avx2 with jaxlib {OLDER}, which is measured (here is {HERE_NOW})"
    assert told == f"{PLAIN}: {what}"


def test_without_the_policy_it_is_refused() -> None:
    for policy in ("executable_only", "allow_compile"):
        settings: Any = {"policy": policy}
        told = f"it was compiled with jaxlib {OLDER}, here is {HERE_NOW}"
        if policy == "executable_only":
            with pytest.raises(stagec.LoadError, match=told):
                stagec.load(PLAIN, **settings)
        else:
            assert verdicts(stagec.load(PLAIN, **settings))["shift.cpu-avx2.n3.xla"] == ("jaxlib-version", told)


@pytest.mark.pinned
def test_what_this_jaxlib_made_comes_first() -> None:
    """Also of two bundles in one: the older executables are there for others."""
    with stagec.load(SEVERAL, policy="measured") as bundle:
        assert {name: code for name, (code, _) in verdicts(bundle).items()} == {
            f"shift.cpu-avx2.n1.jaxlib-{HERE_NOW}.xla": "chosen",
            f"shift.cpu-avx2.n3.jaxlib-{HERE_NOW}.xla": "chosen",
            "shift.cpu-avx2.n1.xla": "fits",
            "shift.cpu-avx2.n3.xla": "fits",
            "shift.exported": "fits",
        }


def test_the_order_of_releases() -> None:
    """This jaxlib's own, then the newest older one of the most demanding target, then what must be compiled."""
    here = HERE._replace(jaxlib="0.12.0")

    def made(release: str, target: str = "cpu", size: int = 4) -> Any:
        name = f"{target}.{release}.{size}"
        return EXECUTABLE._replace(
            member=name, target=target, versions={"jaxlib": release}, shapes=((size,),), bucket={"batch": size}
        )

    offered = [
        made("0.10.2", "avx512"),
        made("0.9.9"),
        made("0.10.2"),
        made("0.11.0"),
        made("0.10.2", size=8),
        EXPORTED,
    ]
    asked = Asked(policy="measured", crosses=lambda offer: "no" if offer.versions["jaxlib"] == "0.9.9" else "")
    chosen = select("f", [*offered, made("0.12.0", "small")], here, asked)
    assert [(c.offer.member, c.code) for c in chosen.candidates] == [
        ("small.0.12.0.4", "chosen"),
        ("avx512.0.10.2.4", "fits"),
        ("cpu.0.11.0.4", "fits"),
        ("cpu.0.10.2.4", "fits"),
        ("cpu.0.10.2.8", "fits"),
        ("cpu.0.9.9.4", "jaxlib-version"),
        ("f.exported", "fits"),
    ]
    chosen = select("f", offered[1:], here, asked)
    # Of each size one, and of two releases the newer.
    assert [(c.offer.member, c.code) for c in chosen.candidates][:3] == [
        ("cpu.0.11.0.4", "chosen"),
        ("cpu.0.10.2.4", "fits"),
        ("cpu.0.10.2.8", "chosen"),
    ]


@pytest.mark.parametrize(
    ("measured", "kinds", "why"),
    [
        ({}, {"kernel", "dot f32 f32 f32"}, f"nobody has measured dot f32 f32 f32 of jaxlib {OLDER}"),
        (
            {"unproven": ["fft fft c64 c64"]},
            {"kernel", "fft fft c64 c64"},
            f"nobody has measured fft fft c64 c64 of jaxlib {OLDER}",
        ),
        (
            {"differs": {"fft fft c64 c64": 0.0}},  # -0.0 in place of 0.0
            {"kernel", "fft fft c64 c64"},
            "fft fft c64 c64 had other bits when that was measured, by 0 of the largest number",
        ),
        (
            {"differs": {"fft fft c64 c64": 2.7e-5}},
            {"kernel", "fft fft c64 c64"},
            "fft fft c64 c64 had other bits when that was measured, by 2.7e-05 of the largest number",
        ),
        (
            {"differs": {"dot bf16 bf16 f32": 1e-3}},
            {"kernel", "fft fft c64 c64"},
            "fft fft c64 c64: other routines had other bits when that was measured, so none of them counts as equal",
        ),
        ({"differs": {"dot bf16 bf16 f32": 1e-3}}, {"kernel", "copy"}, ""),
        ({"fails": {"kernel": "SIGABRT"}}, {"kernel"}, "kernel failed when that was measured: SIGABRT"),
        ({}, {"kernel", "copy", "fft fft c64 c64"}, ""),
    ],
)
def test_what_was_measured_decides(monkeypatch: pytest.MonkeyPatch, measured: Any, kinds: set[str], why: str) -> None:
    with_table(monkeypatch, **measured)
    here = Jaxlib(HERE_NOW, compatibility.build_id()), host.architecture(), host.cpu_flags()
    assert crossings.refusal(lambda: kinds, Jaxlib(OLDER), *here) == why


def test_builds_that_nobody_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version does not say whose jaxlib it is: conda-forge's 0.12.0.1 is another build than that on PyPI."""
    with_table(monkeypatch)
    here, known, others = compatibility.build_id(), "0" * 32, "f" * 32
    on = host.architecture(), host.cpu_flags()

    def refusal(writer: str, reader: str) -> str:
        return crossings.refusal(lambda: {"kernel"}, Jaxlib(OLDER, writer), Jaxlib(HERE_NOW, reader), *on)

    assert [refusal("", here), refusal(known, here), refusal(known, "")] == ["", "", ""]
    assert refusal(others, here) == f"nobody has measured jaxlib {OLDER} of build-id {others}"
    assert refusal(known, others) == f"nobody has measured jaxlib {HERE_NOW} of build-id {others}"
    library = {"libjax_common.so": f"{others} (examined by this build, not by the project)"}
    assert crossings.described({"jaxlib": OLDER, **library}) == Jaxlib(OLDER, others)
    assert crossings.described({"jaxlib": OLDER}) == Jaxlib(OLDER)
    rows = [{"executable": "x", "versions": {"jaxlib": release}} for release in (HERE_NOW, OLDER, "99.0")]
    rows.append({"executable": "y", "versions": {"jaxlib": "0.1"}})
    assert crossings.maker({"executables": rows}, "x") == Jaxlib(OLDER)  # the others took it over
    monkeypatch.setattr(compatibility, "build_id", lambda: others)
    with stagec.load(PLAIN, policy="measured") as bundle:
        reason = verdicts(bundle)["shift.cpu-avx2.n3.xla"][1]
    assert reason.endswith(f"; nobody has measured jaxlib {HERE_NOW} of build-id {others}")


def test_what_differs_within_the_tolerance_that_a_function_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also other routines of that pair. What failed does not run, and nothing where no first call can compare."""
    fft, dot = "fft fft c64 c64", "dot f32 f32 f32"
    with_table(monkeypatch, differs={dot: 2.7e-5})
    here = Jaxlib(HERE_NOW, compatibility.build_id()), host.architecture(), host.cpu_flags()

    def refusal(kind: str, tolerance: float) -> str:
        return crossings.refusal(lambda: {"kernel", kind}, Jaxlib(OLDER), *here, tolerance)

    assert refusal(fft, 1e-4) == ""
    assert refusal(fft, 1e-5).startswith(f"{fft}: other routines had other bits")
    with_table(monkeypatch, differs={fft: 2.7e-5})
    assert refusal(fft, 1e-4) == ""
    assert refusal(fft, 1e-5).startswith(f"{fft} had other bits")
    with_table(monkeypatch, fails={fft: "SIGSEGV"})
    assert refusal(fft, 1.0).endswith("SIGSEGV")
    row: dict[str, Any] = {"member": "x", "aval": "f32[]"}
    golden = {"bucket": {"n": 2}, "inputs": {}, "outputs": {"a": {**row, "rtol": 1e-3}, "b": {**row, "rtol": 1e-2}}}
    function: dict[str, Any] = {"bind": [], "golden": golden}
    assert crossings.within(function, {"n": 2}) == 1e-3
    assert crossings.within(function, {"n": 4}) == 0  # nothing is compared for these sizes
    assert crossings.within({**function, "bind": [{}]}, {"n": 2}) == 0
    assert crossings.within({"bind": []}, {}) == 0
    golden["outputs"]["b"].pop("rtol")  # the usual one, which nobody stated
    assert crossings.within(function, {"n": 2}) == 0


def test_pairs_and_machines_that_nobody_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with_table(monkeypatch)

    def unread() -> set[str]:
        raise AssertionError("of such a pair no executable is read")

    flags, where = host.cpu_flags(), host.architecture()
    older, here = Jaxlib(OLDER), Jaxlib(HERE_NOW)
    assert crossings.refusal(unread, here, older, where, flags) == "only an older jaxlib's may run"
    assert (
        crossings.refusal(unread, older, Jaxlib("0.99.0"), where, flags)
        == f"nobody has measured what jaxlib {OLDER} made with jaxlib 0.99.0 on {where}"
    )
    assert crossings.refusal(unread, older, here, "riscv64", flags).endswith(" on riscv64")
    # What an executable brings with it is the same on other CPUs; XLA's routines choose their code there.
    assert crossings.refusal(lambda: {"kernel", "copy"}, older, here, where, {"sse4_1"}) == ""
    routine = crossings.refusal(lambda: {"kernel", "fft fft c64 c64"}, older, here, where, {"sse4_1"})
    assert routine == "fft fft c64 c64 was measured on CPUs with other vectors than this"
    assert crossings.refusal(lambda: {"kernel", "fft fft c64 c64"}, older, here, where, None) == ""


def test_the_reason_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with_table(monkeypatch, fails={"kernel": "SIGSEGV"})
    told = f"it was compiled with jaxlib {OLDER}, here is {HERE_NOW}; kernel failed when that was measured: SIGSEGV"
    with stagec.load(PLAIN, policy="measured") as bundle:
        assert verdicts(bundle)["shift.cpu-avx2.n3.xla"] == ("jaxlib-version", told)
        np.testing.assert_array_equal(bundle["shift"](X), np.array([8, 9, 10], np.float32))  # compiled
    with pytest.raises(stagec.LoadError, match=told) as caught:
        stagec.load(PLAIN, policy="measured_only")
    assert caught.value.code == "jaxlib-version"


def ends(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_signal_in_the_first_call_ends_a_child_and_not_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with_table(monkeypatch)
    monkeypatch.setattr(first_calls, "call", ends)
    with stagec.load(PLAIN, policy="measured") as bundle:
        assert verdicts(bundle)["shift.cpu-avx2.n3.xla"] == ("chosen", MEASURED)
        np.testing.assert_array_equal(bundle["shift"](X), np.array([8, 9, 10], np.float32))  # compiled
        code, reason = verdicts(bundle)["shift.cpu-avx2.n3.xla"]
        assert (code, reason.rpartition("; ")[2]) == (
            "jaxlib-version",
            "a first call in a child process failed: what reads it ended with SIGSEGV",
        )
    with (
        stagec.load(PLAIN, policy="measured_only") as bundle,
        pytest.raises(stagec.LoadError, match=r"a first call in a child process failed: .* with SIGSEGV"),
    ):
        bundle["shift"](X)


def test_damaged_machine_code_of_an_older_jaxlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA itself says so in the child, and the function is compiled."""
    with_table(monkeypatch)

    def damage(members: dict[str, bytes]) -> None:
        for name in [name for name in members if name.endswith(".xla")]:
            code = members[name]
            at = code.index(b"\x7fELF") + 1
            members[name] = code[:at] + b"elf" + code[at + 3 :]
        members.update(with_index(whole_index(members), members))

    path = edited(PLAIN, tmp_path / "x.aot", damage)
    with stagec.load(path, policy="measured") as bundle:
        _, reason = verdicts(bundle)["shift.cpu-avx2.n3.xla"]
        assert reason.endswith("; its kinds of operations cannot be read: machine code that is damaged: no ELF file")
        np.testing.assert_array_equal(bundle["shift"](X), np.array([8, 9, 10], np.float32))


def test_golden_inputs_are_what_a_first_call_gets(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that are not golden refuse the executable: here the golden ones are wrong."""
    given: list[Any] = []
    monkeypatch.setattr(child, "call", lambda function, data, sizes: given.append((data, sizes)))
    archive = Archive(zoo)
    index = archive.index["functions"]["loop"]
    entry = next(iter(index["executables"]))
    description = Description.from_json(archive.read(entry["description"], LARGEST))
    code = bytes(archive[entry["executable"]])
    shape = {"member": "in", "aval": "f32[8]"}
    x = np.linspace(0, 1, 8, dtype=np.float32)
    (carry, sums), end = stagec.load(zoo)["loop"](x)
    arrays = {"in": x, "carry": carry, "sums": sums, "end": end}
    paths = [f"result{path}" for path in description.out_tree.paths()]
    for wrong, said in ((0.0, ""), (1.0, f"{paths[0]} is not the golden one")):
        arrays["carry"] = carry + np.float32(wrong)
        members = {name: array.tobytes() for name, array in arrays.items()}
        outputs = {
            path: {"member": name, "aval": f"f32[{arrays[name].size}]"}
            for path, name in zip(paths, ("carry", "sums", "end"), strict=True)
        }
        outputs[paths[1]] |= {"rtol": 1e-5, "atol": 1e-5}  # of the manifest; the others have the usual ones
        function = {"bind": [], "golden": {"bucket": {}, "inputs": {"args[0]": shape}, "outputs": outputs}}
        assert first_calls._try(code, description, members, function)  # type: ignore[arg-type]
        data, sizes = given.pop()
        if said:
            with pytest.raises(ValueError, match=said.replace("[", r"\[").replace("]", r"\]")):
                first_calls.call(data, sizes)
        else:
            first_calls.call(data, sizes)


@pytest.mark.parametrize("differs", [0.0, 1e-5], ids=["kinds", "executable"])
def test_the_answer_for_a_bundle_is_not_that_of_another(
    differs: float, zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one with the same executable at the same path, whose golden outputs are others."""
    kinds = sorted(thunks.kinds(bytes(Archive(zoo)["loop.cpu.xla"])))
    with_table(monkeypatch, differs=dict.fromkeys(kinds, differs) if differs else {})
    crossings._table()[0]["kinds"][OLDER] = kinds
    older, path = tmp_path / "older.aot", tmp_path / "x.aot"
    edited_descriptions(zoo, older, "loop", lambda description: description["versions"].update(jaxlib=OLDER))
    x = np.linspace(0, 1, 8, dtype=np.float32)
    with stagec.load(zoo) as bundle:
        (carry, sums), end = bundle["loop"](x)
    for wrong, code in ((0, "chosen"), (1, "jaxlib-version")):
        arrays = {"x": x, "result[0][0]": carry + np.float32(wrong), "result[0][1]": sums, "result[1]": end}

        def with_golden(members: dict[str, bytes], arrays: dict[str, Any] = arrays) -> None:
            index = whole_index(members)
            rows = {
                name: {"aval": f"f32[{','.join(map(str, array.shape))}]", "member": f"golden/{number}"}
                for number, (name, array) in enumerate(arrays.items())
            }
            outputs = {name: {**row, "rtol": 1e-3, "atol": 1e-3} for name, row in rows.items() if name != "x"}
            golden = {"bucket": {}, "inputs": {"args[0]": rows["x"]}, "outputs": outputs}
            index["functions"]["loop"]["golden"] = golden
            more = {row["member"]: arrays[name].tobytes() for name, row in rows.items()}
            new = with_index(index, {**members, **more})
            members.clear()
            members.update(new)

        with stagec.load(edited(older, path, with_golden), policy="measured") as bundle:
            np.testing.assert_array_equal(bundle["loop"](x)[1], end)
            first, *_ = bundle.select("loop").candidates
            assert (first.offer.member, first.code) == ("loop.cpu.xla", code), first.reason


def result(folder: Path, name: str, numbers: list[float]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.results").write_text(f"float32 {np.array(numbers, np.float32).tobytes().hex()}")


def test_what_is_blamed_for_a_difference(tmp_path: Path) -> None:
    """The smallest program that differs; larger ones with that kind in them say nothing of their other kinds."""
    kinds = {
        "alone": ["kernel"],
        "fft": ["fft fft c64 c64", "kernel"],
        "mixed": ["dot f32 f32 f32", "fft fft c64 c64", "kernel"],
        "ends": ["kernel", "ynn-fusion dot:bf16"],
        "nowhere": ["kernel", "symbol sinf"],
    }
    for name in ("alone", "fft", "mixed", "ends"):
        result(tmp_path / "0.11.0", name, [1, 2])
    for name, given in {"alone": [1, 2], "fft": [1, 2.5], "mixed": [1, 3.0]}.items():
        result(tmp_path / "0.12.0", name, given)
    (tmp_path / "0.12.0" / "ends.failed").write_text("SIGABRT")
    measured = crossing._pair(tmp_path, kinds, "0.11.0", "0.12.0")
    del measured["measured"]
    assert measured == {
        "programs": 4,
        "ran": 3,
        "equal": 1,
        "differs": {"fft fft c64 c64": 0.5},
        "fails": {"ynn-fusion dot:bf16": "SIGABRT"},
        "unproven": ["dot f32 f32 f32", "symbol sinf"],  # only a program that differs had it, and none that ran
    }
    result(tmp_path / "0.12.0", "alone", [1, np.inf])
    assert crossing._pair(tmp_path, kinds, "0.11.0", "0.12.0")["differs"]["kernel"] == np.inf


@pytest.mark.parametrize(
    ("dtype", "given", "wanted", "error"),
    [
        ("float32", [1, 2], [1, 2], None),
        ("float32", [1, 2], [1, 4], 0.5),
        ("float32", [0.0], [-0.0], 0.0),
        ("float32", [np.inf, 2], [-np.inf, 2], np.inf),
        ("float32", [np.nan, 2], [np.inf, 2], np.inf),
        ("float32", [np.nan, 2], [1, 2], np.inf),
        ("float32", [np.nan, 1], [np.nan, 2], 0.5),
        ("complex64", [complex(np.inf, 1)], [complex(np.inf, 2)], np.inf),
        ("complex64", [3 + 3j], [3 + 4j], 0.2),
        ("int32", [1000, 2], [1000, 3], np.inf),
        ("uint8", [1], [2], np.inf),
        ("bool", [True], [False], np.inf),
    ],
)
def test_how_far_results_differ(dtype: str, given: Any, wanted: Any, error: float | None) -> None:
    lines = [f"{dtype} {np.array(each, dtype).tobytes().hex()}" for each in (wanted, given)]
    assert crossing._error(*lines) == (None if error is None else pytest.approx(error))


def test_the_table_is_whole() -> None:
    """Every pair of an older writer ran: no kind failed, and those that bring their own code have the same bits."""
    for row in crossings._table():
        assert row["cpu"] == sorted(crossings.vectors(row["cpu"]))
        ids = {build.build_id for build in known_builds.rows()}
        assert all(builds and {*builds} <= ids for builds in row["builds"].values())
        for pair, measured in row["pairs"].items():
            writer, reader = pair.split()
            refused = measured["differs"].keys() | measured["fails"].keys()
            assert refused | {*measured["unproven"]} <= {*row["kinds"][writer]}
            assert not refused & {*measured["unproven"]}
            assert datetime.date.fromisoformat(measured["measured"]) >= datetime.date(2026, 11, 27)
            assert measured["equal"] <= measured["ran"] <= measured["programs"] > 500
            if numbers(writer) < numbers(reader):
                assert measured["fails"] == {}
                assert not measured["differs"].keys() & crossings.OWN
    wanted = {f"{writer} {reader}" for writer in RELEASES for reader in RELEASES if writer != reader}
    assert wanted <= {pair for row in crossings._table() for pair in row["pairs"]}


def test_explain_and_verify_say_it() -> None:
    done = command("explain", PLAIN, "--measured", "--executable-only", "--json")
    assert done.returncode == 0
    (function,) = json.loads(done.stdout)["functions"]
    assert [(c["code"], c["reason"]) for c in function["candidates"]][:2] == [("chosen", MEASURED)] * 2
    text = checked("explain", PLAIN, "--executable-only", "--measured")
    assert text.count(MEASURED) == 2
    done = command("verify", PLAIN, "--measured")
    assert (done.returncode, done.stderr) == (2, "--measured is for --serves: leave it out\n")


def test_inspect_lists_what_an_executable_runs(zoo: Path) -> None:
    text = checked("inspect", zoo.with_name("zoo.fourier.cpu.xla"))
    kinds = ["fft fft c64 c64", "fft ifft c64 c64", "kernel", "sort f32"]
    assert f"  runs       {', '.join(kinds)}\n" in text
    for reader, why in crossings.readers(kinds, Jaxlib(HERE_NOW), host.architecture()).items():
        told = f"not with jaxlib {reader}: {why}\n" if why else "the same bits with jaxlib "
        assert f"  measured   {told}" in text


@pytest.mark.pinned
def test_a_transform_differs_where_the_newest_reads_it() -> None:
    measured = crossings.readers(["kernel", "fft fft c64 c64"], Jaxlib(HERE_NOW), "x86_64")
    assert (measured["0.11.0"], "had other bits" in measured["0.12.0.1"]) == ("", True)


def test_a_runtime_that_cannot_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is kept of it: the next time there may be one."""
    monkeypatch.chdir(tmp_path)  # a reason has no room for a long path
    assert abi.refusal("no.so", b"") == "it does not say which runtime it needs"
    library = "./plugin.so"
    why = abi.refusal(library, b"x")
    assert why.startswith(
        "XLA cannot be asked whether its runtime here is new enough: what reads it ended with status 1: "
    )
    Path(library).write_bytes(b"x")
    assert abi.refusal(library, b"x") != why


def test_a_device_that_nobody_measured() -> None:
    """Of GPUs, XLA is asked first: `test_xla_says_first` in compiler/extensions/rehearse/tests/test_virtual.py."""
    offer = stagec.load(PLAIN, policy="measured").select("shift").candidates[0].offer
    offer = offer._replace(platforms=("tpu",), architecture="", device_kind="TPU v5 lite")
    archive = Archive(PLAIN)
    refusal = first_calls.Crossings(host.describe()).refusal(archive, "shift", offer)
    assert refusal == f"nobody has measured what jaxlib {OLDER} made with jaxlib {HERE_NOW} on TPU v5 lite"
