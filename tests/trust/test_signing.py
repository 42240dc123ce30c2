"""Signing bundles, and verifying them.

Modules: `trust/dsse.py`, `trust/keys.py`, `trust/verification.py`, `cli/sign.py`, `cli/verify.py`.
"""

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from stagec.bundle import archive
from stagec.bundle.archive import Archive
from stagec.core.data import strict_json
from stagec.trust.dsse import PAYLOAD_TYPE, Envelope, pae
from stagec.trust.verification import verify
from tests.building import COMPILER, ROOT, checked, stagec
from tests.signed import write_bundle_of, write_keys, write_provenance

ENVELOPE = '{"payload": "", "payloadType": "application/vnd.in-toto+json"'
KINDS = "Ed25519 or ECDSA (P-256, P-384, P-521)"
SIGNATURE = '{"keyid": "", "sig": ""}'


@pytest.fixture(scope="module")
def material(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bundle, its statement, the keys of ann, bob and eve, and an envelope that ann and bob signed."""
    folder = tmp_path_factory.mktemp("signing")
    bundle = write_bundle_of(zoo, folder, "loop")
    write_provenance(bundle)
    for name in ("ann", "bob", "eve"):
        write_keys(folder, name)
    for name in ("ann", "bob"):
        checked("sign", "zoo.aot", "--statement", "zoo.intoto.json", "--key", f"{name}.pem", cwd=folder)
    return folder


@pytest.fixture
def folder(material: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(material, tmp_path / "copy"))


def failed(folder: Path, *keys: str, threshold: int = 1) -> tuple[str, str]:
    """The check that fails and what it tells."""
    report = verify(str(folder / "zoo.aot"), [str(folder / f"{key}.pub.pem") for key in keys], threshold)
    assert report["verdict"] == "refused"
    last = report["checks"][-1]
    assert not last["ok"]
    return last["check"], last["summary"].replace(str(folder), "")


def verified(folder: Path, *keys: str, threshold: int = 1) -> bool:
    report = verify(str(folder / "zoo.aot"), [str(folder / f"{key}.pub.pem") for key in keys], threshold)
    return bool(report["verdict"] == "verified")


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit the envelope."""
    path = folder / "zoo.aot.dsse.json"
    envelope = json.loads(path.read_text())
    change(envelope)
    path.write_text(json.dumps(envelope))


def test_what_is_signed_is_encoded_as_dsse_says() -> None:
    # The example of https://github.com/secure-systems-lab/dsse/blob/master/protocol.md
    assert pae("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


def test_the_envelope_has_the_statement_and_both_signatures(material: Path) -> None:
    envelope = json.loads((material / "zoo.aot.dsse.json").read_text())
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    assert base64.b64decode(envelope["payload"]) == (material / "zoo.intoto.json").read_bytes()
    assert [len(base64.b64decode(one["sig"])) for one in envelope["signatures"]] == [64, 64]
    assert len({one["keyid"] for one in envelope["signatures"]}) == 2


def test_verify_tells_of_each_check(material: Path) -> None:
    keys = [word for name in ("ann", "bob", "eve") for word in ("--key", f"{name}.pub.pem")]
    text = checked("verify", "zoo.aot", *keys, "--threshold", "2", cwd=material)
    keyids = [one["keyid"][:12] for one in json.loads((material / "zoo.aot.dsse.json").read_text())["signatures"]]
    assert text == (
        f"ok      signatures  2 of 3 keys signed, 2 must: {keyids[0]}, {keyids[1]}\n"
        "ok      container   6 members, each with the digest that the index says\n"
        "ok      subjects    signed were this file and its 6 members\n"
        "zoo.aot: verified\n"
    )


UNSIGNED = "An unsigned bundle is code from the person who gave it to you."


def test_without_a_key_a_bundle_is_intact_and_not_verified(folder: Path, zoo: Path) -> None:
    # What an attacker makes: another program, all digests computed again, and the envelope of the first one beside it.
    write_bundle_of(zoo, folder, "mlp")
    done = stagec("verify", "zoo.aot", cwd=folder)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == (
        "ok      container   9 members, each with the digest that the index says\n"
        f"zoo.aot: intact, and no signature was checked. {UNSIGNED}\n"
    )
    done = stagec("verify", "zoo.aot", "--json", cwd=folder)
    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"]) == (3, "intact")
    assert [one["check"] for one in report["checks"]] == ["container"]
    signed = stagec("verify", "zoo.aot", "--json", "--key", "ann.pub.pem", cwd=folder)
    assert (signed.returncode, json.loads(signed.stdout)["verdict"]) == (1, "refused")


@pytest.mark.parametrize("page", ["README.md", "docs/loading.md", "docs/bundle-format.md", "docs/security.md"])
def test_what_an_unsigned_bundle_is_the_same_words_say_everywhere(page: str) -> None:
    assert UNSIGNED in " ".join((ROOT / page).read_text("utf-8").split())


def test_a_key_that_did_not_sign(material: Path) -> None:
    done = stagec("verify", "zoo.aot", "--key", "eve.pub.pem", cwd=material)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        "FAILED  signatures  zoo.aot.dsse.json: 0 of 1 keys signed it, 1 must",
        "zoo.aot: do not use it",
    ]


def test_a_key_counts_once(folder: Path) -> None:
    edit(folder, lambda envelope: envelope["signatures"].append(envelope["signatures"][0]))
    assert failed(folder, "ann", "eve", threshold=2) == (
        "signatures",
        "/zoo.aot.dsse.json: 1 of 2 keys signed it, 2 must",
    )
    assert verified(folder, "ann")


def test_a_keyid_is_trusted_for_nothing(folder: Path) -> None:
    def swap(envelope: dict[str, Any]) -> None:
        ann, bob = envelope["signatures"]
        ann["keyid"], bob["keyid"] = bob["keyid"], "eve"

    edit(folder, swap)
    assert verified(folder, "ann", "bob", threshold=2)


def test_base64_for_urls_is_read_too(folder: Path) -> None:
    def other(envelope: dict[str, Any]) -> None:
        envelope["payload"] = base64.urlsafe_b64encode(base64.b64decode(envelope["payload"])).decode()
        for one in envelope["signatures"]:
            one["sig"] = base64.urlsafe_b64encode(base64.b64decode(one["sig"])).decode()

    edit(folder, other)
    assert verified(folder, "ann")


def test_a_statement_that_was_changed(folder: Path) -> None:
    def change(envelope: dict[str, Any]) -> None:
        payload = base64.b64decode(envelope["payload"]).replace(b"3.11.2", b"3.11.3")
        envelope["payload"] = base64.b64encode(payload).decode()

    edit(folder, change)
    assert failed(folder, "ann")[0] == "signatures"


def test_the_envelope_of_another_bundle(folder: Path, zoo: Path) -> None:
    write_bundle_of(zoo, folder, "loop", version="2")
    check, told = failed(folder, "ann")
    assert (check, told) == (
        "subjects",
        "/zoo.aot.dsse.json: another bundle was signed: index.json differs",
    )


def test_a_member_more_than_was_signed(folder: Path, zoo: Path) -> None:
    write_bundle_of(zoo, folder, "loop", "mlp")
    assert failed(folder, "ann")[0] == "subjects"


def test_a_damaged_bundle(folder: Path) -> None:
    data = bytearray((folder / "zoo.aot").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "zoo.aot").write_bytes(data)
    assert failed(folder, "ann")[0] == "container"


def test_a_bundle_without_a_signature(folder: Path) -> None:
    (folder / "zoo.aot.dsse.json").unlink()
    assert failed(folder, "ann") == (
        "signatures",
        "/zoo.aot.dsse.json: no such file: the bundle has no signature",
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[]", "expected an object, not []"),
        (
            '{"payload": "", "payloadType": "text/plain", "signatures": []}',
            'payloadType: expected "application/vnd.in-toto+json", not "text/plain"',
        ),
        ('{"payload": "", "payload": ""}', "the key 'payload' appears twice"),
        ('{"payloadType": "application/vnd.in-toto+json", "signatures": []}', "the key 'payload' is missing"),
        (f'{ENVELOPE}, "signatures": [{{}}]}}', "signatures[0]: the key 'sig' is missing"),
        (f'{ENVELOPE}, "signatures": [{{"sig": null}}]}}', "signatures[0].sig: expected a string, not null"),
        (
            f'{ENVELOPE}, "signatures": [{{"sig": "A"}}]}}',
            "Invalid base64-encoded string",
        ),
        (f'{ENVELOPE}, "signatures": [{", ".join(33 * [SIGNATURE])}]}}', "33 signatures are over the limit of 32"),
        (f'{ENVELOPE}, "signatures": [{", ".join(400 * [SIGNATURE])}]}}', "it has more than 1,000 values"),
        ("NaN", "the number NaN is not finite"),
    ],
)
def test_a_file_that_is_no_envelope(folder: Path, text: str, what: str) -> None:
    (folder / "zoo.aot.dsse.json").write_text(text)
    check, told = failed(folder, "ann")
    assert (check, told.partition(": number of")[0]) == (
        "signatures",
        f"/zoo.aot.dsse.json: not a DSSE envelope: {what}",
    )


def test_a_bundle_that_is_not_there(material: Path) -> None:
    done = stagec("verify", "none.aot", "--key", "ann.pub.pem", cwd=material)
    assert (done.returncode, done.stderr) == (2, "none.aot: no such file\n")


def test_a_threshold_that_cannot_be_met(material: Path) -> None:
    same = [word for _ in range(2) for word in ("--key", "ann.pub.pem")]
    done = stagec("verify", "zoo.aot", *same, "--threshold", "2", cwd=material)
    assert (done.returncode, done.stderr) == (2, "2 signatures cannot come from 1 different keys\n")


@pytest.mark.parametrize("option", [["--require-signature"], ["--signature", "x"], ["--threshold", "2"]])
def test_options_of_signatures_take_a_key(material: Path, option: list[str]) -> None:
    done = stagec("verify", "zoo.aot", *option, cwd=material)
    message = f"{option[0]}: no key is given\n  say which keys are trusted: --key PUBLIC.pem\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_a_file_that_is_no_key(folder: Path) -> None:
    for key in ("zoo.toml", "ann.pem"):  # the second is the private half
        done = stagec("verify", "zoo.aot", "--key", key, cwd=folder)
        message = f"{key}: not a public key in PEM, {KINDS}; openssl pkey -pubout writes one\n"
        assert (done.returncode, done.stderr) == (2, message)
    for key in ("zoo.toml", "ann.pub.pem"):
        done = stagec("sign", "zoo.aot", "--statement", "zoo.intoto.json", "--key", key, cwd=folder)
        message = f"{key}: not a private key in PEM, {KINDS}\n  openssl genpkey -algorithm ed25519 writes one\n"
        assert (done.returncode, done.stderr) == (2, message)


def test_signing_what_is_not_the_bundle(folder: Path, zoo: Path) -> None:
    write_bundle_of(zoo, folder, "loop", version="2")
    before = (folder / "zoo.aot.dsse.json").read_bytes()
    arguments = ("sign", "zoo.aot", "--statement", "zoo.intoto.json", "--key", "eve.pem")
    done = stagec(*arguments, cwd=folder)
    message = "zoo.intoto.json: another bundle was signed: zoo.aot and 1 more differs\n"
    assert (done.returncode, done.stderr) == (2, message)
    assert (folder / "zoo.aot.dsse.json").read_bytes() == before
    write_provenance(folder / "zoo.aot")
    done = stagec(*arguments, cwd=folder)
    message = "zoo.aot.dsse.json: it signs a different statement\n  remove it, or name another --output\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_a_file_with_two_keys(folder: Path) -> None:
    """The second would be ignored: a threshold of two would be met by the owner of one, or never."""
    for kind in ("pub.pem", "pem"):
        two = (folder / f"ann.{kind}").read_bytes() + (folder / f"bob.{kind}").read_bytes()
        (folder / f"two.{kind}").write_bytes(two)
    done = stagec("verify", "zoo.aot", "--key", "two.pub.pem", cwd=folder)
    message = "two.pub.pem: it has 2 keys; give each a file, and name all of them\n"
    assert (done.returncode, done.stderr) == (2, message)
    done = stagec("sign", "zoo.aot", "--statement", "zoo.intoto.json", "--key", "two.pem", cwd=folder)
    assert (done.returncode, done.stderr) == (2, "two.pem: it has 2 keys\n  give one key a file\n")


def test_what_is_no_regular_file_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    irregular = "cannot be read: it is not a regular file\n"
    for words in (
        ("verify", "zoo.aot", "--key", "pipe"),
        ("sign", "zoo.aot", "--statement", "zoo.intoto.json", "--key", "pipe"),
        ("sign", "zoo.aot", "--statement", "pipe", "--key", "ann.pem"),
        ("inspect", "pipe"),
        ("inspect", "pipe", "--locate", "tanh"),
    ):
        done = stagec(*words, cwd=folder)
        assert (done.returncode, done.stderr) == (2, f"pipe: {irregular}")
    report = verify(str(folder / "zoo.aot"), [str(folder / "ann.pub.pem")], signature=[str(folder / "pipe")])
    assert report["checks"][-1]["summary"] == f"{folder}/pipe: {irregular.strip()}"


def test_a_file_that_is_larger_than_memory(folder: Path) -> None:
    (folder / "sparse").touch()
    os.truncate(folder / "sparse", 8 << 40)
    for words, limit in (
        (("inspect", "sparse"), 2**31),
        (("sign", "zoo.aot", "--statement", "sparse", "--key", "ann.pem"), 2**31),
        (("sign", "zoo.aot", "--statement", "zoo.intoto.json", "--key", "sparse"), 2**16),
        (("verify", "zoo.aot", "--key", "sparse"), 2**16),
    ):
        done = stagec(*words, cwd=folder)
        message = f"sparse: cannot be read: its 8,796,093,022,208 bytes are over the limit of {limit:,}\n"
        assert (done.returncode, done.stderr) == (2, message)


def sign(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Have ann sign another statement than the one that stagec wrote, with a program of hers."""
    statement = json.loads((folder / "zoo.intoto.json").read_text())
    change(statement)
    payload = json.dumps(statement).encode()
    key = load_pem_private_key((folder / "ann.pem").read_bytes(), None)
    assert isinstance(key, Ed25519PrivateKey)
    envelope = Envelope(payload, (("", key.sign(pae(PAYLOAD_TYPE, payload))),))
    (folder / "other.intoto.json").write_bytes(payload)
    (folder / "zoo.aot.dsse.json").write_text(envelope.to_json())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda statement: statement.update(
                predicateType="https://in-toto.io/attestation/test-result/v0.1", predicate={"result": "FAILED"}
            ),
            'predicateType: expected "https://slsa.dev/provenance/v1", not '
            '"https://in-toto.io/attestation/test-result/v0.1"',
        ),
        (
            lambda statement: statement["predicate"]["buildDefinition"].update(buildType="urn:stagec:build:bazel:2"),
            'predicate.buildDefinition.buildType: expected "urn:stagec:build:bazel:1" or '
            '"urn:stagec:build:add-jaxlib:1", not "urn:stagec:build:bazel:2"',
        ),
        (
            lambda statement: statement["predicate"].pop("buildDefinition"),
            "predicate: the key 'buildDefinition' is missing",
        ),
        (lambda statement: statement["subject"][0].update(name=None), "subject[0].name: expected a string, not null"),
        (lambda statement: statement["subject"].append(statement["subject"][0]), "a subject appears twice"),
    ],
)
def test_another_statement_of_the_same_key_vouches_for_nothing(
    folder: Path, change: Callable[[dict[str, Any]], None], what: str
) -> None:
    sign(folder, change)
    what = f"what is signed is not the provenance of a bundle: {what}"
    assert failed(folder, "ann") == ("subjects", f"/zoo.aot.dsse.json: {what}")
    done = stagec("sign", "zoo.aot", "--statement", "other.intoto.json", "--key", "ann.pem", cwd=folder)
    assert (done.returncode, done.stderr) == (2, f"other.intoto.json: {what}\n")


def test_a_statement_of_another_version(folder: Path) -> None:
    def change(statement: dict[str, Any]) -> None:
        statement["predicate"]["buildDefinition"]["externalParameters"]["version"] = "2"

    sign(folder, change)
    assert failed(folder, "ann") == ("subjects", "/zoo.aot.dsse.json: another bundle was signed: zoo 2 differs")


def test_nothing_is_parsed_before_the_signature_is_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []

    def parse(text: bytes | str, *limits: int) -> Any:
        parsed.append(len(text))
        return strict_json.parse(text, *limits)

    monkeypatch.setattr(archive, "strict_json", SimpleNamespace(**{**vars(strict_json), "parse": parse}))
    assert failed(folder, "eve")[0] == "signatures"
    assert parsed == []
    assert verified(folder, "ann")
    assert parsed == [len(Archive(folder / "zoo.aot")["index.json"])] * 2


def test_an_encrypted_key(folder: Path) -> None:
    write_keys(folder, "safe", "open sesame")
    arguments = ("sign", "zoo.aot", "--statement", "zoo.intoto.json", "--key", "safe.pem", "--output", "safe.json")
    done = stagec(*arguments, cwd=folder, env={"STAGEC_KEY_PASSPHRASE": "open barley"})
    assert (done.returncode, done.stderr) == (2, "safe.pem: the passphrase does not open this key\n")
    # Without a terminal: a session of its own.
    done = subprocess.run(
        [sys.executable, "-m", "stagec", *arguments],
        cwd=folder,
        env={"PYTHONPATH": os.pathsep.join([str(COMPILER), *sys.path])},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        capture_output=True,
        text=True,
    )
    message = "safe.pem: it is encrypted, and nobody is there to be asked for its passphrase\n"
    assert done.returncode == 2
    assert done.stderr.endswith(f"{message}  set the variable STAGEC_KEY_PASSPHRASE\n")
    done = stagec(*arguments, cwd=folder, env={"STAGEC_KEY_PASSPHRASE": "open sesame"})
    assert (done.returncode, done.stderr) == (0, "")
    key = str(folder / "safe.pub.pem")
    assert verify(str(folder / "zoo.aot"), [key], signature=[str(folder / "safe.json")])["verdict"] == "verified"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_makes_keys_and_verifies(folder: Path) -> None:
    def openssl(*words: str) -> str:
        return subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, text=True).stdout

    openssl("genpkey", "-algorithm", "ed25519", "-out", "o.pem")
    openssl("pkey", "-in", "o.pem", "-pubout", "-out", "o.pub.pem")
    checked("sign", "zoo.aot", "--statement", "zoo.intoto.json", "--key", "o.pem", "--output", "o.json", cwd=folder)
    checked("verify", "zoo.aot", "--key", "o.pub.pem", "--signature", "o.json", cwd=folder)
    envelope = json.loads((folder / "o.json").read_text())
    (folder / "message").write_bytes(pae(envelope["payloadType"], base64.b64decode(envelope["payload"])))
    (folder / "sig").write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    words = ("-verify", "-pubin", "-inkey", "o.pub.pem", "-rawin", "-in", "message", "-sigfile", "sig")
    assert "Success" in openssl("pkeyutl", *words)


def write_layer(folder: Path, **contents: bytes) -> Path:
    """Write a layer with files of `server.jax_cache`, and its statement."""
    layer = folder / "server.jax_cache.tar"
    with tarfile.open(layer, "w") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"server.jax_cache/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    (folder / "programs.toml").write_text("format = 1\n")
    checked(
        *("action", "provenance", "--layer", layer, "--output", folder / "s.intoto.json"),
        *("--sbom", folder / "s.sbom.json", "--manifest", f"rehearsal/programs.toml:{folder}/programs.toml"),
    )
    return layer


def test_a_layer_is_signed_and_verified(folder: Path) -> None:
    """As a bundle is: the file, and each of its files."""
    layer = write_layer(folder, index=b"{}", entry=b"code")
    statement = json.loads((folder / "s.intoto.json").read_text())
    subjects = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    assert subjects == {
        "server.jax_cache.tar": hashlib.sha256(layer.read_bytes()).hexdigest(),
        "server.jax_cache/index": hashlib.sha256(b"{}").hexdigest(),
        "server.jax_cache/entry": hashlib.sha256(b"code").hexdigest(),
    }
    component = json.loads((folder / "s.sbom.json").read_text())["metadata"]["component"]
    assert (component["name"], component["hashes"][0]["content"]) == ("server.jax_cache.tar", subjects[layer.name])
    sign = ("sign", layer.name, "--statement", "s.intoto.json", "--key", "ann.pem")
    checked(*sign, cwd=folder)
    said = checked("verify", layer.name, "--key", "ann.pub.pem", cwd=folder)
    assert "2 files of server.jax_cache" in said
    assert "server.jax_cache.tar: verified" in said
    assert stagec("verify", layer.name, cwd=folder).returncode == 3
    done = stagec("verify", layer.name, "--key", "bob.pub.pem", cwd=folder)
    assert (done.returncode, "0 of 1 keys signed it, 1 must" in done.stdout) == (1, True)
    done = stagec("verify", layer.name, "--serves", "jaxlib==1.0", cwd=folder)
    assert (done.returncode, "--serves is for a bundle: leave it out" in done.stderr) == (2, True)
    layer.write_bytes(layer.read_bytes().replace(b"code", b"CODE"))
    done = stagec("verify", layer.name, "--key", "ann.pub.pem", cwd=folder)
    assert done.returncode == 1
    assert "another layer was signed: server.jax_cache.tar and 1 more differs" in done.stdout
    done = stagec(*sign, cwd=folder)
    assert (done.returncode, "another layer was signed: server.jax_cache.tar" in done.stderr) == (2, True)


def test_what_is_no_layer(folder: Path) -> None:
    layer = write_layer(folder, index=b"{}")
    said = "not a layer with one folder of files"
    with tarfile.open(layer, "a") as archive:
        archive.addfile(tarfile.TarInfo("other/index"))
    assert said in stagec("verify", layer.name, cwd=folder).stdout
    with tarfile.open(layer, "w") as archive:
        link = tarfile.TarInfo("server.jax_cache/index")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    assert said in stagec("verify", layer.name, cwd=folder).stdout
    layer.write_bytes(b"x" * 1024)
    assert "not a layer: " in stagec("verify", layer.name, cwd=folder).stdout
