"""docs/serving.md: each of its blocks, in order, and each name in its tables.

Modules: `stagec_serve/commands/serve.py`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compiler.extensions.serve.tests.processes import PROGRAM, Server, serving
from stagec_serve.commands import serve
from stagec_serve.metrics import Metrics
from tests.building import ROOT, build

PAGE = (ROOT / "docs" / "serving.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_every_block(tmp_path: Path) -> None:
    blocks = [(kind, block) for kind, block in BLOCKS if kind != "yaml"]  # test_kubernetes.py has these
    kinds = [kind for kind, _ in blocks]
    first, with_state = ["sh", "python", "toml", "sh", "text", "sh", "json"], ["toml", "python", "python", "text"]
    assert kinds == [*first, "python", "text", "sh", "python", "text", *with_state, "sh"]
    install, model, manifest, start, started, curl, answered, *clients, _ = (block for _, block in blocks)
    install_grpc = clients.pop(2)
    manifest, model = (f"{one}\n\n{clients.pop(4)}" for one in (manifest, model))  # those of the function with state
    assert " ./compiler ./compiler/extensions/serve " in install  # tests/test_packaging.py runs both
    assert install_grpc.endswith(" ./compiler/extensions/grpc\n")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "net.py").write_text(model)
    (tmp_path / "models" / "models.toml").write_text(manifest)
    out = tmp_path / "out"
    out.mkdir()
    bundle = build("models/models.toml", out, tmp_path)
    program, command, file, *options = start.split()
    assert (program, command, file, options) == ("stagec", "serve", bundle.name, ["--port", "8000"])
    server = Server(bundle, "--grpc-port", "0")
    try:
        port = str(server.port)
        rpc = f"listening on grpc://{server.grpc}\n"
        kept = "observe 1.0.0: not gathered: it keeps state: seen\n"
        assert server.told.replace(rpc, "").replace(kept, "") == started.replace("8000", port)
        done = subprocess.run(curl.replace("8000", port), shell=True, check=True, capture_output=True, text=True)
        assert json.loads(done.stdout) == json.loads(answered)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        for client, printed in zip(clients[::2], clients[1::2], strict=True):
            code = client.replace("8000", port).replace("127.0.0.1:8001", server.grpc)
            done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
            assert (done.stdout, done.stderr) == (printed, "")
        paths = re.findall(r"^\| `(?:GET|POST) (/\S+)`", PAGE, re.MULTILINE)
        assert len(paths) > 5
        for path in paths:
            method = "POST" if path.endswith(("index", "infer")) else "GET"
            assert server.ask(method, path.replace("MODEL", "predict"), b"")[0] != 404
    finally:
        server.end()


def test_options_are_those_of_the_command() -> None:
    words = [sys.executable, "-c", PROGRAM, "serve", "--help"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "300"}
    shown = subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout
    known = {*re.findall(r"--[a-z]+", shown)}
    assert {*re.findall(r"`(--[a-z]+)", PAGE)} <= known
    defaults = {"queue": "1000", "body": "64 MiB", "memory": "512 MiB", "timeout": "60 s", "connections": "1000"}
    for name, default in defaults.items():
        assert re.search(rf"^\| `--{name}` \| {default}\b", PAGE, re.MULTILINE)
        assert re.search(rf"--{name} [^(]*\(default: {default.removesuffix(' s')}\)", shown), name
    assert serve.__doc__ is not None
    assert serve.__doc__.split("\n")[0] in " ".join(shown.split())


def test_metrics_are_those_of_the_server() -> None:
    named = {*re.findall(r"^\| `(stagec_\w+)`", PAGE, re.MULTILINE)}
    families = re.findall(r"^# TYPE (stagec_\w+) ", Metrics().as_text().decode(), re.MULTILINE)
    assert named == {name for name in families if not name.endswith("_created")}


def test_the_dashboard_asks_for_metrics_that_there_are(served: Path) -> None:
    """Every name in its queries, with labels that it has; and no metric of ours is left out."""
    dashboard = json.loads((ROOT / "docs" / "serving.dashboard.json").read_text("utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"\b(?:stagec|process)_\w+", query)}
    with serving(served) as server:
        step = {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
        inputs = [{"name": "x", "shape": [3], "datatype": "FP32", "data": [1, 2, 3]}]
        for parameters in (step, {}):
            server.ask("POST", "/v2/models/add/infer", {"inputs": inputs, "parameters": parameters})
        _, text = server.ask("GET", "/metrics")
        offered = (
            r'stagec_model{digest="[0-9a-f]{64}",kind="executable",model="predict",target="cpu",version="1.2.0"} 1.0'
        )
        assert re.search(offered, text)
        assert server.counted('stagec_loads_total{outcome="loaded"}') == 1
        assert server.counted("stagec_load_seconds") > 0
    labels: dict[str, set[str]] = {}
    for name, given in re.findall(r"^(\w+)(?:{(.*)})? [^ ]+$", text, re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r"(\w+)=", given))
    assert asked <= labels.keys()
    for query in queries:
        for by in re.findall(r"by \(([^)]*)\)", query):
            (name, *_) = re.findall(r"\bstagec_\w+", query)
            assert {word.strip() for word in by.split(",")} <= labels[name], query
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in labels if name.startswith("stagec")}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert {name for name in families if not name.endswith("_created")} <= shown
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
