"""Changed bundles, exported artifacts and descriptions are refused by a typed error, or are what they say they are.

mutations.py has what is changed, readers.py what must happen then. Hypothesis draws the changes: the same ones in every
run, for their seeds are the tests' names. 1,000 are usual; this does at least 100,000, and shows how they ended:

    STAGEC_MUTATIONS=100000 python -m pytest -rP tests/bundle/test_fuzz.py

Those that gave the same bytes are counted once. A fault is shrunk and shown, and found again by the test that found it
(`-k export-3`, with the same STAGEC_MUTATIONS).

Modules: `bundle/*.py`, `stages/exported.py`.
"""

import dataclasses
import enum
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import Phase, given, seed, settings

from stagec.bundle.archive import Archive
from stagec.bundle.description import Description
from stagec.bundle.members import bundle_members, encode
from stagec.bundle.safetensors import Tensor, parts
from stagec.core.sizes.avals import Aval
from stagec.core.trees import statics
from stagec.core.trees.keyed import Item, Keyed, key_of
from stagec.core.trees.tree import LEAF, Tree
from stagec.stages.exported import Exported
from stagec.trust import provenance
from stagec.trust.attestation import Subject
from stagec.trust.dsse import sign
from stagec.trust.provenance import Environment, Wheel
from tests.building import ROOT
from tests.bundle import mutations, readers
from tests.bundle.mutations import Change, Changes
from tests.bundle.readers import Reader

SUBJECTS: dict[Reader, Callable[[bytes], Changes]] = {
    readers.whole_bundle: mutations.of_zip,
    readers.repacked_bundle: mutations.of_members,
    readers.explained_bundle: mutations.of_members,
    readers.description: mutations.of_document,
    readers.export: mutations.of_export,
    readers.located: mutations.of_bytes,
    readers.envelope: mutations.of_document,
    readers.statement: mutations.of_document,
    readers.weights: mutations.of_safetensors,
    readers.manifest: mutations.of_manifest,
}
pytestmark = pytest.mark.pinned
MUTATIONS = int(os.environ.get("STAGEC_MUTATIONS", "1000")) // len(SUBJECTS)
CHUNK = min(MUTATIONS, 2500)
"""Mutations of one test. Hypothesis remembers what it drew: few enough for memory, and to see where the run is."""


@pytest.fixture(scope="module")
def bundle(zoo: Path) -> bytes:
    """The bundle of the zoo with three functions, one with weights and golden arrays.

    Most bytes of a larger one are alike.
    """
    archive = Archive(zoo)
    index = dict(archive.index)
    index["functions"] = {name: index["functions"][name] for name in ("loop", "mlp", "from_file")}
    functions = index["functions"].values()
    bound = {entry["weight"] for function in functions for entry in function["bind"]}
    index["weights"] = {name: entry for name, entry in index["weights"].items() if name in bound}
    arrays = [
        array
        for function in functions
        for kind in ("inputs", "outputs")
        for array in function.get("golden", {}).get(kind, {}).values()
    ]
    used = {array["member"] for array in [*index["weights"].values(), *arrays]}
    for function in functions:
        used |= {function["exported"], function["description"]}
        used |= {entry[key] for entry in function["executables"] for key in ("executable", "description", "stablehlo")}
    return encode(bundle_members(index, {name: archive[name] for name in used}))


@pytest.fixture(scope="module")
def originals(zoo: Path, bundle: bytes) -> dict[Reader, dict[str, bytes]]:
    """What is changed, by what reads it."""
    descriptions = [path for path in sorted(zoo.parent.glob("*.json")) if ".exported." not in path.name][:6]
    exports = [*sorted(zoo.parent.glob("*.exported")), *sorted((ROOT / "tests" / "corpus").glob("*/*.exported"))]
    return {
        readers.whole_bundle: {"bundle": bundle},
        readers.repacked_bundle: {"bundle": bundle},
        readers.explained_bundle: {"bundle": bundle},
        readers.description: {**{path.name: path.read_bytes() for path in descriptions}, "keys": _with_keys(zoo)[0]},
        readers.export: {
            **{f"{path.parent.name}/{path.name}": path.read_bytes() for path in exports},
            "keys": _with_keys(zoo)[1],
        },
        readers.located: {path.name: _located(path) for path in exports if path.stem in LOCATED},
        readers.envelope: {"envelope": _envelope(_statement(bundle))},
        readers.statement: {"statement": _statement(bundle)},
        readers.weights: {"weights": _weights()},
        readers.manifest: {path.name: path.read_bytes() for path in MANIFESTS},
    }


LOCATED = ("zoo.mlp", "zoo.loop", "update")
MANIFESTS = [ROOT / "tests" / name for name in ("zoo/zoo.toml", "e2e/models/models.toml")]


def _with_keys(zoo: Path) -> tuple[bytes, bytes]:
    """A description and an export whose result is a dict with tuples as keys, of nodes with key entries."""
    exported = Exported.deserialize((zoo.parent / "zoo.loop.exported").read_bytes())
    description = Description.from_json((zoo.parent / "zoo.loop.cpu.json").read_bytes())
    static = {"aux": statics.describe([0.5, b"b", Tree, {"a": ()}])}
    auxdata = Keyed((Item(key_of((1, Kind.ONE))),), static).to_bytes()
    node = Tree("custom", (LEAF,), (), "x:Y", auxdata)
    count = exported.out_tree.num_leaves
    tree = Tree("dict", (node,) * count, tuple(key_of((i, "a")) for i in range(count)))
    described = description._replace(out_tree=tree).to_json().encode()
    return described, dataclasses.replace(exported, out_tree=tree).serialize()


class Kind(enum.Enum):
    ONE = 1


def _located(path: Path) -> bytes:
    text: str = Exported.deserialize(path.read_bytes()).mlir_module()
    return text.encode()


def _statement(bundle: bytes) -> bytes:
    archive = Archive("zoo.aot", bundle)
    inputs = (
        ("zoo.toml", "0" * 64),
        {"zoo.loop": b"{}"},
        {},
        [Environment("3.11.2", (Wheel("jax", "1", "jax.whl", "0" * 64),))],
    )
    return provenance.statement(Subject.of(archive, archive.sha256()), *inputs).encode()


def _envelope(statement: bytes) -> bytes:
    key = Ed25519PrivateKey.from_private_bytes(readers.KEY)
    return sign(statement, key).to_json().encode()


def _weights() -> bytes:
    data = memoryview(bytes(range(48)))
    tensors = {"a.b": Tensor(Aval("f32", (2, 3)), data[:24]), "c": Tensor(Aval("u8", (24,)), data[24:])}
    return b"".join(parts(tensors))


@pytest.fixture(scope="module")
def ends() -> Iterator[dict[Reader, dict[bytes, str]]]:
    """How reading ended, by the digests of what was read; a table of it is printed after the last test."""
    found: dict[Reader, dict[bytes, str]] = {reader: {} for reader in SUBJECTS}
    yield found
    for reader, how in found.items():
        for end, count in sorted(Counter(how.values()).items()):
            print(f"{count:>8,}  {reader.__name__}, {end}")
    print(f"{sum(map(len, found.values())):>8,}  mutations")


def test_the_bundle_that_is_changed_has_members_of_every_kind(bundle: bytes) -> None:
    archive = Archive("x", bundle)
    members = list(archive.index["members"])
    kinds = {name.partition("/")[0] if "/" in name else name.rpartition(".")[2] for name in members}
    assert kinds == {"exported", "xla", "json", "jsonl", "mlirbc", "weights", "golden"}
    assert any("abi" in json.loads(archive[name]) for name in members if name.endswith(".json"))


@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # of strategies, where a test fails
@pytest.mark.parametrize("chunk", range(-(-MUTATIONS // CHUNK)))
@pytest.mark.parametrize("reader", SUBJECTS)
def test_what_was_changed_is_refused_or_is_what_it_says(
    originals: dict[Reader, dict[str, bytes]], ends: dict[Reader, dict[bytes, str]], reader: Reader, chunk: int
) -> None:
    files, done = originals[reader], ends[reader]
    unchanged = {hashlib.sha256(data).digest() for data in files.values()}
    wanted = len(done) + CHUNK
    with readers.in_a_process(reader) as read:
        # A fifth more: some examples change nothing, or what another one changed.
        @settings(max_examples=CHUNK * 6 // 5, phases=(Phase.generate, Phase.shrink))
        @given(mutations.of_files(files, SUBJECTS[reader]))
        def mutate(mutation: tuple[str, Change]) -> None:
            name, change = mutation
            data = change(files[name])
            digest = hashlib.sha256(data).digest()
            if digest not in done and digest not in unchanged:
                done[digest] = read(data)

        numbers = itertools.count()
        while len(done) < wanted:
            seed(f"{reader.__name__} {chunk} {next(numbers)}")(mutate)()
    assert any(end.startswith("refused") for end in done.values())
