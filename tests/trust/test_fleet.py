"""Which jaxlibs a bundle serves: the bundle of the corpus has executables of jaxlib 0.10.1 and 0.10.2.

Modules: `trust/fleet.py`.
"""

import json
from pathlib import Path
from typing import Any

import jaxlib
import pytest

from stagec.bundle.additions import bases
from stagec.bundle.archive import Archive
from stagec.bundle.members import pieces
from stagec.core.messages.errors import StagecError
from stagec.core.sizes.avals import parse_aval
from stagec.loader.selection import Asked, offers, select
from stagec.pjrt.host import Host, Platform
from stagec.trust import fleet
from stagec_insight.overview import Sources, collect
from tests.building import ROOT, checked, stagec as command
from tests.bundles import edited_index, without_executables

BUNDLE = ROOT / "tests" / "corpus" / "2026-11-bundles" / "several.aot"
UNTIL = Archive(BUNDLE).index["functions"]["shift"]["readable_until"]
BOTH = ("--serves", "jaxlib==0.10.1", "--serves", "jaxlib==0.10.2")


def test_a_fleet_that_is_served() -> None:
    done = command("verify", BUNDLE, *BOTH)
    assert done.returncode == 3  # whole, and nobody was asked who made it
    assert done.stdout.splitlines()[-2:] == [
        "ok      serves      jaxlib 0.10.1: 2 executables of 1 function",
        "ok      serves      jaxlib 0.10.2: 2 executables of 1 function",
    ]


def test_a_fleet_that_is_not_served() -> None:
    done = command("verify", BUNDLE, *BOTH, "--serves", "jaxlib==0.12.0")
    assert done.returncode == 1
    missing = "no executable of shift for cpu-avx2 (n = 1; n = 3)"
    assert done.stdout.splitlines()[-1] == (
        f"FAILED  serves      jaxlib 0.12.0: {missing}; of the exported artifact: "
        "jaxlib 0.12.0 reads it, by JAX's promise"
    )
    report = json.loads(command("verify", BUNDLE, "--serves", "jaxlib==0.12.0", "--json").stdout)
    assert (report["verdict"], report["serves"]) == ("intact", False)
    assert report["jaxlibs"] == [
        {
            "jaxlib": "0.12.0",
            "function": "shift",
            "target": "cpu-avx2",
            "ok": False,
            "executables": 0,
            "missing": ["n = 1", "n = 3"],
            "exported": "jaxlib 0.12.0 reads it, by JAX's promise",
        }
    ]


def test_what_older_jaxlibs_made_counts_where_it_was_measured() -> None:
    done = command("verify", BUNDLE, "--serves", "jaxlib==0.12.0.1", "--serves", "jaxlib==0.10.2", "--measured")
    assert done.returncode == 3
    measured = "2 of which are of an older jaxlib, as measured"
    assert done.stdout.splitlines()[-2:] == [
        f"ok      serves      jaxlib 0.12.0.1: 2 executables of 1 function, {measured}",
        "ok      serves      jaxlib 0.10.2: 2 executables of 1 function",
    ]
    rows = fleet.serves(Archive(BUNDLE).index, ["0.12.0.1"], kinds=lambda _: {"kernel", "custom-call mine"})
    assert [(row["ok"], row["measured"]) for row in rows] == [(False, 0)]
    assert "; of an older jaxlib: nobody has measured custom-call mine of jaxlib 0.10.2; of the" in fleet.summary(rows)
    index = Archive(BUNDLE).index
    (row,) = fleet.serves(index, ["99.0"], kinds=lambda _: {"kernel"})
    assert row["refused"]["n = 1"] == "nobody has measured what jaxlib 0.10.2 made with jaxlib 99.0 on x86_64"
    (target,) = index["targets"].values()
    device = {**target, "platform": "cuda", "device_kind": "NVIDIA H100 80GB HBM3"}
    (row,) = fleet.serves({**index, "targets": {"cpu-avx2": device}}, ["0.12.0.1"], kinds=lambda _: {"kernel"})
    measured = "nobody has measured what jaxlib 0.10.2 made with jaxlib 0.12.0.1 on NVIDIA H100 80GB HBM3"
    assert (row["measured"], row["refused"]["n = 1"]) == (0, measured)


def test_what_nobody_knows_serves_nobody(tmp_path: Path) -> None:
    """A bundle without executables, and a jaxlib that is not out yet."""
    path = without_executables(BUNDLE, tmp_path / "x.aot")
    edited_index(path, path, lambda index: index.pop("base"))
    done = command("verify", path, "--serves", "jaxlib==99.0", "--serves", "jaxlib==99.1", "--serves", "jaxlib==0.12.0")
    assert (done.returncode, done.stdout.splitlines()[-3:]) == (
        1,
        [
            *(
                f"FAILED  serves      jaxlib {release}: no executable of shift; of the exported artifact: "
                f"JAX promises that releases until {UNTIL} read it, and this stagec does not know of which day "
                f"jaxlib {release} is"
                for release in ("99.0", "99.1")
            ),
            "ok      serves      jaxlib 0.12.0: 0 executables of 1 function, 1 of which is compiled there",
        ],
    )
    (row,) = fleet.serves(index(executables=[], readable_until="unknown"), ["99"])
    assert (row["ok"], row["exported"]) == (False, "this stagec does not know jaxlib 99")


def test_a_function_that_is_named_has_every_target_that_is_named() -> None:
    other = index()
    other["targets"]["gpu"] = other["targets"]["cpu-avx2"]
    words = ["0.10.1"], ["shift"]
    assert [row["ok"] for row in fleet.serves(other, *words, ["cpu-avx2"])] == [True]
    rows = fleet.serves(other, *words, ["gpu", "cpu-avx2"])
    assert [(row["target"], row["ok"]) for row in rows] == [("gpu", False), ("cpu-avx2", True)]
    assert fleet.summary(rows).startswith("no executable of shift for gpu; of the exported artifact: ")
    with pytest.raises(StagecError, match="no function has executables for gpu"):
        fleet.serves(other, ["0.10.1"], [], ["gpu"])


def test_a_damaged_bundle_serves_nobody(tmp_path: Path) -> None:
    path = edited_index(BUNDLE, tmp_path / "x.aot", lambda index: index.update(format=3))
    done = command("verify", path, *BOTH, "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"], "serves" in report) == (1, "refused", False)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--serves", "0.10.1"), "--serves: '0.10.1' is not a release of jaxlib\n  write jaxlib==0.12.0\n"),
        ((*BOTH, "--function", "shifts"), "no function 'shifts'\n  did you mean \"shift\"?\n"),
        ((*BOTH, "--target", "cpu"), "no target 'cpu'\n  write one of cpu-avx2\n"),
        (
            ("--target", "cpu-avx2"),
            "--function, --target: these are the functions and targets that must be served, and ",
        ),
    ],
)
def test_mistakes(words: tuple[str, ...], what: str) -> None:
    done = command("verify", BUNDLE, *words)
    assert done.returncode == 2
    assert done.stderr.startswith(what)


def index(**function: Any) -> dict[str, Any]:
    found = Archive(BUNDLE).index
    copied: dict[str, Any] = json.loads(json.dumps({**found, "functions": dict(found["functions"])}))
    copied["functions"]["shift"].update(function)
    return copied


def test_one_size_of_several_is_missing() -> None:
    of_both = index()
    del of_both["functions"]["shift"]["executables"][0]
    rows = fleet.serves(of_both, ["0.10.1", "0.10.2"])
    assert [(row["ok"], row["executables"], row["missing"]) for row in rows] == [(False, 1, ["n = 1"]), (True, 2, [])]
    assert fleet.serves(of_both, ["0.10.1"], targets=["cpu-avx2"]) == rows[:1]


@pytest.mark.parametrize(
    ("until", "ok", "exported"),
    [
        ("2026-10-16", True, "jaxlib 0.12.0 reads it, by JAX's promise"),
        (
            "2026-10-15",
            False,
            "JAX promises that releases until 2026-10-15 read it, and jaxlib 0.12.0 is of 2026-10-16",
        ),
        ("unknown", True, "JAX promises nothing"),
    ],
)
def test_a_function_without_executables(until: str, ok: bool, exported: str) -> None:
    """The day of the release that reads counts, and never today."""
    (row,) = fleet.serves(index(executables=[], readable_until=until), ["0.12.0"])
    assert (row["ok"], row["target"], row["exported"]) == (ok, "", exported)
    assert fleet.summary([row]).startswith(
        "0 executables of 1 function, 1 of which is compiled there" if ok else "no executable of shift;"
    )


def test_a_manifest_that_names_its_fleet(zoo: Path, tmp_path: Path) -> None:
    """The command of the action: without an executable of one of them, there is no bundle."""
    stem, output = zoo.parent / "zoo.loop", tmp_path / "zoo.aot"
    words = ["--name", "zoo", "--version", "1", "--output", output, "--serves", f"jaxlib=={jaxlib.__version__}"]
    words += ["--export", f"zoo.loop:{stem}.exported:{stem}.spec:{stem}.exported.json"]
    words += ["--executable", f"zoo.loop.cpu:{stem}.cpu.xla:{stem}.cpu.json:{stem}.cpu.stablehlo.mlirbc"]
    checked("action", "bundle", *words)
    output.unlink()
    done = command("action", "bundle", *words, "--serves", "jaxlib==1.2.3")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "tests/zoo/zoo.toml: manifest.serves: jaxlib 1.2.3: no executable of loop for cpu; of the exported artifact: "
    )
    assert done.stderr.endswith("\n  name it in jaxlib = [...] too\n")
    assert not output.exists()


def test_reports_tell_of_each_jaxlib(tmp_path: Path) -> None:
    """`inspect`, `report`, and `diff` with the bundle as it was before; `explain` has a row for each."""
    text = checked("inspect", BUNDLE)
    assert "  jaxlib 0.10.1: 2 executables\n  jaxlib 0.10.2: 2 executables\n" in text
    assert [line.split("  ")[2].strip() for line in text.splitlines() if "n = 3" in line] == [
        f"cpu-avx2 n = 3 jaxlib {release}" for release in ("0.10.1", "0.10.2")
    ]
    (base,) = bases(Archive(BUNDLE))
    assert f"  executables were added to the bundle with the sha256 {base.sha256[:12]}\n" in text
    sizes = {part["kind"]: part["of"] for part in json.loads(checked("inspect", BUNDLE, "--sizes", "--json"))["parts"]}
    assert {sizes.get(f"executables (jaxlib {release})") for release in ("0.10.1", "0.10.2")} == {"shift"}
    shown = collect(str(BUNDLE), Sources())["functions"]["shift"]["executables"]
    stems = ("shift.cpu-avx2.n1", "shift.cpu-avx2.n3")
    assert list(shown) == [f"{stem}{end}" for stem in stems for end in ("", ".jaxlib-0.10.2")]
    (tmp_path / "before.aot").write_bytes(b"".join(pieces(base.members())))
    differences = json.loads(command("diff", tmp_path / "before.aot", BUNDLE, "--json").stdout)
    assert differences["bundle"][0]["jaxlib"] == {"first": ["0.10.1"], "second": ["0.10.1", "0.10.2"]}
    assert [row["name"] for row in differences["executables"]] == [f"{stem}.jaxlib-0.10.2" for stem in stems]
    (explained,) = json.loads(command("explain", BUNDLE, "--json").stdout)["functions"]
    members = {candidate["member"] for candidate in explained["candidates"]}
    assert members == {f"{name}.xla" for name in shown} | {"shift.exported"}


def test_no_executable_of_the_jaxlib_that_is_here() -> None:
    """The refusal names the jaxlibs that the bundle serves."""
    index = Archive(BUNDLE).index
    avals = tuple(map(parse_aval, index["functions"]["shift"]["in_avals"]))
    here = Host("0.12.0", frozenset(index["targets"]["cpu-avx2"]["requires"]), {"cpu": Platform()}, "x86_64")
    selected = select("shift", offers(index, "shift", avals), here, Asked(policy="executable_only"))
    refusal = selected.refusal("x.aot")
    assert (refusal.code, str(refusal)) == (
        "jaxlib-version",
        "x.aot: shift cannot run here; cpu-avx2: it was compiled with jaxlib 0.10.1, here is 0.12.0; cpu-avx2: it was "
        "compiled with jaxlib 0.10.2, here is 0.12.0; compiling: compiling is not allowed (executable_only)",
    )
    assert select("shift", offers(index, "shift", avals), here, Asked()).chosen
