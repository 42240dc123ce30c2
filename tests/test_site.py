"""The site of the pages: it builds, all its links lead somewhere, and it can be served while pages are edited."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests import chromium
from tests.building import ROOT
from tools.pages.generated import PAGES, PYTHON, Page

pytest.importorskip("mkdocs", reason="tools/pages/site.lock is not installed")
SITE = [sys.executable, "-B", "-m", "tools.pages"]
ENVIRONMENT = {
    **os.environ,
    "BUILD_WORKSPACE_DIRECTORY": str(ROOT),
    "NO_MKDOCS_2_WARNING": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [*SITE, "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if page.path in PYTHON], ids=lambda page: page.path)
def test_the_generated_part_is_current(page: Page) -> None:
    """As that of other pages, in test_pages.py; this one takes what builds the site."""
    assert (ROOT / page.path).read_text("utf-8") == page.current(ROOT), "run: ./bazelw run //docs:generate"


def test_readme_is_the_first_page(site: Path) -> None:
    assert '<h1 id="stagec">' in (site / "index.html").read_text("utf-8")


def test_what_pages_link_outside_of_docs_is_on_the_site(site: Path) -> None:
    assert (site / "source" / "examples" / "digits" / "digits.toml.txt").read_text("utf-8").startswith("#:schema")
    assert 'src="source/benchmarks/results.svg"' in (site / "index.html").read_text("utf-8")


def test_every_link_leads_to_a_file(site: Path) -> None:
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        for link in re.findall(r'(?:href|src)="([^"#:]+)["#]', page.read_text("utf-8")):
            assert (page.parent / link.partition("?")[0]).exists(), f"{page.relative_to(site)}: {link}"


@pytest.mark.skipif(chromium.CHROMIUM is None, reason="Chromium is not installed")
def test_a_search_finds_the_key_of_a_manifest(site: Path) -> None:
    """First of all, in the site's index, as the theme's own worker reads it."""
    keys = ("bind", "buckets", "compiler_options", "limits", "padding", "targets")
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.js")
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    setup = {"type": 0, "data": {**index, "options": {}}}
    with chromium.page() as page:
        page.run("var answers = []; addEventListener = (_, f) => (ask = f); postMessage = (a) => answers.push(a); 0")
        page.run(f"{worker.read_text('utf-8')}; 0")
        page.run(f"ask({{data: {json.dumps(setup)}}}).then(() => 0)")
        for key in keys:
            page.run(f"ask({{data: {json.dumps({'type': 2, 'data': key})}}}).then(() => 0)")
        found = page.run("answers.slice(1).map(answer => answer.data.items[0].map(section => section.location))")
    assert [key for key, places in zip(keys, found, strict=True) if f"manifest.html#{key}" not in places] == []


def test_it_is_served() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = [*SITE, "serve", "--dev-addr", address]
    server = subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(300):
            try:
                text = urllib.request.urlopen(f"http://{address}/", timeout=10).read().decode()
                break
            except urllib.error.URLError:
                assert server.poll() is None, server.communicate()[1]
                time.sleep(0.1)
        assert "stagec" in text
    finally:
        server.terminate()
        server.communicate()
