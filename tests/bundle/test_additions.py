"""Adding executables of another jaxlib to a bundle that was released and signed.

The bundle says that jaxlib 0.9.9 made it, so what this jaxlib adds must be what it made in the first place.

Modules: `bundle/additions.py`, `cli/add_jaxlib.py`, `audit/adding.py`.
"""

import datetime
import functools
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jaxlib
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, seed, settings, strategies as st

import stagec
from stagec.audit import adding
from stagec.bundle.additions import bases, order
from stagec.bundle.archive import INDEX, Archive, encode_index
from stagec.bundle.index import FUNCTIONS
from stagec.bundle.members import bundle_members, encode, pieces, split
from stagec.bundle.writing import Member, extend
from stagec.checking import crossing
from stagec.core.builds import actions, releases
from stagec.core.data import strict_json
from stagec.core.data.reading import RegularFile
from stagec.core.messages.errors import StagecError
from stagec.trust.attestation import subjects
from stagec.trust.provenance import Environment, Wheel, read_environment, statement_of_addition
from stagec.trust.verification import verify
from tests.building import build_model, checked, stagec as command
from tests.bundle import mutations
from tests.bundles import build_large, edited, edited_descriptions, edited_index, reindexed, whole_index, with_index
from tests.registries import Registry, needs_registry
from tests.signed import write_bundle_of, write_keys, write_provenance

HERE = jaxlib.__version__
X = np.arange(8, dtype=np.float32)


def made_by_another(bundle: Path, out: Path, **more: object) -> Path:
    """Write a bundle whose executables say that jaxlib 0.9.9 made them. more: of the index's functions."""
    for name in Archive(bundle).index["functions"]:
        bundle = edited_descriptions(bundle, out, name, lambda d: d["versions"].update(jaxlib="0.9.9"))

    def edit(index: dict[str, Any]) -> None:
        for function in index["functions"].values():
            function.update(more)

    return edited_index(bundle, out, edit)


def packages() -> dict[str, Any]:
    """The packages of this environment, as Bazel lists those of one."""
    wheels = [
        {
            "name": name,
            "version": version,
            "filename": f"{name}-{version}-cp311-cp311-linux_x86_64.whl",
            "sha256": hashlib.sha256(name.encode()).hexdigest(),
        }
        for name, version in (("jaxlib", HERE), ("ml_dtypes", "0.5.1+local"))
    ]
    return {"python": platform.python_version(), "packages": wheels}


def report_of(listed: dict[str, Any]) -> dict[str, Any]:
    """The same packages, as pip tells of them."""
    install = []
    for number, wheel in enumerate(reversed(listed["packages"])):
        sha256 = wheel["sha256"]
        digest = {"hashes": {"sha256": sha256}, "hash": "x=y"} if number else {"hash": f"sha256={sha256}"}
        url = f"https://index.example/{wheel['filename'].replace('+', '%2B')}#x/y"
        metadata = {"name": wheel["name"], "version": wheel["version"], "summary": "x"}
        install.append({"download_info": {"url": url, "archive_info": digest}, "metadata": metadata, "requested": True})
    environment = {"python_full_version": listed["python"], "os_name": "posix"}
    return {"version": "1", "pip_version": "26.0", "install": install, "environment": environment}


@pytest.fixture(scope="module")
def material(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The keys of ann, bob and eve; in `before` a bundle that ann signed, in `after` an addition that bob signed."""
    folder = tmp_path_factory.mktemp("additions")
    for name in ("ann", "bob", "eve"):
        write_keys(folder, name)
    before, after = folder / "before", folder / "after"
    before.mkdir()
    bundle = write_bundle_of(zoo, before, "loop", "mlp")
    made_by_another(bundle, bundle)
    edited_index(bundle, bundle, lambda index: index["targets"].update(spare={**index["targets"]["cpu"]}))
    write_provenance(bundle)
    checked("sign", "zoo.aot", "--statement", "zoo.intoto.json", "--key", "../ann.pem", cwd=before)
    after.mkdir()
    shutil.copy(before / "zoo.aot.dsse.json", after)
    words = ("--output", "zoo.aot", "--statement", "zoo.intoto.json", "--sbom", "zoo.sbom.json")
    (folder / "packages.json").write_text(json.dumps(packages()))
    words += ("--packages", "../packages.json")
    text = checked("add-jaxlib", "../before/zoo.aot", *words, "--key", "../ann.pub.pem", cwd=after)
    assert text == f"zoo.aot: 3 executables of jaxlib {HERE} added\n"
    sign(after, "bob")
    return folder


def sign(folder: Path, name: str) -> None:
    """Sign the statement in the folder `after` with a key, beside the envelope of before."""
    words = ("--statement", "zoo.intoto.json", "--output", "zoo.aot.2.dsse.json")
    checked("sign", "zoo.aot", *words, "--key", f"../{name}.pem", cwd=folder)


@pytest.fixture
def folder(material: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(material, tmp_path / "copy"))


def report(folder: Path, *keys: str, base: str = "") -> tuple[str, str, str]:
    """The verdict on the bundle in `after`, the last check, and what it says."""
    paths = [str(folder / f"{key}.pub.pem") for key in keys]
    bundle = folder / "after" / "zoo.aot"
    report = verify(str(bundle), paths, base_keys=[str(folder / f"{base}.pub.pem")] if base else ())
    last = report["checks"][-1]
    return report["verdict"], last["check"], last["summary"].replace(f"{bundle}", "")


def test_what_was_there_stays(material: Path) -> None:
    before, after = Archive(material / "before" / "zoo.aot"), Archive(material / "after" / "zoo.aot")
    listed, base = dict(before.index["members"]), after.index["base"]
    assert after.index["members"][base["functions"]] == listed.pop(FUNCTIONS)
    assert listed.items() <= after.index["members"].items()
    (base,) = bases(after)
    assert base.index == before.index
    assert b"".join(pieces(base.members())) == (material / "before" / "zoo.aot").read_bytes()


def test_what_is_added_is_what_a_build_makes(material: Path, zoo: Path) -> None:
    """Its executable and StableHLO are those that are there, so only the description is another member."""
    before, after = Archive(material / "before" / "zoo.aot"), Archive(material / "after" / "zoo.aot")
    more = after.index["members"].keys() - before.index["members"].keys()
    more -= {after.index["base"][key] for key in ("index", "functions")}
    stems = ("loop.cpu", "mlp.cpu.batch1", "mlp.cpu.batch4")
    assert more == {f"{stem}.jaxlib-{HERE}.json" for stem in stems}
    for stem in stems:
        assert after[f"{stem}.jaxlib-{HERE}.json"] == (zoo.parent / f"zoo.{stem}.json").read_bytes()


def test_the_same_bytes_twice(material: Path, tmp_path: Path) -> None:
    told = json.loads(checked("add-jaxlib", material / "before" / "zoo.aot", "--output", tmp_path / "x.aot", "--json"))
    assert (tmp_path / "x.aot").read_bytes() == (material / "after" / "zoo.aot").read_bytes()
    assert told["jaxlib"] == HERE
    assert told["sha256"] == hashlib.sha256((tmp_path / "x.aot").read_bytes()).hexdigest()


def test_a_statement_has_the_packages_that_compiled(material: Path, tmp_path: Path) -> None:
    """Bazel's list of them and the report of pip give the same one; without a list there is none."""
    statement, path = json.loads((material / "after" / "zoo.intoto.json").read_text()), tmp_path / "report.json"
    build = statement["predicate"]["buildDefinition"]
    assert build["internalParameters"]["python"] == [platform.python_version()]
    assert [wheel["uri"] for wheel in build["resolvedDependencies"][1:]] == [
        f"pkg:pypi/jaxlib@{HERE}",
        "pkg:pypi/ml-dtypes@0.5.1%2Blocal",
    ]
    listed = report_of(packages())
    words = ("--statement", tmp_path / "x.intoto.json", "--sbom", tmp_path / "x.sbom.json")
    before = material / "before" / "zoo.aot"
    path.write_text(json.dumps(listed))
    checked("add-jaxlib", before, "--output", tmp_path / "x.aot", *words, "--packages", path)
    for name in ("intoto", "sbom"):
        assert (tmp_path / f"x.{name}.json").read_bytes() == (material / "after" / f"zoo.{name}.json").read_bytes()
    here = f"Python {platform.python_version()} and jaxlib {HERE}"
    what = f"--packages: a statement and an SBOM list the packages that compile, {here}"
    assert refused(before, *words).startswith(f"{what}, and no list of them is given\n  write one, and")
    listed["environment"]["python_full_version"] = "3.8.1"
    path.write_text(json.dumps(listed))
    assert refused(before, *words, "--packages", path).startswith(f"{what}, and the lists given are of others")
    del listed["install"][0]["download_info"]["archive_info"]["hash"]
    path.write_text(json.dumps(listed))
    fault = f"{path}: not a list of packages: ml_dtypes is not a wheel with a sha256\n"
    assert refused(before, *words, "--packages", path) == fault


def test_the_report_of_pip_is_one() -> None:
    words = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--no-index", "--quiet", "--report", "-"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tiny-1.0+a-py3-none-any.whl")
        with zipfile.ZipFile(path, "w") as wheel:
            for name, text in {
                "METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0+a\n",
                "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
                "RECORD": "",
            }.items():
                wheel.writestr(f"tiny-1.0+a.dist-info/{name}", text)
        done = subprocess.run([sys.executable, "-m", "pip", *words, path], check=True, capture_output=True, text=True)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    expected = Environment(platform.python_version(), (Wheel("tiny", "1.0+a", path.name, digest),))
    assert read_environment(done.stdout) == expected


def test_it_runs_without_compiling(material: Path) -> None:
    with pytest.raises(stagec.LoadError, match="0\\.9\\.9") as refusal:
        stagec.load(material / "before" / "zoo.aot", policy="executable_only")
    assert refusal.value.code == "jaxlib-version"
    loaded = stagec.load(material / "after" / "zoo.aot", policy="executable_only", keys=[material / "bob.pub.pem"])
    assert len(loaded["loop"](X)) == 2


REUSED = """
[manifest]
name = "m"
version = "1"
[functions.f]
entry = "model:f"
args = ["f32[4]"]
targets = ["cpu-sse42"]
[functions.known]
entry = "model:f"
args = ["f32[4]"]
targets = ["cpu-sse42"]
golden = {}
[functions.sized]
entry = "model:f"
args = ["f32[n]"]
targets = ["cpu-sse42"]
buckets = { n = [2, 3] }
"""
UNKNOWN = """
[manifest]
name = "m"
version = "1"
[functions.eighth]
entry = "model:eighth"
args = ["f32[4]"]
targets = ["cpu-sse42"]
[functions.nan]
entry = "model:nan"
args = ["f32[4]"]
targets = ["cpu-sse42"]
[functions.nothing]
entry = "model:nothing"
args = ["f32[4]"]
targets = ["cpu-sse42"]
"""
UNKNOWN_SOURCE = """
import jax.numpy as jnp

def eighth(x):
    return (x * {scale}).astype(jnp.float8_e4m3fn), (x * {scale}).astype(jnp.int8)

def nan(x):
    return x, x * jnp.nan

def nothing(x):
    return ()
"""


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles whose executables say that jaxlib 0.9.9 made them: "right", and another whose function is another."""
    bundles = {}
    for name, scale in (("right", 2), ("wrong", 3)):
        folder = tmp_path_factory.mktemp(name)
        bundle = build_model(folder, REUSED, f"def f(x):\n    return {scale} * x\n")
        bundles[name] = made_by_another(bundle, bundle)
    return bundles


def reuse(bundle: Path, out: Path) -> tuple[list[str], list[str]]:
    """Return the names of what was taken, and what is said of the others."""
    text = checked("add-jaxlib", bundle, "--reuse", "--output", out)
    first, *others = text.splitlines()
    archive = Archive(out)
    rows = [(name, row) for name, of in archive.index["functions"].items() for row in of["executables"]]
    files = {row["executable"] for _, row in rows if row["versions"]["jaxlib"] == "0.9.9"}
    taken = [name for name, row in rows if row["versions"]["jaxlib"] == HERE and row["executable"] in files]
    assert first == f"{out}: 4 executables for jaxlib {HERE} added; {len(taken)} of them were there"
    return taken, others


def test_an_older_executable_is_taken(older: dict[str, Path], tmp_path: Path) -> None:
    """It is in the bundle once, and its description says which jaxlib compiled it."""
    assert reuse(older["right"], tmp_path / "x.aot") == (["f", "known", "sized", "sized"], [])
    assert verify(str(tmp_path / "x.aot"), [])["verdict"] == "intact"
    loaded = stagec.load(tmp_path / "x.aot", policy="executable_only")
    np.testing.assert_array_equal(loaded["f"](X[:4]), 2 * X[:4])
    (described,) = loaded["f"].descriptions
    assert (described.versions["jaxlib"], described.components["jaxlib"]["value"]) == (HERE, HERE)
    statement = json.loads(statement_of_addition(Archive(tmp_path / "x.aot"), "0" * 64, []))
    internal = statement["predicate"]["buildDefinition"]["internalParameters"]
    assert internal["reused"] == sorted({*internal["executables"][HERE]})


def test_an_older_executable_with_weights_beside_the_bundle(tmp_path: Path) -> None:
    """Without them, nobody can say whether it is right: no bytes are written that another machine would not write."""
    bundle = build_large(tmp_path, 1000, external=True)
    made_by_another(bundle, bundle)
    (tmp_path / "new").mkdir()
    taken = f"2 executables for jaxlib {HERE} added; 2 of them were there\n"
    assert checked("add-jaxlib", bundle, "--reuse", "--output", tmp_path / "new" / "x.aot").endswith(taken)
    alone = shutil.copy(bundle, tmp_path / "new" / "alone.aot")
    said = refused(alone, "--reuse")
    assert f"jaxlib-{HERE}: its trial cannot run here: weights beside the bundle are missing" in said
    assert "  name the folder of the weights: --weights FOLDER" in said
    words = ("--reuse", "--weights", tmp_path, "--output", tmp_path / "new" / "x.aot")
    assert checked("add-jaxlib", alone, *words).endswith(taken)


def test_the_newest_of_the_older_executables_is_taken(older: dict[str, Path], tmp_path: Path) -> None:
    """Also where a newer jaxlib made one."""

    def add(members: dict[str, bytes]) -> None:
        index = whole_index(members)
        for function in index["functions"].values():
            for row in list(function["executables"]):
                described = json.loads(members[row["description"]])
                described["versions"]["jaxlib"] = "99.1"
                name = row["description"].replace(".json", ".jaxlib-99.1.json")
                members[name] = json.dumps(described).encode()
                versions = {**row["versions"], "jaxlib": "99.1"}
                function["executables"].append({**row, "versions": versions, "description": name})
            function["executables"].sort(key=order)
        reindexed(members, lambda now: now.update(functions=index["functions"]))

    bundle = edited(older["right"], tmp_path / "both.aot", add)
    assert reuse(bundle, tmp_path / "x.aot") == (["f", "known", "sized", "sized"], [])


def test_an_executable_of_a_plugin_is_not_taken(older: dict[str, Path], tmp_path: Path) -> None:
    bundle = edited_descriptions(
        older["right"], tmp_path / "gpu.aot", "f", lambda d: d["versions"].update({"jax-cuda13-plugin": "0.9.9"})
    )
    said = checked("add-jaxlib", bundle, "--reuse", "--output", tmp_path / "x.aot").splitlines()
    why = "it belongs to a release of jax-cuda13-plugin too"
    assert said[1:] == [f"m.f.cpu-sse42.jaxlib-{HERE} is compiled: {why}"]


def of_another(right: Path, wrong: Path, out: Path) -> Path:
    """Write a bundle with the executables of another one."""

    def exchange(members: dict[str, bytes]) -> None:
        rows = [row for function in whole_index(members)["functions"].values() for row in function["executables"]]
        with zipfile.ZipFile(wrong) as others:
            for row in rows:
                members[row["executable"]] = content = others.read(row["executable"])
                described = json.loads(members[row["description"]])
                described["executable_sha256"] = hashlib.sha256(content).hexdigest()
                members[row["description"]] = json.dumps(described).encode()
        again(members, lambda index: None)

    return edited(right, out, exchange)


def test_results_that_say_nothing_are_not_taken(tmp_path: Path) -> None:
    """Those without a finite number, and none at all; and eight bits are compared by their own unit."""
    bundles = []
    for scale in ("2", "2.6"):
        (folder := tmp_path / scale).mkdir()
        bundle = build_model(folder, UNKNOWN, UNKNOWN_SOURCE.format(scale=scale))
        bundles.append(made_by_another(bundle, bundle))
    said = [
        f"m.nan.cpu-sse42.jaxlib-{HERE} is compiled: on these arguments result[1] has no number that could be compared",
        f"m.nothing.cpu-sse42.jaxlib-{HERE} is compiled: it has no result that could be compared",
    ]
    words = ("--reuse", "--output", tmp_path / "x.aot")
    first, *others = checked("add-jaxlib", bundles[0], *words).splitlines()
    assert first.endswith(f": 3 executables for jaxlib {HERE} added; 1 of them were there")
    assert others == said
    _, first, *others = checked("add-jaxlib", of_another(*bundles, tmp_path / "y.aot"), *words).splitlines()
    assert first.startswith(f"m.eighth.cpu-sse42.jaxlib-{HERE} is compiled: result[0] has a largest error of ")
    assert others == said


@pytest.mark.parametrize(("dtype", "unit"), [("float8_e4m3fn", 1 / 8), ("float8_e5m2", 1 / 4), ("float32", 1e-3)])
def test_small_results_are_compared_with_the_largest_of_them(dtype: str, unit: float) -> None:
    small = np.array([0.0625, 0.03125], getattr(ml_dtypes, dtype, dtype))
    relative, absolute = crossing._tolerances(small, 0.5 if "8" in dtype else 1e-3)
    assert (relative, absolute) == (unit, unit / 16)


def test_an_older_executable_with_other_results_is_not(older: dict[str, Path], tmp_path: Path) -> None:
    """By golden outputs, and by what this jaxlib compiles; nor one that ends the process, or that a newer one made."""
    bundle = of_another(older["right"], older["wrong"], tmp_path / "exchanged.aot")
    taken, others = reuse(bundle, tmp_path / "x.aot")
    assert not taken
    assert [line.partition(" is compiled: result has a largest error of ")[0] for line in others] == [
        f"m.{name}.jaxlib-{HERE}"
        for name in ("f.cpu-sse42", "known.cpu-sse42", "sized.cpu-sse42.n2", "sized.cpu-sse42.n3")
    ]
    loaded = stagec.load(tmp_path / "x.aot", policy="executable_only")
    np.testing.assert_array_equal(loaded["f"](X[:4]), 2 * X[:4])
    newer = edited_descriptions(
        older["right"], tmp_path / "newer.aot", "f", lambda d: d["versions"].update(jaxlib="99.1")
    )
    text = checked("add-jaxlib", newer, "--reuse", "--output", tmp_path / "y.aot")
    why = "a newer jaxlib made the one that is there"
    assert text.splitlines()[1:] == [f"m.f.cpu-sse42.jaxlib-{HERE} is compiled: {why}"]


def test_stripped_it_is_a_bundle_of_both(material: Path, tmp_path: Path) -> None:
    """Which says nothing of the one that was added to."""
    checked("strip", material / "after" / "zoo.aot", "--output", tmp_path / "stripped.aot")
    assert verify(str(tmp_path / "stripped.aot"), [])["verdict"] == "intact"
    archive = Archive(tmp_path / "stripped.aot")
    assert not bases(archive)
    whole = Archive(material / "after" / "zoo.aot").index["functions"]["loop"]["executables"]
    assert archive.index["functions"]["loop"]["executables"] == whole


def test_both_signatures_are_checked(material: Path) -> None:
    keyid = json.loads((material / "after" / "zoo.aot.dsse.json").read_text())["signatures"][0]["keyid"][:12]
    digest = Archive(material / "before" / "zoo.aot").sha256()[:12]
    words = ("--key", "../bob.pub.pem", "--base-key", "../ann.pub.pem")
    assert checked("verify", "zoo.aot", *words, cwd=material / "after").splitlines()[-3:] == [
        f"ok      base        added to once; the 14 members of the bundle {digest} are as they were",
        f"ok      first       the bundle {digest} is signed by {keyid}",
        "zoo.aot: verified",
    ]
    assert report(material, "bob", base="bob")[:2] == ("refused", "first")


def test_the_first_signature_says_nothing_of_an_addition(material: Path) -> None:
    assert report(material, "ann")[:2] == ("refused", "subjects")
    with pytest.raises(stagec.LoadError, match="another bundle was signed") as refusal:
        stagec.load(material / "after" / "zoo.aot", keys=[material / "ann.pub.pem"])
    assert refusal.value.code == "signature"


@pytest.mark.parametrize("name", ["", "eve"])
def test_an_addition_that_no_trusted_key_signed(folder: Path, name: str) -> None:
    (folder / "after" / "zoo.aot.2.dsse.json").unlink()
    if name:
        sign(folder / "after", name)
    keys = [folder / "ann.pub.pem", folder / "bob.pub.pem"]
    with pytest.raises(stagec.LoadError) as refusal:
        stagec.load(folder / "after" / "zoo.aot", keys=keys)
    assert refusal.value.code == "signature"
    assert report(folder, "ann", "bob")[0] == "refused"


def change_and_sign(folder: Path, edit: Callable[[dict[str, bytes]], object]) -> None:
    """Change the bundle with the addition, and let bob, who is trusted, sign that."""
    bundle = folder / "after" / "zoo.aot"
    edited(bundle, bundle, edit)
    archive, statement = Archive(bundle), json.loads((folder / "after" / "zoo.intoto.json").read_text())
    digests = {"zoo.aot": archive.sha256(), **subjects(archive)}
    statement["subject"] = [{"name": name, "digest": {"sha256": digest}} for name, digest in digests.items()]
    (folder / "after" / "zoo.intoto.json").write_text(json.dumps(statement))
    (folder / "after" / "zoo.aot.2.dsse.json").unlink()
    sign(folder / "after", "bob")


def again(members: dict[str, bytes], edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the index of a bundle, and compute the digests of members again."""
    reindexed(members, edit)


def test_an_old_member_that_an_addition_changed(folder: Path) -> None:
    def swap(members: dict[str, bytes]) -> None:
        members["loop.exported"] = b"another"
        again(members, lambda index: None)

    edited(folder / "after" / "zoo.aot", folder / "after" / "zoo.aot", swap)
    assert report(folder) == ("refused", "base", "an addition changed what was there: members.loop.exported.sha256")
    with pytest.raises(stagec.LoadError, match="changed what was there"):
        statement_of_addition(Archive(folder / "after" / "zoo.aot"), "0" * 64, [])


def test_an_old_executable_that_an_addition_took_away(folder: Path) -> None:
    def remove(index: dict[str, Any]) -> None:
        index["functions"]["loop"]["executables"] = index["functions"]["loop"]["executables"][1:]

    edited_index(folder / "after" / "zoo.aot", folder / "after" / "zoo.aot", remove)
    assert report(folder) == ("refused", "base", "an addition changed what was there: functions.loop.executables")


def without(index: dict[str, Any], before: dict[str, Any]) -> bytes:
    """The index of a bundle without the executables of this jaxlib, and with what each addition writes again."""
    index["functions"] = {name: dict(entry) for name, entry in index["functions"].items()}
    for function in index["functions"].values():
        function["executables"] = [row for row in function["executables"] if row["versions"]["jaxlib"] != HERE]
    index.pop("base")
    members = {name: entry for name, entry in index.pop("members").items() if name in before["members"]}
    written, _ = split({**index, "versions": before["versions"]}, {**members, FUNCTIONS: {}})
    return encode_index(written)


@pytest.mark.parametrize("chunk", range(4))
def test_an_addition_has_new_executables_and_nothing_else(material: Path, chunk: int) -> None:
    """Of any change that is taken, what is not of the new jaxlib is what was there, byte for byte."""
    archive, before = Archive(material / "after" / "zoo.aot"), Archive(material / "before" / "zoo.aot")
    members = {name: archive[name] for name in archive.index["members"]}
    assert without(dict(archive.index), dict(before.index)) == before.encoded_index
    whole = json.dumps(whole_index({INDEX: archive.encoded_index, **members})).encode()
    taken = []

    @settings(max_examples=250, deadline=None, database=None)
    @seed(chunk)
    @given(st.lists(mutations.of_json(whole), min_size=1, max_size=2))
    def check(changes: list[mutations.Change]) -> None:
        try:
            index = functools.reduce(lambda text, change: change(text), changes, whole)
            changed = Archive("x", encode(with_index(json.loads(index), members)))
            if not bases(changed):  # it says nothing of a bundle that it was added to
                return
        except (KeyError, IndexError, TypeError, AttributeError):  # the second change is of what the first removed
            return
        except stagec.LoadError:
            return
        taken.append(changed.encoded_index)
        assert without(dict(changed.index), dict(before.index)) == before.encoded_index

    check()
    assert taken


def exchanged(node: dict[str, Any]) -> dict[str, Any]:
    """The same keys and values in the opposite order."""
    return dict(reversed(node.items()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("in_tree", "changed what was there: functions.mlp.in_tree.tuple[0].tuple[0].dict (the order of its keys)"),
        ("targets", "changed what was there: targets (the order of its keys)"),
        ("bucket", "has executables of one new jaxlib: mlp had no executable for cpu, batch = 2"),
        ("two jaxlibs", f"has executables of one new jaxlib: it has those of {HERE}, 0.9.8"),
        ("none", "has executables of one new jaxlib: it has those of none"),
        ("more members", "changed what was there: members.more"),
    ],
)
def test_what_an_addition_may_not_have(folder: Path, change: str, said: str) -> None:
    """Not even where one who is trusted with additions signs it: a person trusts the first bundle for the rest."""

    digest = Archive(folder / "after" / "zoo.aot").sha256()

    def edit(index: dict[str, Any]) -> None:
        mlp = index["functions"]["mlp"]
        new = next(row for row in mlp["executables"] if row["versions"]["jaxlib"] == HERE)
        if change == "in_tree":
            params = mlp["in_tree"]["tuple"][0]["tuple"][0]
            params["dict"] = exchanged(params["dict"])
        elif change == "targets":
            index["targets"] = exchanged(index["targets"])
        elif change == "bucket":
            mlp["executables"].append({**new, "bucket": {"batch": 2}})
        elif change == "two jaxlibs":
            new["versions"]["jaxlib"] = "0.9.8"
        elif change == "none":
            index["base"] = {"index": "base/again.json", "functions": FUNCTIONS, "sha256": digest}
        for function in index["functions"].values():
            function["executables"].sort(key=order)

    def apply(members: dict[str, bytes]) -> None:
        if change == "more members":
            members["more"] = b"more"
        if change == "none":
            members["base/again.json"] = members[INDEX]
        again(members, edit)

    change_and_sign(folder, apply)
    assert report(folder, "bob", base="ann") == ("refused", "base", f"an addition {said}")


def test_a_jaxlib_that_the_first_bundle_serves(zoo: Path, tmp_path: Path) -> None:
    """Its machines run what the first signature covers, so no addition has one more executable for them."""
    bundle = write_bundle_of(zoo, tmp_path, "loop", "mlp")
    edited_descriptions(bundle, bundle, "loop", lambda d: d["versions"].update(jaxlib="0.9.9"))
    assert refused(bundle) == (
        f"it was built with executables of jaxlib {HERE}, and lacks some: an addition is of a new jaxlib\n"
        "  name it in the manifest for all targets, and build again\n"
    )
    stem = zoo.parent / "zoo.loop.cpu"
    parts = (Path(f"{stem}{suffix}").read_bytes() for suffix in (".xla", ".json", ".stablehlo.mlirbc"))
    members = extend(Archive(bundle), [Member(f"zoo.loop.cpu.jaxlib-{HERE}", *parts)])
    bundle.write_bytes(encode(members))
    with pytest.raises(stagec.LoadError, match=f"one new jaxlib: the first bundle has those of {HERE}"):
        bases(Archive(bundle))


def extended_by(archive: Archive, release: str) -> Archive:
    """A bundle with one more addition, which says that another jaxlib made what this one did."""
    members = {name: archive[name] for name in (INDEX, *archive.index["members"])}
    index = whole_index(members)
    base = {"index": f"base/{release}.json", "functions": f"base/{release}.jsonl"}
    members |= {base["index"]: members.pop(INDEX), base["functions"]: members.pop(FUNCTIONS)}
    for function in index["functions"].values():
        new = [row for row in function["executables"] if row["versions"]["jaxlib"] == HERE]
        function["executables"] += [{**row, "versions": {**row["versions"], "jaxlib": release}} for row in new]
        function["executables"].sort(key=order)
    index["base"] = {**base, "sha256": archive.sha256()}
    return Archive("x", encode(bundle_members(index, members)))


def test_many_additions_are_read_as_often_as_one(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may write a file of gigabytes with 64 additions."""
    archive, read = Archive(material / "after" / "zoo.aot"), RegularFile.read
    taken: list[int] = []
    monkeypatch.setattr(RegularFile, "read", lambda *words: taken.append(words[2]) or read(*words))

    def times(archive: Archive) -> float:
        path = tmp_path / "zoo.aot"
        path.write_bytes(encode({INDEX: archive.encoded_index, **{n: archive[n] for n in archive.index["members"]}}))
        taken.clear()
        verdict = verify(str(path), [])
        assert verdict["verdict"] == "intact", verdict
        return sum(taken) / path.stat().st_size

    once = times(archive)
    for release in ("0.9.1", "0.9.2", "0.9.3", "0.9.4"):
        archive = extended_by(archive, release)
    assert len(bases(archive)) == 5
    assert times(archive) < once + 0.5


def test_an_addition_to_another_bundle(folder: Path) -> None:
    """Its index is another one's, which has the same members: that was not signed by ann."""

    def other(members: dict[str, bytes]) -> None:
        base = json.loads(members[INDEX])["base"]
        old = base["index"]
        before = json.loads(members[old])
        before["versions"]["stagec"] = "0.0.9"
        text, lines = strict_json.line(before), members[base["functions"]]
        file = encode({INDEX: text, **{name: members[name] for name in before["members"]}, FUNCTIONS: lines})
        base |= {"index": f"base/{hashlib.sha256(text).hexdigest()}.json", "sha256": hashlib.sha256(file).hexdigest()}
        members[base["index"]] = text

        def edit(index: dict[str, Any]) -> None:
            index["base"] = base
            del members[old]

        again(members, edit)

    change_and_sign(folder, other)
    assert report(folder, "bob")[:2] == ("verified", "base")
    assert report(folder, "bob", base="ann")[:2] == ("refused", "first")


def test_an_addition_that_names_the_digest_of_another_file(folder: Path) -> None:
    def lie(members: dict[str, bytes]) -> None:
        again(members, lambda index: index["base"].update(sha256="0" * 64))

    change_and_sign(folder, lie)
    verdict, check, summary = report(folder, "bob")
    assert (verdict, check) == ("refused", "base")
    assert "the bundle that it was added to has the sha256 0000" in summary


@pytest.mark.parametrize("edit", ["cut off", "reordered", "twice"])
def test_a_broken_addition(folder: Path, edit: str) -> None:
    path = folder / "after" / "zoo.aot"

    def reorder(members: dict[str, bytes]) -> None:
        *others, (name, data) = members.items()
        first, *rest = others
        members.clear()
        members.update([first, (name, data), *rest])

    def twice(members: dict[str, bytes]) -> None:
        members["zz"] = members["loop.exported"]
        again(members, lambda index: None)

    if edit == "cut off":
        path.write_bytes(path.read_bytes()[:-4096])
    else:
        edited(path, path, reorder if edit == "reordered" else twice)
    assert report(folder, "bob")[0] == "refused"
    with pytest.raises(stagec.LoadError):
        stagec.load(path, keys=[folder / "bob.pub.pem"])


@pytest.mark.parametrize("key", ["index", "functions"])
def test_a_base_that_is_no_member(folder: Path, key: str) -> None:
    path = folder / "x.aot"
    edited_index(folder / "after" / "zoo.aot", path, lambda index: index["base"].update({key: "none"}))
    with pytest.raises(stagec.LoadError, match=rf"base\.{key}: there is no member 'none'"):
        Archive(path)
    edited_index(folder / "after" / "zoo.aot", path, lambda index: index["base"].update({key: "loop.exported"}))
    with pytest.raises(stagec.LoadError) as refusal:
        bases(Archive(path))
    assert refusal.value.code in ("format", "digest")


def refused(bundle: Path, *words: str | Path) -> str:
    done = command("add-jaxlib", bundle, "--output", bundle.with_name("out.aot"), *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert not bundle.with_name("out.aot").exists()
    return done.stderr.replace(f"{bundle}: ", "")


def test_refusals(folder: Path) -> None:
    before, after = (folder / name / "zoo.aot" for name in ("before", "after"))
    assert refused(after) == f"it has the executables of jaxlib {HERE} already\n"
    assert refused(before, "--target", "cpus") == "no target 'cpus'\n  did you mean \"cpu\"?\n"
    assert "0 of 1 keys signed it, 1 must" in refused(before, "--key", folder / "eve.pub.pem")


def test_an_artifact_past_its_promise(folder: Path) -> None:
    day = datetime.date.fromisoformat(releases.release(HERE).day) - datetime.timedelta(days=1)
    versions = {"jax": "0.9.9", "jaxlib": "0.9.9", "stagec": "0.1.0"}
    old = made_by_another(folder / "before" / "zoo.aot", folder / "old.aot", readable_until=str(day), versions=versions)
    promise = f"JAX promises that releases until {day} read it, and jaxlib {HERE} is of {releases.release(HERE).day}"
    assert refused(old) == "".join(
        f"{name}: {promise}\n  build the bundle again, with a newer jax in its lock\n" for name in ("loop", "mlp")
    )


def test_what_the_bundle_does_not_have(folder: Path) -> None:
    """A profile that XLA optimized by is a file; what JAX lowered for a device is another module than the export."""
    before = folder / "before" / "zoo.aot"
    profiled = edited_descriptions(
        before, folder / "x.aot", "loop", lambda d: d["target"]["compiler_options"].update(fdo_profile="0" * 64)
    )
    assert refused(profiled) == (
        "loop.cpu: it was compiled with a file that the bundle does not have: fdo_profile\n"
        "  name the targets that can be compiled: --target NAME\n"
    )
    other = edited_descriptions(
        before, folder / "y.aot", "loop", lambda d: d["components"]["source of loop"].update(sha256="0" * 64)
    )
    assert refused(other) == (
        f"loop.cpu.jaxlib-{HERE}: made of what is in the bundle, it is another program than the one for jaxlib 0.9.9\n"
        "  source of loop differ; name the targets that can be compiled: --target NAME\n"
    )


@needs_registry
@pytest.mark.parametrize("container", [(), ("--container",)], ids=["model", "container"])
def test_a_registry_keeps_what_was_said_of_the_first(folder: Path, tmp_path: Path, container: tuple[str, ...]) -> None:
    """The flow of docs/fleet.md, with a registry between: both signatures are there, and a second pull keeps them."""
    (data := tmp_path / "registry").mkdir()
    registry, after = Registry(data), folder / "after"
    image, pulled = f"{registry.host}/zoo:1", tmp_path / "pulled"
    try:
        about: list[str | Path] = ["--signature", after / "zoo.aot.dsse.json"]
        about += ["--signature", after / "zoo.aot.2.dsse.json"]
        about += ["--statement", after / "zoo.intoto.json", "--statement", folder / "before" / "zoo.intoto.json"]
        about += ["--sbom", after / "zoo.sbom.json"]
        checked("push", after / "zoo.aot", image, "--plain-http", *about, *container)
        for _ in range(2):
            told = json.loads(checked("pull", image, pulled, "--plain-http", "--json"))
            assert sorted(told["files"]) == [
                "zoo.2.intoto.json",
                "zoo.aot",
                "zoo.aot.2.dsse.json",
                "zoo.aot.dsse.json",
                "zoo.intoto.json",
                "zoo.sbom.json",
            ]
            assert (told["left_out"], told["removed"], told["missing"]) == ({}, [], [])
        words = ("--key", folder / "bob.pub.pem", "--base-key", folder / "ann.pub.pem")
        assert checked("verify", pulled / "zoo.aot", *words).endswith("zoo.aot: verified\n")
        # What is of another bundle stays out, as before.
        (other := tmp_path / "other").mkdir()
        shutil.copy(folder / "before" / "zoo.aot", other)
        done = command("push", other / "zoo.aot", image, "--plain-http", "--signature", after / "zoo.aot.2.dsse.json")
        assert (done.returncode, "another bundle was signed" in done.stderr) == (2, True)
    finally:
        registry.close()


def test_what_is_said_of_a_trial_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line of a traceback, and the bundle's own path."""
    archive = SimpleNamespace(path="m.aot")
    wanted = SimpleNamespace(
        name="f", artifact="f", like=SimpleNamespace(target=SimpleNamespace(name="cpu"), bucket={})
    )
    trials = (
        (0, "", "a warning", ""),
        (1, "", "Traceback:\n  File x\nXlaError: no\n", "XlaError: no"),
        (1, "scratch/crossed.aot: it is another\nor so\n", "a warning", "m.aot: it is another\nor so"),
        (-6, "", "", "it ended the process (SIGABRT)"),
        (-9, "", "", "its trial cannot run here: it ended the process (SIGKILL)"),
        (2, "", "scratch/crossed.aot: no\nmemory", "its trial cannot run here: m.aot: no\nmemory"),
    )
    for status, stdout, stderr, told in trials:
        done = subprocess.CompletedProcess([], status, stdout, stderr)
        monkeypatch.setattr(adding, "_run", lambda *_, done=done: done)
        try:
            said = adding._differs(archive, wanted, Path("scratch"), ".")  # type: ignore[arg-type]
        except StagecError as error:
            said = error.problems[0].what
        assert said == told
    monkeypatch.undo()
    monkeypatch.setattr(actions, "command", lambda: ["printf", "\\377"])
    assert adding._run([], Path()).stdout == "\N{REPLACEMENT CHARACTER}"
