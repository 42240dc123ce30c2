"""The functions of a bundle: a line each, read when somebody asks for it."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagec.bundle.archive import INDEX, Archive, encode_index
from stagec.bundle.index import FUNCTIONS
from stagec.bundle.members import encode, members_table
from stagec.core.data import strict_json
from stagec.core.messages.refusal import LoadError
from stagec.trust import attestation
from tests.bundles import with_index

Lines = list[bytes]


def changed(bundle: Path, change: Callable[[dict[str, Any], Lines], object], digests: bool = True) -> bytes:
    """A bundle with another index, and other lines of its functions.

    digests: whether the index gets starts and digests of the lines, as far as it lists functions.
    """
    archive = Archive(bundle)
    members = {name: archive[name] for name in archive.index["members"]}
    index, lines = json.loads(archive[INDEX]), members[FUNCTIONS].splitlines(keepends=True)
    change(index, lines)
    members[FUNCTIONS] = b"".join(lines)
    start = 0
    for listed, line in zip(index["functions"].values(), lines, strict=False) if digests else ():
        listed |= {"start": start, "sha256": hashlib.sha256(line).hexdigest()}
        start += len(line)
    text = encode_index({**index, "members": members_table(members)})
    return encode({INDEX: text, **members})


def test_a_function_is_read_when_it_is_asked_for(zoo: Path) -> None:
    archive = Archive(zoo)
    functions = archive.index["functions"]
    assert not functions._entries
    first, second, *_ = functions
    assert functions.variants[first] == (first.partition("-")[0], first.partition("-")[2])
    assert not functions._entries
    entry = functions[second]
    assert [*functions._entries] == [second]
    line = archive[FUNCTIONS].splitlines(keepends=True)[1]
    assert {**json.loads(line), "function": second, "variant": ""} == entry
    with pytest.raises(KeyError):
        functions["nobody"]


def test_written_again_it_is_the_same_bundle(zoo: Path) -> None:
    archive = Archive(zoo)
    members = {name: archive[name] for name in archive.index["members"]}
    assert encode(with_index(archive.index, members)) == zoo.read_bytes()


def test_other_functions_can_be_called_where_one_is_damaged(zoo: Path, tmp_path: Path) -> None:
    """A bit of its line is another one. Nobody reads it but who asks for the function, or checks all."""
    damaged, good, *_ = Archive(zoo).index["functions"]
    data = bytearray(zoo.read_bytes())
    data[Archive(zoo)._entries[FUNCTIONS].start] ^= 1
    archive = Archive("x", bytes(data))
    assert archive.index["functions"][good] == Archive(zoo).index["functions"][good]
    with pytest.raises(LoadError) as refusal:
        archive.index["functions"][damaged]
    what = f"x: {FUNCTIONS}: the line of {damaged} is not what the index says: its sha256 is "
    assert (refusal.value.code, str(refusal.value)[: len(what)]) == ("digest", what)
    with pytest.raises(LoadError, match=f"x: {FUNCTIONS} is not what the index says"):
        archive.check_all()


def test_what_is_read_is_what_was_checked(zoo: Path, tmp_path: Path) -> None:
    """A file that changes after it was opened: the line is hashed, and the same bytes are parsed."""
    path = tmp_path / "x.aot"
    path.write_bytes(zoo.read_bytes())
    archive = Archive(path)
    first, second, *_ = archive.index["functions"]
    kept = archive.index["functions"][first]
    with path.open("r+b") as file:
        file.seek(archive._entries[FUNCTIONS].start)
        file.write(b" " * archive._entries[FUNCTIONS].size)
    assert archive.index["functions"][first] is kept
    with pytest.raises(LoadError, match="is not what the index says"):
        archive.index["functions"][second]


def test_signatures_need_no_function(zoo: Path) -> None:
    """What was signed is the bytes of the index, which has the digest of every line."""
    archive = Archive(zoo)
    name = f"{archive.index['name']}.aot"
    subjects = attestation.subjects(archive)
    assert subjects[f"{name}/{INDEX}"] == hashlib.sha256(archive[INDEX]).hexdigest()
    assert subjects[f"{name}/{FUNCTIONS}"] == hashlib.sha256(archive[FUNCTIONS]).hexdigest()
    assert not archive.index["functions"]._entries
    other = Archive("x", changed(zoo, lambda _, lines: lines.reverse()))
    assert attestation.subjects(other)[f"{name}/{INDEX}"] != subjects[f"{name}/{INDEX}"]


def of_first(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any], Lines], object]:
    def apply(index: dict[str, Any], lines: Lines) -> None:
        entry = json.loads(lines[0])
        change(entry)
        lines[0] = strict_json.line(entry)

    return apply


def spelled(old: str, new: str) -> Callable[[dict[str, Any], Lines], object]:
    def apply(index: dict[str, Any], lines: Lines) -> None:
        assert old.encode() in lines[0]
        lines[0] = lines[0].replace(old.encode(), new.encode(), 1)

    return apply


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (spelled('"static":', '"static" :'), "it is not spelled as stagec writes it"),
        (spelled('"static":{', '"static":{},"static":{'), "the key 'static' appears twice"),
        (spelled('"nr_devices":1', '"nr_devices":01'), "Expecting ',' delimiter"),
        (spelled('"nr_devices":1', f'"nr_devices":{10**30}'), "has more than 64 bits"),
        (spelled('"nr_devices":1', '"nr_devices":NaN'), "the number NaN is not finite"),
        (spelled("{", '{"x":"\\ud800",'), "surrogates not allowed"),
        (lambda index, lines: lines.__setitem__(0, b"[]\n"), "it is not spelled as stagec writes it"),
        (lambda index, lines: lines.__setitem__(0, lines[0] + b"\n"), "it is not spelled as stagec writes it"),
        (lambda index, lines: lines.__setitem__(0, lines[0].rstrip()), "it is not spelled as stagec writes it"),
        (lambda index, lines: lines.__setitem__(0, lines[0] * 2), "Extra data"),
        (of_first(lambda entry: entry.update(variant="v")), "the index has its function and variant, not this line"),
        (of_first(lambda entry: entry.pop("executables")), "the key 'executables' is missing"),
        (of_first(lambda entry: entry.update(more=1)), "more: no such key is known"),
        (of_first(lambda entry: entry.update(in_avals=["f32[01]"])), "in_avals[0]: "),
        (of_first(lambda entry: entry.update(exported="nothing")), "exported: there is no member 'nothing'"),
        (of_first(lambda entry: entry.update(static=json.loads("[" * 300 + "]" * 300))), "nested deeper than 200"),
    ],
)
def test_a_line_that_is_refused(zoo: Path, change: Callable[[dict[str, Any], Lines], object], what: str) -> None:
    """When its function is asked for; the others can be called."""
    archive = Archive("x", changed(zoo, change))
    first, *others = archive.index["functions"]
    for check in (lambda: archive.index["functions"][first], archive.check_all):
        with pytest.raises(LoadError) as refusal:
            check()
        assert (refusal.value.code, str(refusal.value).startswith(f"x: {FUNCTIONS}: ")) == ("format", True)
        assert what in str(refusal.value)
    assert all(archive.index["functions"][name] for name in others)


def listed(edit: Callable[[dict[str, Any]], object], number: int = 1) -> Callable[[dict[str, Any], Lines], object]:
    return lambda index, lines: edit([*index["functions"].values()][number])


ONE_AFTER_THE_OTHER = "functions: expected their lines one after the other, from 0 to the"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (listed(lambda row: row.update(start=row["start"] + 1), 0), ONE_AFTER_THE_OTHER),
        (listed(lambda row: row.update(start=0)), ONE_AFTER_THE_OTHER),
        (listed(lambda row: row.update(start=10**9)), ONE_AFTER_THE_OTHER),
        (listed(lambda row: row.update(start=-1), 0), "start: expected a whole number, not "),
        (lambda index, lines: index["functions"].clear(), ONE_AFTER_THE_OTHER),
        (lambda index, lines: lines.clear(), ONE_AFTER_THE_OTHER),
        (listed(lambda row: row.update(sha256="0")), "sha256: expected a SHA-256"),
        (listed(lambda row: row.pop("start")), "the key 'start' is missing"),
        (listed(lambda row: row.update(more=1)), "more: no such key is known"),
        (listed(lambda row: row.update(variant="v")), "it belongs to "),
        (listed(lambda row: row.update(function="é")), "function: expected a name of letters"),
        (lambda index, lines: index["functions"].update({"1a": {}}), "expected a name"),
        (lambda index, lines: index.update(functions=[]), "functions: expected an object"),
    ],
)
def test_a_list_of_functions_that_is_refused(
    zoo: Path, change: Callable[[dict[str, Any], Lines], object], what: str
) -> None:
    with pytest.raises(LoadError) as refusal:
        Archive("x", changed(zoo, change, digests=False))
    assert refusal.value.code == "format"
    assert str(refusal.value).startswith(f"x: {INDEX}: ")
    assert what in str(refusal.value)


def test_lines_that_belong_to_others(zoo: Path) -> None:
    """The names of two functions that are exchanged are those of other lines: what is read fits the signed names."""

    def exchange(index: dict[str, Any], lines: Lines) -> None:
        first, second, *_ = index["functions"].values()
        first["sha256"], second["sha256"] = second["sha256"], first["sha256"]

    archive = Archive("x", changed(zoo, exchange, digests=False))
    for name in [*archive.index["functions"]][:2]:
        with pytest.raises(LoadError, match=f"the line of {name} is not what the index says"):
            archive.index["functions"][name]


def test_a_bundle_without_the_member(zoo: Path) -> None:
    archive = Archive(zoo)
    members = {name: archive[name] for name in archive.index["members"] if name != FUNCTIONS}
    text = encode_index({**json.loads(archive[INDEX]), "members": members_table(members)})
    with pytest.raises(LoadError, match=rf"functions: there is no member '{FUNCTIONS}'"):
        Archive("x", encode({INDEX: text, **members}))
