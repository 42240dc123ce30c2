"""OpenSSF's Model Signing: its package verifies what we sign, and we verify what it signs.

Modules: `trust/keys.py`.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

import stagec
from stagec.core.data.reading import RegularFile
from stagec.trust.dsse import Envelope
from tests.building import ROOT, checked, stagec as command
from tests.signed import CURVES, write_bundle_of, write_curve, write_keys, write_provenance


@pytest.fixture
def release(zoo: Path, tmp_path: Path) -> Path:
    """A folder with a bundle, its statement and its SBOM, and with what does not belong to a release outside."""
    folder = tmp_path / "release"
    folder.mkdir()
    bundle = write_bundle_of(zoo, folder, "loop")
    write_provenance(bundle)
    for name in ("packages.json", "zoo.toml", "model.py", "spec.json"):
        (folder / name).unlink()
    return bundle


@pytest.mark.parametrize("curve", CURVES)
def test_the_package_verifies_what_we_sign_and_we_verify_what_it_signs(
    release: Path, tmp_path: Path, curve: str
) -> None:
    signing = pytest.importorskip("model_signing.signing")
    verifying = pytest.importorskip("model_signing.verifying")
    private, public = write_curve(tmp_path, "key", CURVES[curve])

    # Ours.
    checked("sign", release, "--model-signing", "--key", private)
    ours = Path(f"{release}.sig")
    verifier = verifying.Config().use_elliptic_key_verifier(public_key=public)
    verifier.verify(release.parent, ours)
    checked("verify", release, "--key", public, "--signature", ours)
    stagec.load(release, keys=[public], signature=ours).close()
    whole = release.read_bytes()
    release.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="Signature mismatch"):
        verifier.verify(release.parent, ours)
    release.write_bytes(whole)

    # Theirs, of the folder and of the file alone.
    for model in (release.parent, release):
        theirs = tmp_path / "model.sig"
        signing.Config().use_elliptic_key_signer(private_key=private).sign(model, theirs)
        verified = checked("verify", release, "--key", public, "--signature", theirs)
        assert "ok      signatures  1 of 1 keys signed, 1 must: " in verified


def test_a_file_is_hashed_once_for_all_signatures(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may put copies of one signature beside a file of gigabytes."""
    private, public = write_curve(tmp_path, "key", CURVES["P-256"])
    checked("sign", release, "--model-signing", "--key", private)
    copies = [tmp_path / f"{number}.sig" for number in range(20)]
    for path in copies:
        shutil.copy(f"{release}.sig", path)
    taken, read = [0], RegularFile.read

    def reading(file: RegularFile, start: int, size: int) -> bytes:
        taken[0] += size
        return read(file, start, size)

    monkeypatch.setattr(RegularFile, "read", reading)
    signatures = sum(path.stat().st_size for path in copies)
    stagec.load(release, keys=[public], signature=copies).close()
    assert release.stat().st_size < taken[0] - signatures < 2 * release.stat().st_size


@pytest.mark.parametrize("curve", CURVES)
def test_statements_are_signed_on_curves_too(release: Path, tmp_path: Path, curve: str) -> None:
    private, public = write_curve(tmp_path, "key", CURVES[curve])
    statement = release.with_suffix(".intoto.json")
    checked("sign", release, "--statement", statement, "--key", private)
    ed, ed_public = write_keys(tmp_path, "ed")
    checked("sign", release, "--statement", statement, "--key", ed)
    checked("verify", release, "--key", public, "--key", ed_public, "--threshold", "2")
    stagec.load(release, keys=[public, ed_public], threshold=2).close()


def test_a_curve_that_nobody_uses(release: Path, tmp_path: Path) -> None:
    private, public = write_curve(tmp_path, "key", ec.SECP256K1())
    kinds = "Ed25519 or ECDSA (P-256, P-384, P-521)"
    done = command("sign", release, "--model-signing", "--key", private)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, f"{private}: not a private key in PEM, {kinds}")
    done = command("verify", release, "--key", public)
    assert (done.returncode, done.stderr.startswith(f"{public}: not a public key in PEM, {kinds}")) == (2, True)


def test_model_signing_takes_no_ed25519(release: Path, tmp_path: Path) -> None:
    private, _ = write_keys(tmp_path, "ed")
    done = command("sign", release, "--model-signing", "--key", private)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{private}: Model Signing takes ECDSA keys: openssl genpkey")
    assert not Path(f"{release}.sig").exists()


def test_a_signature_of_other_files(release: Path, zoo: Path, tmp_path: Path) -> None:
    private, public = write_curve(tmp_path, "key", CURVES["P-256"])
    checked("sign", release, "--model-signing", "--key", private, "--output", tmp_path / "x.sig")
    write_bundle_of(zoo, release.parent, "loop", version="2")
    done = command("verify", release, "--key", public, "--signature", tmp_path / "x.sig")
    assert done.returncode == 1
    assert "FAILED  subjects    " in done.stdout
    assert "another model was signed: no file of it has the sha256 " in done.stdout


def _shards(statement: dict[str, Any]) -> None:
    statement["predicate"]["serialization"]["method"] = "shards"


def test_a_statement_of_another_method(release: Path, tmp_path: Path) -> None:
    from stagec.trust import dsse, keys

    private, public = write_curve(tmp_path, "key", CURVES["P-256"])
    checked("sign", release, "--model-signing", "--key", private, "--output", tmp_path / "x.sig")
    statement = json.loads(Envelope.read(tmp_path / "x.sig").payload)
    _shards(statement)
    key = keys.private_key("key", private.read_bytes(), bytes)
    (tmp_path / "y.sig").write_text(dsse.sign(json.dumps(statement).encode(), key).to_json())
    done = command("verify", release, "--key", public, "--signature", tmp_path / "y.sig")
    assert done.returncode == 1
    assert 'predicate.serialization.method: expected "files", not "shards"' in done.stdout


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_makes_the_keys(release: Path, tmp_path: Path) -> None:
    words = ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", "key.pem"]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    subprocess.run(["openssl", "pkey", "-in", "key.pem", "-pubout", "-out", "pub.pem"], cwd=tmp_path, check=True)
    checked("sign", release, "--model-signing", "--key", tmp_path / "key.pem")
    checked("verify", release, "--key", tmp_path / "pub.pem", "--signature", f"{release}.sig")


def test_keys_are_counted_over_statements_of_several_builders(release: Path, zoo: Path, tmp_path: Path) -> None:
    """Each builder has an environment and so a statement of its own, about the same bundle."""
    (a, a_public), (b, b_public) = write_keys(tmp_path, "a"), write_keys(tmp_path, "b")
    first = release.with_suffix(".intoto.json")
    second = tmp_path / "second.intoto.json"
    second.write_text(first.read_text().replace("3.11.2", "3.12.1"))
    checked("sign", release, "--statement", first, "--key", a)
    both = ("--key", a_public, "--key", b_public, "--threshold", "2")
    done = command("verify", release, *both)
    assert done.returncode == 1
    assert "1 of 2 keys signed it, 2 must" in done.stdout
    checked("sign", release, "--statement", second, "--key", b, "--output", f"{release}.2.dsse.json")
    assert "2 of 2 keys signed, 2 must" in checked("verify", release, *both)  # both lie beside the bundle
    given = ("--signature", f"{release}.dsse.json", "--signature", f"{release}.2.dsse.json")
    checked("verify", release, *both, *given)
    stagec.load(release, keys=[a_public, b_public], threshold=2).close()
    # The same key counts once, however many statements it signed.
    checked("sign", release, "--statement", second, "--key", a, "--output", tmp_path / "again.dsse.json")
    again = ("--signature", f"{release}.dsse.json", "--signature", tmp_path / "again.dsse.json")
    assert command("verify", release, *both, *again).returncode == 1
    # A statement about another bundle does not count for this one, whatever else is signed.
    other = write_bundle_of(zoo, tmp_path, "loop", version="2")
    statement, _ = write_provenance(other)
    checked("sign", other, "--statement", statement, "--key", b, "--output", tmp_path / "other.dsse.json")
    mixed = ("--signature", f"{release}.dsse.json", "--signature", tmp_path / "other.dsse.json")
    done = command("verify", release, *both, *mixed)
    assert done.returncode == 1
    assert "other.dsse.json: another bundle was signed: index.json differs" in done.stdout


def test_the_name_that_was_signed_counts(release: Path, tmp_path: Path) -> None:
    """What was published as experimental.aot is not what was published as zoo.aot."""
    signing = pytest.importorskip("model_signing.signing")
    private, public = write_curve(tmp_path, "key", CURVES["P-256"])
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    for name in ("experimental.aot", "sub/zoo.aot"):
        shutil.copy(release, model / name)
    (model / "zoo.aot").write_bytes(b"another")
    signing.Config().use_elliptic_key_signer(private_key=private).sign(model, tmp_path / "model.sig")
    given = ("--key", public, "--signature", tmp_path / "model.sig")
    for name in ("experimental.aot", "sub/zoo.aot"):
        checked("verify", model / name, *given)
    (model / "experimental.aot").rename(model / "zoo.aot")
    done = command("verify", model / "zoo.aot", *given)
    assert done.returncode == 1
    assert f"another name was signed: {model}/zoo.aot was signed as experimental.aot; give it that name" in done.stdout
    with pytest.raises(stagec.LoadError, match="another name was signed"):
        stagec.load(model / "zoo.aot", keys=[public], signature=tmp_path / "model.sig")


def test_an_envelope_beside_it_takes_nothing_away(release: Path, zoo: Path, tmp_path: Path) -> None:
    """Anybody may put one there: rubbish, of another bundle, one that nobody trusts."""
    (a, a_public), (b, b_public) = write_keys(tmp_path, "a"), write_keys(tmp_path, "b")
    other = write_bundle_of(zoo, tmp_path, "loop", version="2")
    statement, _ = write_provenance(other)
    checked("sign", other, "--statement", statement, "--key", a, "--output", f"{release}.dsse.json")
    Path(f"{release}.2.dsse.json").write_text("rubbish")
    Path(f"{release}.3.dsse.json").symlink_to("nowhere")
    one = ("--key", a_public, "--key", b_public)
    done = command("verify", release, *one)
    assert done.returncode == 1
    assert f"{release.name}.dsse.json: another bundle was signed: index.json differs" in done.stdout
    assert f"{release.name}.2.dsse.json: not a DSSE envelope" in done.stdout
    own = release.with_suffix(".intoto.json")
    checked("sign", release, "--statement", own, "--key", b, "--output", f"{release}.5.dsse.json")
    assert "1 of 2 keys signed, 1 must" in checked("verify", release, *one)
    stagec.load(release, keys=[a_public, b_public]).close()
    # The key of the other bundle's envelope does not count for this one.
    assert command("verify", release, *one, "--threshold", "2").returncode == 1
    with pytest.raises(stagec.LoadError, match="1 of 2 keys signed it, 2 must"):
        stagec.load(release, keys=[a_public, b_public], threshold=2)


def test_the_command_of_the_page(release: Path, tmp_path: Path) -> None:
    """docs/releases.md, in the folder of the release: the package's own command verifies what we signed."""
    pytest.importorskip("model_signing.verifying")
    page = (ROOT / "docs" / "releases.md").read_text()
    section = page.partition("\n## Model Signing\n")[2].partition("```sh\n")[2].partition("```")[0]
    (release.parent / "models.aot").write_bytes(release.read_bytes())
    for file in (release, release.with_suffix(".intoto.json"), release.with_suffix(".sbom.json")):
        file.unlink()
    lines = section.replace("release-ec", f"{tmp_path}/release-ec").splitlines()
    assert [line.split()[0] for line in lines] == ["openssl", "openssl", "stagec", "model_signing"]
    for line in lines:
        words = line.split()
        if words[0] == "stagec":
            checked(*words[1:], cwd=release.parent)
            continue
        program = [sys.executable, "-m"] if words[0] == "model_signing" else []
        done = subprocess.run([*program, *words], cwd=release.parent, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "Verification succeeded" in done.stdout
