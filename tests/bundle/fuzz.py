"""Change bundles, portable artifacts and descriptions at random: each change is refused by a typed error, or harmless.

    python tests/bundle/fuzz.py --mutations 100000 FOLDER

FOLDER has a bundle (*.aot) and the artifacts (*.exported, *.json) that it was made of; tests/bundle/test_fuzz.py does
the same with fewer. Mutation NUMBER of a seed is always the same one: `--seed SEED --first NUMBER --mutations 1`.

What is "harmless", precisely:

- a bundle: every change of a byte must be refused by reading all of it. Where the change was made with digests and
  checksums computed again, as one who signs nothing can do, there is another bundle, which must be one: all that it
  hands out has the digests of its index, its descriptions are read or refused, and it is encoded again as the same
  bytes.
- a portable artifact and a description have no digest inside. What is read from a changed one must be a whole value: it
  is written and read again as an equal one.

Everything runs in a child process, in which jaxlib cannot be imported while bundles and descriptions are read: so what
refuses them is no native code. The child may not crash, and take at most LONGEST seconds and MEMORY bytes for one.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import os
import random
import re
import resource
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LONGEST = 30.0
CHUNK = 2500
MEMORY = 4 << 30
ROOT = Path(__file__).absolute().parent.parent.parent
INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
Mutator = Callable[[random.Random, bytes], bytes]


def flip_bits(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def set_number(rng: random.Random, data: bytes) -> bytes:
    """Lengths and offsets are numbers of 2 or 4 bytes, at any place."""
    width = rng.choice((2, 4))
    at = rng.randrange(len(data) - width)
    if rng.random() < 0.5:
        value = rng.choice(INTERESTING)
    else:
        value = int.from_bytes(data[at : at + width], "little") + rng.choice((-4, -1, 1, 4, 64))
    return data[:at] + (value % (1 << 8 * width)).to_bytes(width, "little") + data[at + width :]


def move_block(rng: random.Random, data: bytes) -> bytes:
    """Copy, insert or cut out a block."""
    size = rng.choice((1, 4, 16, 100, 4096))
    start, at = rng.randrange(len(data)), rng.randrange(len(data))
    block = data[start : start + size]
    return (
        data[:at] + block + data[at + rng.choice((0, len(block))) :]
        if rng.random() < 0.7
        else data[:at] + data[at + size :]
    )


def append(rng: random.Random, data: bytes) -> bytes:
    extra = rng.choice((b"\0", b"PK\5\6" + bytes(18), rng.randbytes(rng.randrange(1, 100)), data[:1000]))
    return data + extra if rng.random() < 0.5 else extra + data


def zip_record(rng: random.Random, data: bytes) -> bytes:
    """Set a field of one record of the zip: of a local header, of the directory or of the end."""
    signature, size = rng.choice(((b"PK\3\4", 30), (b"PK\1\2", 46), (b"PK\5\6", 22)))
    places = [found.start() for found in re.finditer(re.escape(signature), data)]
    at = min(rng.choice(places) + rng.randrange(size - 1), len(data) - 2)
    return data[:at] + struct.pack("<H", rng.choice(INTERESTING) & 0xFFFF) + data[at + 2 :]


def edit_json(rng: random.Random, value: Any) -> Any:
    """Return the value with one place of it changed: a key, a type, a number, a text, something more or less."""
    places: list[tuple[Any, Any]] = []

    def visit(node: Any) -> None:
        for key, item in list(node.items() if isinstance(node, dict) else enumerate(node)):
            places.append((node, key))
            if isinstance(item, dict | list):
                visit(item)

    visit(value)
    node, key = rng.choice(places)
    others = rng.choice(places)
    new: Any = rng.choice(
        (
            None, True, 0, 1, -1, 2**31, 2**63 - 1, 2**64, 1.5, "", "x", "unknown", "../x", "\ud800",
            "f32[" + "9" * 30 + "]", "f32[(a+b+c+d)^8]", [], {}, [[[[]]]], {"tuple": ["*"]},
            copy.deepcopy(others[0][others[1]]),
        )
    )  # fmt: skip
    action = rng.random()
    if action < 0.6:
        node[key] = new
    elif action < 0.75:
        del node[key]
    elif isinstance(node, dict):
        node[rng.choice(("x", "", "format", str(key) + "x"))] = new
    else:
        node.insert(key, new)
    return value


def edit_text(rng: random.Random, data: bytes) -> bytes:
    """Change a JSON text where parsers disagree: keys twice, numbers, nesting, spaces."""
    at = rng.choice([at for at, byte in enumerate(data) if byte in b'{}[],:"'])
    bits = (
        b" ",
        b"NaN",
        b"1e999",
        b"-0",
        b"[" * 500,
        b'"\\ud800"',
        b'"x":1,',
        b"9" * 5000,
        b"\xff",
        b"\xef\xbb\xbf",
        b",",
    )
    return data[:at] + rng.choice(bits) + data[at + rng.randrange(2) :]


class Bundles:
    """Changes of a bundle."""

    def __init__(self, folder: Path) -> None:
        self.whole = [small_bundle(folder)]

    def mutate(self, rng: random.Random, data: bytes) -> tuple[str, bytes]:
        if rng.random() < 0.6:
            mutator = rng.choice((flip_bits, truncate, set_number, move_block, append, zip_record))
            return mutator.__name__, mutator(rng, data)
        return repacked(rng, data)

    def check(self, kind: str, data: bytes, original: bytes) -> str:
        """Read a changed bundle as a loader does; return how it ended."""
        from stagec.runtime import index
        from stagec.runtime.archive import INDEX, Archive, encode, encode_index
        from stagec.runtime.refusal import LoadError

        try:
            archive = Archive("x", data)
            archive.check_all()
        except LoadError as error:
            return f"refused: {error.code}"
        members = {name: archive[name] for name in archive.index["members"]}
        assert encode({INDEX: encode_index(archive.index), **members}) == data, "read, and not the one encoding"
        if data == original:
            return "unchanged"
        assert kind.startswith("repacked"), "a change of bytes was accepted"
        for artifact, function in archive.index["functions"].items():
            for entry in function["executables"]:
                try:
                    index.describe(archive.index, artifact, entry, archive[entry["description"]])
                except ValueError:
                    return "refused: description"
        return "another bundle"


def repacked(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """Change index or members, and compute checksums (and sometimes digests) again, as an attacker would."""
    from stagec.runtime.archive import INDEX, Archive, encode, encode_index, members_table

    archive = Archive("x", data)
    members = {name: archive[name] for name in archive.index["members"]}
    index = json.loads(json.dumps(archive.index))
    what = rng.choice(("index", "text", "member", "member with digest", "description with digest"))
    if what == "index":
        index = edit_json(rng, index)
    elif what.startswith("member"):
        name = rng.choice(list(members))
        members[name] = flip_bits(rng, members[name])
    elif what.startswith("description"):
        name = rng.choice([name for name in members if name.endswith(".json")])
        members[name] = json.dumps(edit_json(rng, json.loads(members[name]))).encode()
    if what.endswith("with digest"):
        index["members"] = members_table(members)
    text = encode_index(index)
    if what == "text":
        text = edit_text(rng, text)
    return f"repacked: {what}", encode({INDEX: text, **members})


class Descriptions:
    """Changes of descriptions of executables."""

    def __init__(self, folder: Path) -> None:
        self.whole = [path.read_bytes() for path in sorted(folder.glob("*.json")) if ".exported." not in path.name][:6]

    def mutate(self, rng: random.Random, data: bytes) -> tuple[str, bytes]:
        if rng.random() < 0.5:
            return "edit_json", json.dumps(edit_json(rng, json.loads(data))).encode()
        mutator = rng.choice((flip_bits, truncate, move_block, append, edit_text))
        return mutator.__name__, mutator(rng, data)

    def check(self, kind: str, data: bytes, original: bytes) -> str:
        from stagec.runtime.description import Description

        try:
            description = Description.from_json(data)
        except ValueError:
            return "refused: ValueError"
        assert Description.from_json(description.to_json()) == description
        return "unchanged" if data == original else "another description"


class Exports:
    """Changes of portable artifacts."""

    def __init__(self, folder: Path) -> None:
        files = [*sorted(folder.glob("*.exported")), *sorted((ROOT / "tests" / "corpus").glob("*/*.exported"))]
        self.whole = [path.read_bytes() for path in files]

    def mutate(self, rng: random.Random, data: bytes) -> tuple[str, bytes]:
        mutator = rng.choice((flip_bits, truncate, set_number, set_number, move_block, append, self._structure))
        return mutator.__name__.lstrip("_"), mutator(rng, data)

    def _structure(self, rng: random.Random, data: bytes) -> bytes:
        """Change what is no part of the module, which most bytes are."""
        module = data.find(b"ML\xefR")
        end = module + 4 + max(0, data.rfind(b"\0\0\0\0", module) - module) // 2 if module >= 0 else len(data)
        outside = [*range(max(0, module)), *range(end, len(data))] or [0]
        at = min(rng.choice(outside), len(data) - 4)
        value = rng.choice((*INTERESTING, rng.randrange(256), rng.randrange(len(data))))
        return data[:at] + struct.pack("<I", value) + data[at + 4 :]

    def check(self, kind: str, data: bytes, original: bytes) -> str:
        from stagec.stages.exported import Exported, NotExported

        try:
            exported = Exported.deserialize(data)
        except NotExported:
            return "refused: NotExported"
        order, vjp = 0, exported
        while vjp.has_vjp():
            order, vjp = order + 1, vjp.vjp()
        again = Exported.deserialize(exported.serialize(order))
        assert repr(again) == repr(exported), "written and read again, it is another one"
        assert again.mlir_module_serialized == exported.mlir_module_serialized
        return "unchanged" if data == original else "another artifact"


SUBJECTS: Sequence[tuple[type[Bundles | Descriptions | Exports], float]] = (
    (Bundles, 0.4),
    (Descriptions, 0.2),
    (Exports, 0.4),
)


def small_bundle(folder: Path) -> bytes:
    """Return the bundle of the folder with three functions, one with weights and golden arrays.

    Most bytes of a larger one are alike.
    """
    from stagec.runtime.archive import INDEX, Archive, encode, encode_index, members_table

    archive = Archive(next(folder.glob("*.aot")))
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
        used |= {function["exported"], function.get("description", function["exported"])}
        used |= {entry[key] for entry in function["executables"] for key in ("executable", "description", "stablehlo")}
    members = {name: archive[name] for name in sorted(used)}
    return encode({INDEX: encode_index({**index, "members": members_table(members)}), **members})


class _NoNativeCode:
    """Makes jaxlib unimportable."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] in ("jaxlib", "jax", "numpy"):
            raise ImportError(f"{name} is not to be imported here")


def child(folder: Path, subject: str, seed: int, first: int, count: int, progress: int) -> dict[str, int]:
    """Do the mutations of one subject; `progress` is where the number of each is written before it is done."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    kind = next(kind for kind, _ in SUBJECTS if kind.__name__ == subject)
    if kind is not Exports:
        sys.meta_path.insert(0, _NoNativeCode())
    subjects = kind(folder)
    ends: Counter[str] = Counter()
    for number in range(first, first + count):
        os.pwrite(progress, struct.pack("<q", number), 0)
        rng = random.Random(f"{seed} {subject} {number}")
        original = rng.choice(subjects.whole)
        what, data = subjects.mutate(rng, original)
        faulthandler.dump_traceback_later(LONGEST, exit=True)
        try:
            ends[f"{subject}, {subjects.check(what, data, original)}"] += 1
        except Exception:
            print(f"{subject} {number} of seed {seed}: {what}", file=sys.stderr)
            raise
        faulthandler.cancel_dump_traceback_later()
    return dict(ends)


def fuzz(
    folder: Path, mutations: int, seed: int = 0, first: int = 0, jobs: int = 2
) -> tuple[dict[str, int], list[str]]:
    """Return how the mutations ended, and what should not have happened: crashes, hangs and wrong errors."""
    parts = []
    for kind, share in SUBJECTS:
        end = first + max(1, round(mutations * share))
        parts += [(kind.__name__, start, min(end, start + CHUNK)) for start in range(first, end, CHUNK)]
    ends: Counter[str] = Counter()
    faults: list[str] = []
    with ThreadPoolExecutor(jobs) as pool:
        for found, wrong in pool.map(lambda part: _part(folder, seed, *part), parts):
            ends.update(found)
            faults += wrong
    return dict(ends), faults


def _part(folder: Path, seed: int, subject: str, start: int, end: int) -> tuple[Counter[str], list[str]]:
    """Do some mutations of one subject in a child process, and in another one what is left after a fault."""
    ends: Counter[str] = Counter()
    faults = []
    while start < end:
        with open(os.memfd_create("progress"), "wb") as progress:  # noqa: PTH123
            words = [folder, subject, seed, start, end - start, progress.fileno()]
            run = subprocess.run(
                [sys.executable, __file__, "--child", *map(str, words)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "compiler"), *sys.path])},
                pass_fds=[progress.fileno()],
                capture_output=True,
                text=True,
            )
            at = struct.unpack("<q", os.pread(progress.fileno(), 8, 0) or struct.pack("<q", -1))[0]
        if run.returncode == 0:
            ends.update(json.loads(run.stdout))
            break
        if at < start:
            raise RuntimeError(run.stderr)  # before the first mutation
        faults.append(f"{subject} {at} of seed {seed}: exit status {run.returncode}\n{run.stderr[-2000:]}")
        start = at + 1
    return ends, faults


def main() -> int:
    """Run the command line."""
    if sys.argv[1:2] == ["--child"]:
        folder, subject, *numbers = sys.argv[2:]
        print(json.dumps(child(Path(folder), subject, *map(int, numbers))))
        return 0
    parser = argparse.ArgumentParser(description="Change artifacts at random, and see what the readers say.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    started = time.monotonic()
    ends, faults = fuzz(options.folder, options.mutations, options.seed, options.first, options.jobs)
    for how, count in sorted(ends.items()):
        print(f"{count:>8,}  {how}")
    print(f"{sum(ends.values()):>8,}  mutations of seed {options.seed} in {time.monotonic() - started:.0f} s")
    print(f"{len(faults):>8,}  crashes, hangs, other errors and silent acceptances")
    print("\n".join(faults), end="")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
