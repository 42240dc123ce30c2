"""Signing bundles, and verifying them."""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagec.bundle.verification import verify
from stagec.runtime.signatures import pae
from tests.building import COMPILER, checked, stagec
from tests.signed import write_bundle_of, write_keys, write_provenance


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
    assert not report["ok"]
    last = report["checks"][-1]
    assert not last["ok"]
    return last["check"], last["told"].replace(str(folder), "")


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
        "ok      container   5 members, each with the digest that the index says\n"
        f"ok      signatures  2 of 3 keys signed, 2 must: {keyids[0]}, {keyids[1]}\n"
        "ok      subjects    signed were this file and its 5 members\n"
        "zoo.aot: verified\n"
    )


def test_without_a_key_the_container_is_verified(material: Path) -> None:
    report = json.loads(checked("verify", "zoo.aot", "--json", cwd=material))
    assert (report["ok"], [one["check"] for one in report["checks"]]) == (True, ["container"])


def test_a_key_that_did_not_sign(material: Path) -> None:
    done = stagec("verify", "zoo.aot", "--key", "eve.pub.pem", cwd=material)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[1:] == [
        "FAILED  signatures  zoo.aot.dsse.json: 0 of 1 keys signed it, 1 must",
        "zoo.aot: do not use it",
    ]


def test_a_key_counts_once(folder: Path) -> None:
    edit(folder, lambda envelope: envelope["signatures"].append(envelope["signatures"][0]))
    assert failed(folder, "ann", "eve", threshold=2) == (
        "signatures",
        "/zoo.aot.dsse.json: 1 of 2 keys signed it, 2 must",
    )
    assert verify(str(folder / "zoo.aot"), [str(folder / "ann.pub.pem")])["ok"]


def test_a_keyid_is_trusted_for_nothing(folder: Path) -> None:
    def swap(envelope: dict[str, Any]) -> None:
        ann, bob = envelope["signatures"]
        ann["keyid"], bob["keyid"] = bob["keyid"], "eve"

    edit(folder, swap)
    assert verify(str(folder / "zoo.aot"), [str(folder / f"{name}.pub.pem") for name in ("ann", "bob")], 2)["ok"]


def test_base64_for_urls_is_read_too(folder: Path) -> None:
    def other(envelope: dict[str, Any]) -> None:
        envelope["payload"] = base64.urlsafe_b64encode(base64.b64decode(envelope["payload"])).decode()
        for one in envelope["signatures"]:
            one["sig"] = base64.urlsafe_b64encode(base64.b64decode(one["sig"])).decode()

    edit(folder, other)
    assert verify(str(folder / "zoo.aot"), [str(folder / "ann.pub.pem")])["ok"]


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
        "/zoo.aot.dsse.json: another bundle was signed: zoo.aot and 1 more differs",
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
        ("[]", "list indices must be integers or slices, not str"),
        ('{"payloadType": "text/plain"}', "its payloadType is 'text/plain', 'application/vnd.in-toto+json' is wanted"),
        ('{"payload": "", "payload": ""}', "the key 'payload' is there twice"),
        ('{"payloadType": "application/vnd.in-toto+json", "signatures": []}', "it has no 'payload'"),
        ("NaN", "the number NaN is not finite"),
    ],
)
def test_a_file_that_is_no_envelope(folder: Path, text: str, what: str) -> None:
    (folder / "zoo.aot.dsse.json").write_text(text)
    assert failed(folder, "ann") == ("signatures", f"/zoo.aot.dsse.json: not a DSSE envelope: {what}")


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
        message = f"{key}: not an Ed25519 public key in PEM; openssl pkey -pubout writes one\n"
        assert (done.returncode, done.stderr) == (2, message)
    for key in ("zoo.toml", "ann.pub.pem"):
        done = stagec("sign", "zoo.aot", "--statement", "zoo.intoto.json", "--key", key, cwd=folder)
        message = f"{key}: not an Ed25519 private key in PEM\n  openssl genpkey -algorithm ed25519 writes one\n"
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
    message = "zoo.aot.dsse.json: its signatures are of another statement\n  remove it, or name another --output\n"
    assert (done.returncode, done.stderr) == (2, message)


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
    assert verify(str(folder / "zoo.aot"), [key], signature=str(folder / "safe.json"))["ok"]


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
