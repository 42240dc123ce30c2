"""Models that get other weights while requests run: none is lost, and each has the bits of one of the two.

Modules: `loader/replacing.py`.
"""

import asyncio
import gc
import http.client
import json
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from safetensors.numpy import load_file, save_file

import stagec
from compiler.extensions.serve.tests.processes import INFER, REQUEST, Clients, refused, serving
from compiler.extensions.serve.tests.test_serving_page import BLOCKS
from stagec_grpc import messages
from stagec_serve.batching import Batcher
from stagec_serve.metrics import Metrics
from stagec_serve.model import Model
from stagec_serve.refusal import RequestError
from stagec_serve.repository import Repository
from tests.signed import CURVES, write_curve

X = np.ones((3, 16), np.float32)


@pytest.fixture(scope="module")
def folder(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of weights: `same/a.safetensors`, which the bundle has, and `b.safetensors`."""
    folder = tmp_path_factory.mktemp("weights")
    arrays = load_file(served.parent.parent / "source" / "weights.safetensors")
    (folder / "same").mkdir()
    save_file(arrays, folder / "same" / "a.safetensors")
    save_file({name: 2 * array for name, array in arrays.items()}, folder / "b.safetensors")
    save_file({"w1": arrays["w2"]}, folder / "other.safetensors")
    return folder


def run(model: Model, work: Any) -> Any:
    async def with_batcher() -> Any:
        with ThreadPoolExecutor(2) as threads:
            return await work(Batcher(model, None, 1000, asyncio.Semaphore(2), threads, Metrics()))

    return asyncio.run(with_batcher())


def test_weights_change_under_load(models: dict[str, Model], bundle: stagec.Bundle, folder: Path) -> None:
    async def work(batcher: Batcher) -> None:
        repository = Repository(bundle, {}, folder)
        answers: list[bytes] = []
        ended = asyncio.Event()

        async def client() -> None:
            while not ended.is_set():
                (_, logits) = await batcher.call([X])
                answers.append(logits.tobytes())

        clients = [asyncio.create_task(client()) for _ in range(8)]
        before = 0
        for turn in range(40):
            (await repository.load(batcher, {"weights": ["b.safetensors", "same/a.safetensors"][turn % 2]}))()
            if turn == 9:
                gc.collect()
                before = len([*Path("/proc/self/fd").iterdir()])
        ended.set()
        await asyncio.gather(*clients)
        gc.collect()
        assert len({*answers}) <= 2 * len(batcher.model.buckets)  # buckets may round in different ways
        assert len({*answers}) >= 2
        assert len([*Path("/proc/self/fd").iterdir()]) <= before + 4

    run(models["predict"], work)


def test_an_answer_has_one_set_of_weights(models: dict[str, Model], bundle: stagec.Bundle, folder: Path) -> None:
    """Although its parts run one after the other, beside others, and the weights change meanwhile."""

    async def work(batcher: Batcher) -> None:
        model, rows = batcher.model, np.random.default_rng(3).standard_normal((32 * 60 + 5, 16)).astype(np.float32)
        changed = [bundle.with_weights(folder / name) for name in ("b.safetensors", "same/a.safetensors")]
        others = [model.of(each) for each in changed]
        wanted = set()
        for each in (model, *others):
            parts = [each.run([part])[1][0][1] for part in each.parts([rows])]
            wanted.add(np.concatenate(parts).tobytes())
        assert len(wanted) == 2
        seen = set()
        for turn in range(10):
            requests = [asyncio.create_task(batcher.call([rows])) for _ in range(2)]
            small = asyncio.create_task(batcher.call([X]))  # it waits in the queue while the weights change
            for number in range(6):
                await asyncio.sleep(0.003)
                batcher.model = others[(turn + number) % 2]
            later = asyncio.create_task(batcher.call([X]))  # of other weights: it must not run with the first
            seen |= {logits.tobytes() for _, logits in await asyncio.gather(*requests)}
            await asyncio.gather(small, later)
        assert seen == wanted
        for each in changed:
            each.close()

    run(models["predict"], work)


def test_requests_of_other_weights_do_not_share_a_call(
    models: dict[str, Model], bundle: stagec.Bundle, folder: Path
) -> None:
    async def work(batcher: Batcher) -> None:
        batcher.delay, batcher._patient = 0.1, True
        before = batcher.model
        with bundle.with_weights(folder / "b.safetensors") as other:
            first = asyncio.create_task(batcher.call([X]))
            await asyncio.sleep(0)
            batcher.model = after = before.of(other)
            _, mine = await batcher.call([X])
            _, of_first = await first
            assert of_first.tobytes() == before.run([[X]])[1][0][1].tobytes()
            assert mine.tobytes() == after.run([[X]])[1][0][1].tobytes()
            assert mine.tobytes() != of_first.tobytes()

    run(models["predict"], work)


def test_the_other_models_keep_theirs(models: dict[str, Model], bundle: stagec.Bundle, folder: Path) -> None:
    async def work(batcher: Batcher) -> None:
        model = batcher.model
        (
            await Repository(bundle, {}, folder).load(
                batcher, {"weights": "b.safetensors", "file": "weights.safetensors"}
            )
        )()
        assert (batcher.model.rows, batcher.model.largest) == (model.rows, model.largest)
        before, after = model.run([[X]])[1][0], batcher.model.run([[X]])[1][0]
        assert any(one.tobytes() != other.tobytes() for one, other in zip(before, after, strict=True))
        with bundle.with_weights(folder / "b.safetensors") as wanted:
            padded = np.zeros((8, 16), np.float32)
            padded[:3] = X
            assert after[1].tobytes() == wanted["predict"](padded)["logits"][:3].tobytes()

    run(models["predict"], work)


@pytest.mark.parametrize(
    ("parameters", "code", "what"),
    [
        ({}, "request", 'write "parameters": {"weights": "NAME.safetensors"}'),
        ({"weights": 1}, "request", "weights"),
        ({"weights": "b.safetensors", "x": "y"}, "request", "x"),
        ({"weights": "../b.safetensors"}, "request", "not the path of a .safetensors file below the server's folder"),
        ({"weights": "/b.safetensors"}, "request", "below the server's folder"),
        ({"weights": "out.safetensors"}, "request", "below the server's folder"),
        ({"weights": "b.aot"}, "request", "below the server's folder"),
        ({"weights": "loop.safetensors"}, "request", "below the server's folder"),
        ({"weights": "sparse.safetensors"}, "unavailable", "w1 is f32[1099511627776]; expected f32[16,24]"),
        ({"weights": "c.safetensors"}, "unavailable", "No such file"),
        ({"weights": "other.safetensors"}, "unavailable", "it lacks b1 (f32[24])"),
        (
            {"weights": "b.safetensors", "file": "x.safetensors"},
            "request",
            "it takes its weights from weights.safetensors",
        ),
    ],
)
def test_what_is_refused_changes_nothing(
    models: dict[str, Model], bundle: stagec.Bundle, folder: Path, parameters: Any, code: str, what: str
) -> None:
    for name, to in {"out.safetensors": "/etc/passwd", "loop.safetensors": "loop.safetensors"}.items():
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(to)
    with (folder / "sparse.safetensors").open("wb") as sparse:  # 4 TiB of zeros, which take no place
        header = json.dumps({"w1": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
        sparse.write(len(header).to_bytes(8, "little") + header)
        sparse.truncate(8 + len(header) + 2**42)

    async def work(batcher: Batcher) -> None:
        model = batcher.model
        with pytest.raises(RequestError) as refusal:
            (await Repository(bundle, {}, folder).load(batcher, parameters))()
        assert (refusal.value.code, what in str(refusal.value)) == (code, True), str(refusal.value)
        assert batcher.model is model

    run(models["predict"], work)


def test_a_model_without_weights_takes_none(models: dict[str, Model], bundle: stagec.Bundle, folder: Path) -> None:
    async def work(batcher: Batcher) -> None:
        with pytest.raises(RequestError, match="scaled: no argument of it is bound to weights") as refusal:
            (await Repository(bundle, {}, folder).load(batcher, {"weights": "b.safetensors"}))()
        assert refusal.value.code == "request"

    run(models["scaled"], work)


def test_loading_one_model_keeps_the_weights_of_another(served: Path, folder: Path, tmp_path: Path) -> None:
    """And what is unloaded stays so."""
    place = tmp_path / "models.aot"
    shutil.copy(served, place)
    shutil.copy(folder / "b.safetensors", tmp_path)
    with serving(place, "--control") as server:

        def change(name: str, what: str = "load", **parameters: str) -> int:
            given = {"parameters": parameters} if parameters else None
            return server.ask("POST", f"/v2/repository/models/{name}/{what}", given)[0]

        def logits() -> Any:
            return server.ask("POST", INFER, REQUEST)[1]["outputs"]

        def digest() -> str:
            connection = http.client.HTTPConnection(server.host, server.port)
            connection.request("POST", INFER, json.dumps(REQUEST))
            answer = connection.getresponse()
            answer.read()
            connection.close()
            return str(answer.getheader("stagec-digest"))

        first = logits()
        of_bundle = digest()
        assert len(of_bundle) == 64
        assert server.counted(f'stagec_model{{digest="{of_bundle}".*model="predict"') == 1
        assert change("predict", weights="b.safetensors") == 200
        assert digest() != of_bundle
        assert server.counted(f'stagec_model{{digest="{digest()}".*model="predict"') == 1
        changed = logits()
        assert changed != first
        assert change("filled", "unload") == 200
        assert change("scaled") == 200
        assert logits() == changed
        assert server.ask("GET", "/v2/models/filled/ready")[0] == 503
        assert change("predict") == 200  # its own weights again
        assert logits() == first
        assert digest() == of_bundle
        assert server.ask("GET", "/v2/models/filled/ready")[0] == 503
        errors = server.end(signal.SIGINT)
    assert "predict has the weights of b.safetensors from the next request on; its digest is " in errors


def test_with_keys_only_signed_files_are_loaded(
    models: dict[str, Model], bundle: stagec.Bundle, folder: Path, tmp_path: Path
) -> None:
    _, public = write_curve(tmp_path, "key", CURVES["P-256"])

    async def work(batcher: Batcher) -> None:
        with pytest.raises(RequestError, match=r"b.safetensors.sig"):
            (await Repository(bundle, {}, folder, [public]).load(batcher, {"weights": "b.safetensors"}))()

    run(models["predict"], work)


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_clients_change_weights_over_both_protocols(served: Path, folder: Path, tmp_path: Path) -> None:
    """While others ask: none of their requests is lost."""
    place = tmp_path / "models.aot"
    shutil.copy(served, place)
    for name in ("b.safetensors", "same/a.safetensors"):
        shutil.copy(folder / name, tmp_path)
    load = "/v2/repository/models/predict/load"
    with serving(place, "--control", "--grpc-port", "0") as server, Clients(server) as clients:

        def logits() -> Any:
            status, answer = server.ask("POST", INFER, REQUEST)
            assert status == 200
            return np.float32(answer["outputs"][1]["data"])  # near each other in all buckets

        before = logits()
        (command,) = (block for _, block in BLOCKS if "v2.safetensors" in block)
        command = command.replace("8000", str(server.port)).replace("v2.", "b.")
        done = subprocess.run(command, shell=True, check=True, capture_output=True, text=True)
        assert done.stdout == "{}", done
        assert not np.allclose(before, logits(), rtol=1e-3)
        with triton.InferenceServerClient(server.grpc) as client:
            request = messages.classes()["RepositoryModelLoadRequest"](model_name="predict")
            request.parameters["weights"].string_param = "a.safetensors"
            call = client._channel.unary_unary(f"/{messages.service().full_name}/RepositoryModelLoad")
            call(request.SerializeToString())
            np.testing.assert_allclose(before, logits(), rtol=1e-3)
            client.unload_model("predict")
            assert not client.is_model_ready("predict")
            client.load_model("predict")
        for turn in range(10):
            name = ["b.safetensors", "a.safetensors"][turn % 2]
            assert server.ask("POST", load, {"parameters": {"weights": name}})[0] == 200
        status, answer = server.ask("POST", load, {"parameters": {"config": "{}"}})
        assert (status, 'write "parameters": {"weights": "NAME.safetensors"}' in answer["error"]) == (400, True)
        assert server.ask("POST", load, b"[]")[0] == 400
        assert server.ask("POST", load, {"parameters": {"weights": "c.safetensors"}})[0] == 503
    assert clients.answered.keys() <= {200, 503}  # while it was unloaded
    assert clients.answered[200] > 20
    assert len(clients.seen) >= 2
    with serving(place) as server:
        assert server.ask("POST", load, {"parameters": {"weights": "b.safetensors"}})[0] == 501


def test_adapters_are_models_of_their_own(served: Path, folder: Path, bundle: stagec.Bundle, tmp_path: Path) -> None:
    """They share what is the same, are mapped when they are first asked for, and follow a swap."""
    with serving(
        served, "--adapter", f"b={folder / 'b.safetensors'}", "--adapter", f"a={folder}/same/a.safetensors"
    ) as server:
        assert "predict.b 1.2.0: gathered along batch to 32: its rows are independent, as is proven\n" in server.told
        assert "learned.a 1.2.0: not gathered: it keeps state: learned\n" in server.told
        assert "scaled.b" not in server.told
        maps = Path(f"/proc/{server.pid}/maps")
        assert "b.safetensors" not in maps.read_text("utf-8")
        answers = {}
        for name in ("predict", "predict.a", "predict.b"):
            status, answers[name] = server.ask("POST", f"/v2/models/{name}/infer", REQUEST)
            assert (status, answers[name].pop("model_name")) == (200, name)
        assert "b.safetensors" in maps.read_text("utf-8")
        assert answers["predict"] == answers["predict.a"]
        padded = np.zeros((8, 16), np.float32)
        padded[:3] = np.float32(REQUEST["inputs"][0]["data"]).reshape(3, 16)  # type: ignore[index]
        with bundle.with_weights(folder / "b.safetensors") as wanted:
            logits = wanted["predict"](padded)["logits"][:3]
        assert np.float32(answers["predict.b"]["outputs"][1]["data"]).tobytes() == logits.tobytes()
        assert server.counted('stagec_requests_total{.*"predict.b"') == 1
    assert "x.safetensors: cannot be read: No such file" in refused(served, "--adapter", "b=x.safetensors")
    assert "--adapter b: expected a name of letters, digits, _ and -, and a file" in refused(served, "--adapter", "b")
    other = refused(served, "--adapter", f"b={folder / 'b.safetensors'}", "--adapter-of", "x.safetensors")
    assert other.endswith("\n--adapter-of is x.safetensors: the files are weights.safetensors\n  name one of them\n")
