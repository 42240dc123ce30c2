"""`stagec report`: the page in a browser, what it says, and what it refuses.

Modules: `stagec_insight/commands/report.py`, `stagec_insight/overview.py`, `stagec_insight/webpage.py`.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import chromium
from tests.building import build_model, checked, stagec
from tests.bundles import edited, edited_index, whole_index, with_index
from tests.signed import write_keys, write_provenance

MANIFEST = """
[manifest]
name = "m"
version = "1"
[meshes.grid]
axes = { data = 2, model = 2 }
[functions.layer]
entry = "model:layer"
args = ["f32[n,8]", "f32[8,6]"]
mesh = "grid"
in_shardings = ["P(data)", "P(None, model)"]
out_shardings = "P()"
buckets = { n = [2, 4] }
constraints = ["n % 2 == 0"]
targets = ["cpu-avx2"]
[functions.layer.limits.cpu-avx2]
peak_memory = "4KiB"
collectives = { all-gather = 9 }
[functions.twice]
entry = "model:twice"
args = ["f32[3]"]
targets = ["cpu-avx2"]
"""
MODEL = """
import jax.numpy as jnp
def layer(x, w):
    return jnp.tanh(x @ w)
def twice(x):
    return {"</script><b>": 2 * x}
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    return build_model(folder, MANIFEST, MODEL)


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Page]:
    if chromium.CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with chromium.page() as page:
        yield page


def opened(browser: chromium.Page, path: Path) -> float:
    browser.problems.clear()
    browser.requests.clear()
    browser.events.clear()
    browser.look(1200, 900)
    return browser.open(path)


OPEN = """
(async (name) => {
  const details = document.getElementById(name);
  details.open = true;
  await new Promise((done) => setTimeout(done, 100));
  return {
    charts: details.querySelectorAll("svg").length,
    text: details.innerText,
    labels: [...details.querySelectorAll("[role=img]")].map((one) => one.getAttribute("aria-label")),
    rows: [...details.querySelectorAll("figure tbody tr")].map((one) => one.textContent),
  };
})"""


def test_a_function_is_drawn_when_it_is_opened(bundle: Path, tmp_path: Path, browser: chromium.Page) -> None:
    page = tmp_path / "m.html"
    checked("report", bundle, "--output", page)
    opened(browser, page)
    assert browser.run("document.querySelectorAll('svg').length") == 0
    shown: dict[str, Any] = browser.run(f"{OPEN}('layer')")
    assert shown["charts"] == 3  # no roofline: an instruction set has no peak
    labels = [label.partition(".")[0] for label in shown["labels"]]
    assert labels == ["Memory by array", "Operations by kind", "Exchanges by axis"]
    assert "2 x" not in shown["text"]
    assert re.search(r"peak_memory\s+[\d.]+ (bytes|KiB)\s+4.00 KiB\s+\d+ %", shown["text"])
    assert any(row.startswith("dot") for row in shown["rows"])
    assert any("all-gather" in row and "data" in row for row in shown["rows"])
    assert any(row.startswith("argument") and "w f32[8,3]" in row for row in shown["rows"])
    assert "Kernels" not in shown["text"]
    # A name of the model's is text, whatever it is.
    assert "</script><b>" in browser.run(f"{OPEN}('twice').then((shown) => shown.rows.join())")
    assert browser.problems == []
    assert browser.requests == [page.as_uri()]


def test_kernels_are_shown(bundle: Path, tmp_path: Path, browser: chromium.Page) -> None:
    files = []
    for name in ("m.layer.cpu-avx2.n2", "m.layer.cpu-avx2.n4", "m.twice.cpu-avx2"):
        inventory = json.loads(bundle.with_name(f"{name}.inventory.json").read_text())
        inventory["kernels"] = [KERNEL, {**KERNEL, "name": "topk", **dict.fromkeys(KERNEL_FIGURES, "unknown")}]
        (tmp_path / name).write_text(json.dumps(inventory))
        files += ["--inventory", tmp_path / name]
    page = tmp_path / "m.html"
    checked("report", bundle, "--output", page, *files)
    opened(browser, page)
    rows = browser.run(f"{OPEN}('twice').then((shown) => shown.rows)")
    assert "fusion312.0 K128241.00 KiB16 bytes50 % (registers)1.00 µslaunch" in rows
    assert "topk3unknownunknownunknownunknownunknownunknownunknownunknown" in rows
    assert browser.problems == []


KERNEL_FIGURES = ("blocks", "threads", "registers", "shared_memory", "spills", "occupancy", "seconds", "bound")
KERNEL = {
    "name": "fusion",
    "instructions": ["fusion.1"],
    "runs": 3,
    "blocks": 12_000,
    "threads": 128,
    "registers": 24,
    "shared_memory": 1024,
    "spills": 16,
    "stack": 8,
    "occupancy": 0.5,
    "limited_by": "registers",
    "seconds": 1e-6,
    "bound": "launch",
}


def test_light_dark_print_and_a_phone(bundle: Path, tmp_path: Path, browser: chromium.Page) -> None:
    page = tmp_path / "m.html"
    checked("report", bundle, "--output", page)
    opened(browser, page)
    browser.run(f"{OPEN}('layer')")
    found = {}
    for name, look in {"light": (1200, 900), "dark": (1200, 900, "dark"), "phone": (360, 800)}.items():
        browser.look(*look)
        browser.run("new Promise((done) => setTimeout(done, 100))")
        browser.screenshot(tmp_path / f"{name}.png")
        found[name] = browser.run(
            "getComputedStyle(document.body).backgroundColor + document.querySelector('svg').outerHTML"
        )
        assert browser.run("document.documentElement.scrollWidth <= innerWidth"), name
    assert found["light"].startswith("rgb(255, 255, 255)")
    assert found["dark"].startswith("rgb(20, 22, 26)")
    assert ("#1a1c20" in found["light"], "#e8eaee" in found["dark"], "#1a1c20" in found["dark"]) == (True, True, False)
    browser.look(1200, 900, "dark", "print")
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert "#e8eaee" not in browser.run("document.querySelector('svg').outerHTML")
    assert browser.problems == []


def test_keys_and_screen_readers(bundle: Path, tmp_path: Path, browser: chromium.Page) -> None:
    page = tmp_path / "m.html"
    checked("report", bundle, "--output", page)
    opened(browser, page)
    browser.run("document.querySelector('#twice summary').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.send(
            "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
        )
    assert browser.run("document.getElementById('twice').open")
    browser.run(f"{OPEN}('twice')")
    nodes = browser.send("Accessibility.getFullAXTree")["nodes"]
    roles = [(one["role"]["value"], one.get("name", {}).get("value", "")) for one in nodes if not one["ignored"]]
    images = [name for role, name in roles if role in ("image", "img")]
    assert images
    assert all(images)
    assert ("region", "What it takes") in roles
    # All charts have their numbers in a table, and all tables have heads.
    figures = "[...document.querySelectorAll('figure')].filter((one) => one.querySelector('.chart'))"
    assert browser.run(f"{figures}.every((one) => one.querySelector('table thead th'))")


def test_two_bundles_side_by_side(bundle: Path, tmp_path: Path, browser: chromium.Page) -> None:
    def apply(members: dict[str, bytes]) -> None:
        index = whole_index(members)
        entry = index["functions"]["layer"]["executables"][0]
        description = json.loads(members[entry["description"]])
        description["analysis"]["peak_bytes"] *= 2
        members[entry["description"]] = json.dumps(description).encode()
        del index["functions"]["twice"]
        members.update(with_index(index, members))

    page = tmp_path / "two.html"
    other = edited(bundle, tmp_path / "other.aot", apply)
    # Members of the function that is gone would be listed and unused.
    checked("report", bundle, other, "--output", page)
    opened(browser, page)
    shown = browser.run(f"{OPEN}('layer')")
    assert re.search(r"Peak memory of a device\s.*\+100\.0 %", shown["text"])
    assert {f"Memory by array ({side})" for side in "AB"} <= set(shown["text"].splitlines())
    assert "only in A" in browser.run(f"{OPEN}('twice')")["text"]
    assert browser.problems == []


def test_a_thousand_functions_open_in_two_seconds(bundle: Path, tmp_path: Path, browser: chromium.Page) -> None:
    def many(index: dict[str, Any]) -> None:
        layer = index["functions"]["layer"]
        index["functions"] = {f"layer{i:03}": {**layer, "function": f"layer{i:03}"} for i in range(1000)}

    page = tmp_path / "many.html"
    shutil.copy(bundle.with_name("m.layer.cpu-avx2.n2.inventory.json"), tmp_path)
    checked("report", edited_index(bundle, tmp_path / "many.aot", many), "--output", page)
    assert opened(browser, page) < 2
    assert browser.run("document.querySelectorAll('.function').length") == 1000
    browser.run("filter.value = 'layer99'; filter.dispatchEvent(new Event('input'))")
    assert browser.run("document.getElementById('shown').textContent") == "10 shown"
    assert browser.run(f"{OPEN}('layer990')")["charts"] == 3
    assert browser.problems == []


def test_the_same_inputs_give_the_same_bytes(bundle: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        checked("report", bundle, "--output", tmp_path / f"{name}.html")
    first = (tmp_path / "first.html").read_bytes()
    assert first == (tmp_path / "second.html").read_bytes()
    assert not re.search(rb"""(?:src|href)=(?!"(?:#|data:))""", first.partition(b"<script>")[0])


def test_where_it_comes_from_and_who_signed(bundle: Path, tmp_path: Path) -> None:
    page, copy = tmp_path / "m.html", Path(shutil.copy(bundle, tmp_path))
    statement, _ = write_provenance(copy)
    private, public = write_keys(tmp_path, "release")
    _, stranger = write_keys(tmp_path, "stranger")
    checked("report", copy, "--output", page, "--statement", statement)
    text = page.read_text()
    assert "tests/zoo.toml, sha256 " in text
    assert "none was given. An unsigned bundle is code from the person who gave it to you." in text
    envelope = Path(f"{copy}.dsse.json")
    checked("sign", "--statement", statement, "--output", envelope, "--key", private, copy)
    checked("report", copy, "--output", page)
    assert "; not checked: no key was given" in page.read_text()
    checked("report", copy, "--output", page, "--key", public)
    assert "1 of 1 keys signed, 1 must: " in page.read_text()
    page.unlink()
    done = stagec("report", copy, "--output", page, "--key", stranger)
    assert (done.returncode, page.exists()) == (2, False)
    assert done.stderr.startswith(f"{copy}: signatures: ")
    done = stagec("report", bundle, "--output", page, "--statement", edited_statement(statement))
    assert (done.returncode, page.exists()) == (2, False)
    assert done.stderr.endswith("\n  give the statement of this bundle\n")


def edited_statement(path: Path) -> Path:
    """A statement about another bundle."""
    other = path.with_name("other.intoto.json")
    other.write_text(re.sub(r'(m\.aot",\s*"digest": \{\s*"sha256": ")(..)', r"\g<1>00", path.read_text()))
    assert other.read_text() != path.read_text()
    return other


def test_files_that_are_damaged_or_of_another_bundle(bundle: Path, tmp_path: Path) -> None:
    page = tmp_path / "m.html"
    damaged = tmp_path / "damaged.aot"
    data = bytearray(bundle.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    (tmp_path / "statement").write_text('{"_type": 1}')
    (tmp_path / "inventory").write_text("{}")
    cases: list[tuple[list[str | Path], str]] = [
        ([damaged], rf"{damaged}: .* is not what the index says.*\n  give a bundle \(\.aot\)\n"),
        ([bundle, tmp_path / "statement"], f"{tmp_path}/statement: not a bundle: .*"),
        (
            [bundle, "--statement", tmp_path / "statement"],
            f"{tmp_path}/statement: .*\n  give the statement of this bundle\n",
        ),
        ([bundle, "--inventory", tmp_path / "inventory"], f"{tmp_path}/inventory: not an inventory: .*\n  build .*\n"),
        ([bundle, "--signature", tmp_path / "inventory"], f"{tmp_path}/inventory: not a DSSE envelope: .*\n"),
        ([bundle, "--times", tmp_path / "inventory"], f"{tmp_path}/inventory: .*\n"),
        ([tmp_path / "none.aot"], f"{tmp_path}/none.aot: .*\n"),
    ]
    for words, message in cases:
        done = stagec("report", *words, "--output", page)
        assert (done.returncode, page.exists()) == (2, False), words
        assert re.fullmatch(message, done.stderr, re.DOTALL), done.stderr
