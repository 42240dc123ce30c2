"""Adding executables of another jaxlib to a bundle that was released and signed.

The bundle says that jaxlib 0.9.9 made it, so what this jaxlib adds must be what it made in the first place.

Modules: `bundle/additions.py`, `cli/add_jaxlib.py`, `reports/adding.py`.
"""

import datetime
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxlib
import numpy as np
import pytest

import stagec
from stagec.bundle import expiry
from stagec.bundle.additions import bases
from stagec.bundle.archive import INDEX, Archive, encode, encode_index, members_table, pieces
from stagec.bundle.provenance import statement_of_addition
from stagec.bundle.verification import verify
from tests.building import checked, stagec as command
from tests.bundles import edited, edited_descriptions, edited_index
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
    write_provenance(bundle)
    checked("sign", "zoo.aot", "--statement", "zoo.intoto.json", "--key", "../ann.pem", cwd=before)
    after.mkdir()
    shutil.copy(before / "zoo.aot.dsse.json", after)
    words = ("--output", "zoo.aot", "--statement", "zoo.intoto.json", "--sbom", "zoo.sbom.json")
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
    assert before.index["members"].items() <= after.index["members"].items()
    assert (before.index["format"], after.index["format"]) == (3, 6)
    (base,) = bases(after)
    assert base.index == before.index
    assert b"".join(pieces(base.members())) == (material / "before" / "zoo.aot").read_bytes()


def test_what_is_added_is_what_a_build_makes(material: Path, zoo: Path) -> None:
    """Its executable and StableHLO are those that are there, so only the description is another member."""
    before, after = Archive(material / "before" / "zoo.aot"), Archive(material / "after" / "zoo.aot")
    more = after.index["members"].keys() - before.index["members"].keys() - {after.index["base"]["index"]}
    stems = ("loop.cpu", "mlp.cpu.batch1", "mlp.cpu.batch4")
    assert more == {f"{stem}.jaxlib-{HERE}.json" for stem in stems}
    for stem in stems:
        assert after[f"{stem}.jaxlib-{HERE}.json"] == (zoo.parent / f"zoo.{stem}.json").read_bytes()


def test_the_same_bytes_twice(material: Path, tmp_path: Path) -> None:
    told = json.loads(checked("add-jaxlib", material / "before" / "zoo.aot", "--output", tmp_path / "x.aot", "--json"))
    assert (tmp_path / "x.aot").read_bytes() == (material / "after" / "zoo.aot").read_bytes()
    assert told["jaxlib"] == HERE
    assert told["sha256"] == hashlib.sha256((tmp_path / "x.aot").read_bytes()).hexdigest()


def test_it_runs_without_compiling(material: Path) -> None:
    with pytest.raises(stagec.LoadError, match="0\\.9\\.9") as refusal:
        stagec.load(material / "before" / "zoo.aot", policy="executable_only")
    assert refusal.value.code == "jaxlib-version"
    loaded = stagec.load(material / "after" / "zoo.aot", policy="executable_only", keys=[material / "bob.pub.pem"])
    assert len(loaded["loop"](X)) == 2


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
        f"ok      base        added to once; the 13 members of the bundle {digest} are as they were",
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
    archive = Archive(bundle)
    statement = statement_of_addition(archive, archive.sha256(), [])
    (folder / "after" / "zoo.intoto.json").write_text(statement)
    (folder / "after" / "zoo.aot.2.dsse.json").unlink()
    sign(folder / "after", "bob")


def again(members: dict[str, bytes], edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the index of a bundle, and compute the digests of members again."""
    index = json.loads(members[INDEX])
    edit(index)
    index["members"] = members_table({name: data for name, data in members.items() if name != INDEX})
    members[INDEX] = encode_index(index)


def test_an_old_member_that_an_addition_changed(folder: Path) -> None:
    def swap(members: dict[str, bytes]) -> None:
        members["loop.exported"] = b"another"
        again(members, lambda index: None)

    edited(folder / "after" / "zoo.aot", folder / "after" / "zoo.aot", swap)
    assert report(folder) == ("refused", "base", "an addition changed what was there: members.loop.exported")
    with pytest.raises(stagec.LoadError, match="changed what was there"):
        change_and_sign(folder, lambda members: None)


def test_an_old_executable_that_an_addition_took_away(folder: Path) -> None:
    def remove(members: dict[str, bytes]) -> None:
        index = json.loads(members[INDEX])
        index["functions"]["loop"]["executables"] = index["functions"]["loop"]["executables"][1:]
        members[INDEX] = encode_index(index)

    edited(folder / "after" / "zoo.aot", folder / "after" / "zoo.aot", remove)
    assert report(folder) == ("refused", "base", "an addition changed what was there: functions.loop.executables")


def test_an_addition_to_another_bundle(folder: Path) -> None:
    """Its index is another one's, which has the same members: that was not signed by ann."""

    def other(members: dict[str, bytes]) -> None:
        name = json.loads(members[INDEX])["base"]["index"]
        before = json.loads(members.pop(name))
        before["versions"]["stagec"] = "0.0.9"
        text = encode_index(before)
        listed = before["members"]
        file = encode({INDEX: text, **{name: members[name] for name in listed}})
        name = f"base/{hashlib.sha256(text).hexdigest()}.json"
        members[name] = text
        again(members, lambda index: index.update(base={"index": name, "sha256": hashlib.sha256(file).hexdigest()}))
        rest = dict(sorted((key, value) for key, value in members.items() if key != INDEX))
        first = members[INDEX]
        members.clear()
        members.update({INDEX: first, **rest})

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


def test_an_index_with_too_many_additions_or_none(folder: Path) -> None:
    """A base is of the format that may have it, and a member."""
    path = folder / "x.aot"
    edited_index(folder / "after" / "zoo.aot", path, lambda index: index["base"].update(index="none"))
    with pytest.raises(stagec.LoadError, match=r"base\.index: there is no member 'none'"):
        Archive(path)
    base = {"index": "loop.exported", "sha256": "0" * 64}
    edited_index(folder / "before" / "zoo.aot", path, lambda index: index.update(base=base))
    with pytest.raises(stagec.LoadError, match=r"index\.json: base: only format 6 has this key"):
        Archive(path)


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
    day = datetime.date.fromisoformat(expiry.RELEASED[HERE]) - datetime.timedelta(days=1)
    versions = {"jax": "0.9.9", "jaxlib": "0.9.9", "stagec": "0.1.0"}
    old = made_by_another(folder / "before" / "zoo.aot", folder / "old.aot", readable_until=str(day), versions=versions)
    promise = f"JAX promises that releases until {day} read it, and jaxlib {HERE} is of {expiry.RELEASED[HERE]}"
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
