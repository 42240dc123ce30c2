"""Loading a bundle only if it was signed."""

import sys
from pathlib import Path

import pytest

import stagec
from stagec.loader import load
from tests.building import checked
from tests.signed import write_bundle_of, write_keys, write_provenance


@pytest.fixture(scope="module")
def folder(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that ann and bob signed."""
    folder = tmp_path_factory.mktemp("signed")
    write_provenance(write_bundle_of(zoo, folder, "loop"))
    for name in ("ann", "bob", "eve"):
        write_keys(folder, name)
    for name in ("ann", "bob"):
        checked("sign", "zoo.aot", "--statement", "zoo.intoto.json", "--key", f"{name}.pem", cwd=folder)
    return folder


def test_a_signed_bundle_is_loaded(folder: Path) -> None:
    keys = [folder / "eve.pub.pem", str(folder / "bob.pub.pem"), (folder / "ann.pub.pem").read_bytes()]
    assert list(stagec.load(folder / "zoo.aot", keys=keys, threshold=2)) == ["loop"]


def test_nothing_is_read_of_a_bundle_that_was_not_signed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a bundle was made")

    monkeypatch.setattr(load, "Bundle", never)
    with pytest.raises(stagec.LoadError, match=r"0 of 1 keys signed it, 1 must") as refusal:
        stagec.load(folder / "zoo.aot", keys=[folder / "eve.pub.pem"])
    assert refusal.value.code == "signature"


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        ({"keys": ["ann.pub.pem", "eve.pub.pem"], "threshold": 2}, "signature", "1 of 2 keys signed it, 2 must"),
        ({"keys": ["ann.pub.pem"], "signature": "none.json"}, "signature", "none.json: no such file: the bundle has"),
        ({"keys": ["ann.pub.pem"], "threshold": 0}, "key", "0 signatures cannot come from 1 different keys"),
        ({"keys": ["ann.pem"]}, "key", "ann.pem: not a public key in PEM, Ed25519 or ECDSA"),
        ({"keys": ["none.pem"]}, "key", "none.pem: cannot be read: No such file or directory"),
        ({"keys": [b"text"]}, "key", "the key: not a public key in PEM, Ed25519 or ECDSA"),
        ({"keys": []}, "key", "no key is given, and nothing would be checked; say which ones you trust"),
        ({"keys": [], "threshold": 0}, "key", "no key is given, and nothing would be checked"),
        ({"keys": "ann.pub.pem"}, "key", "keys is one key; write a list of them: keys=[...]"),
        ({"keys": b"text"}, "key", "keys is one key; write a list of them: keys=[...]"),
        ({"threshold": 2}, "key", "zoo.aot: no key is given; say which ones you trust: keys=[...]"),
        ({"signature": "zoo.aot.dsse.json"}, "key", "zoo.aot: no key is given; say which ones you trust"),
    ],
)
def test_refusals(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, object], code: str, what: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(stagec.LoadError) as refusal:
        stagec.load("zoo.aot", **arguments)  # type: ignore[arg-type]
    assert refusal.value.code == code
    assert what in str(refusal.value)


def test_without_cryptography_nothing_is_trusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(stagec.LoadError, match=r"is not installed: pip install cryptography") as refusal:
        stagec.load(folder / "zoo.aot", keys=[folder / "ann.pub.pem"])
    assert refusal.value.code == "cryptography"
