"""Sequences: state that stays on the device between requests, as tritonclient asks for it.

The transformer is that of examples/, smaller; its answers have the bits of a loop of calls.
"""

import asyncio
import copy
import functools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils
from safetensors.numpy import save_file

import stagec
from compiler.extensions.serve.tests.processes import Server, serving, threads, until
from compiler.extensions.serve.tests.test_service import put, version_of
from examples.transformer import model as transformer
from stagec_serve import server as server_module
from stagec_serve.batching import Batcher
from stagec_serve.metrics import Metrics
from stagec_serve.model import Model
from stagec_serve.refusal import RequestError
from stagec_serve.sequences import Sequences, Step, step_of
from tests.building import ROOT, build

ONES = np.ones(3, np.float32)
SIZES = {"vocabulary": 32, "width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head": 8, "hidden": 16}
POSITIONS = 12


class Owner:
    """Counts who uses it."""

    users = 0

    def enter(self) -> None:
        self.users += 1

    def leave(self) -> None:
        self.users -= 1


class Setup:
    """A queue of each model, and sequences."""

    def __init__(self, models: dict[str, Model], threads: Any, most: int, idle: float) -> None:
        self.metrics, self.owner = Metrics(), Owner()
        self.sequences = Sequences(most, idle, self.metrics)
        free = asyncio.Semaphore(2)
        self.batchers = {name: Batcher(model, None, 100, free, threads, self.metrics) for name, model in models.items()}

    async def call(self, name: str, array: Any, sequence: int | str, start: bool = False, end: bool = False) -> Any:
        model, step = self.batchers[name].model, Step(sequence, start, end)
        arrays = [] if array is None else [array]
        begin = functools.partial(self.sequences.begin, model, step, self.owner)
        return (await self.batchers[name].call(arrays, begin))[0]

    def ended(self) -> Counter[str]:
        lines = [line for line in self.metrics.as_text().decode().splitlines() if "sequences_ended_total{" in line]
        ended: Counter[str] = Counter()
        for line in lines:
            ended[line.split('"')[1]] += int(float(line.split()[-1]))
        return ended

    async def wait(self, seconds: float) -> None:
        """Let the loop's clock be so much later."""
        loop, now = asyncio.get_running_loop(), asyncio.get_running_loop().time
        loop.time = lambda: now() + seconds  # type: ignore[method-assign]
        for _ in range(3):
            await asyncio.sleep(0)


def run(models: dict[str, Model], work: Callable[[Setup], Any], most: int = 10, idle: float = 60) -> None:
    async def with_setup() -> None:
        with ThreadPoolExecutor(2) as pool:
            setup = Setup(models, pool, most, idle)
            await work(setup)

    asyncio.run(with_setup())


def test_a_sequence_goes_on_where_it_was(models: dict[str, Model]) -> None:
    """From zeros, from what another function gives, and from weights; two of them know nothing of each other."""

    async def work(setup: Setup) -> None:
        for turn in range(3):
            for sequence, x in ((1, ONES), ("1", 10 * ONES)):
                doubled = await setup.call("add", x, sequence, start=not turn)
                np.testing.assert_array_equal(doubled, 2 * turn * x, strict=True)
        assert setup.owner.users == 2
        np.testing.assert_array_equal(await setup.call("peek", None, 1), 3 * ONES)
        assert await setup.call("begin", 5 * ONES, 1, start=True) == 15
        np.testing.assert_array_equal(await setup.call("add", ONES, 1), 10 * ONES)
        np.testing.assert_array_equal(await setup.call("peek", None, 1, end=True), 6 * ONES)
        with pytest.raises(RequestError, match="add: sequence 1 does not exist: it has ended, or begins with") as error:
            await setup.call("add", ONES, 1)
        assert error.value.code == "not-found"
        assert setup.ended() == {"restarted": 1, "end": 1}
        losses = [await setup.call("learned", np.float32(0.5), 1, start=not turn) for turn in range(3)]
        again = [await setup.call("learned", np.float32(0.5), 2, start=not turn) for turn in range(2)]
        assert losses[0] == 4 * losses[1] == 16 * losses[2]
        assert again == losses[:2]
        await setup.call("learned", np.float32(0.5), 2, end=True)

    run(models, work)


def test_one_request_of_a_sequence_at_a_time(models: dict[str, Model]) -> None:
    async def work(setup: Setup) -> None:
        first = asyncio.create_task(setup.call("add", ONES, 7, start=True))
        await asyncio.sleep(0)
        for name, start in (("add", False), ("add", True), ("peek", False)):
            with pytest.raises(RequestError, match="sequence 7 has a request that is not answered yet") as error:
                await setup.call(name, None if name == "peek" else ONES, 7, start=start)
            assert error.value.code == "conflict"
        await first
        np.testing.assert_array_equal(await setup.call("peek", None, 7), ONES)

    run(models, work)


def test_a_request_that_does_not_run_changes_nothing(models: dict[str, Model]) -> None:
    async def work(setup: Setup) -> None:
        await setup.call("add", ONES, 7, start=True)
        holding = [setup.batchers["filled"].call([np.float32(1)]) for _ in range(4)]
        others = asyncio.gather(*holding)
        await asyncio.sleep(0)
        for start in (False, True):
            waiting = asyncio.create_task(setup.call("add", ONES, 7, start=start))
            new = asyncio.create_task(setup.call("add", ONES, 8, start=True))
            await asyncio.sleep(0)
            waiting.cancel()
            new.cancel()
            await asyncio.wait([waiting, new])
            await asyncio.sleep(0)
        np.testing.assert_array_equal(await setup.call("peek", None, 7), ONES)
        with pytest.raises(RequestError, match="sequence 8 does not exist"):
            await setup.call("peek", None, 8)
        await others
        wrong = await asyncio.gather(setup.call("add", np.ones(4, np.float32), 7), return_exceptions=True)
        assert isinstance(wrong[0], RequestError)
        np.testing.assert_array_equal(await setup.call("peek", None, 7), ONES)

    run(models, work)


def test_a_state_that_a_failed_call_has_consumed_is_gone(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(setup: Setup) -> None:
        await setup.call("add", ONES, 7, start=True)
        calls = Model._call

        def failing(self: Model, arrays: Any, kept: Any = None) -> Any:
            given = dict(kept)
            calls(self, arrays, given)
            raise ValueError("after the call")

        monkeypatch.setattr(Model, "_call", failing)
        with pytest.raises(RequestError, match="add failed; the server's log says why"):
            await setup.call("add", ONES, 7)
        with pytest.raises(RequestError, match="peek failed"):
            await setup.call("peek", None, 9, start=True)
        monkeypatch.undo()
        for sequence in (7, 9):
            with pytest.raises(RequestError, match=f"sequence {sequence} does not exist"):
                await setup.call("peek", None, sequence)
        assert (setup.ended(), setup.owner.users) == ({"failed": 2}, 0)

    run(models, work)


def test_limits_of_number_and_of_time(models: dict[str, Model]) -> None:
    async def work(setup: Setup) -> None:
        for sequence in (1, 2):
            await setup.call("add", ONES, sequence, start=True)
        with pytest.raises(RequestError, match="sequence 3: 2 others have state already; try again later") as error:
            await setup.call("add", ONES, 3, start=True)
        assert error.value.code == "busy"
        await setup.call("learned", np.float32(0.5), 3, start=True)  # another state
        for _ in range(4):
            await setup.wait(20)
            await setup.call("add", ONES, 1)
        with pytest.raises(RequestError, match="sequence 2 does not exist"):
            await setup.call("add", ONES, 2)
        await setup.call("add", ONES, 3, start=True)
        await setup.call("learned", np.float32(0.5), 3)  # the manifest gives it 600 s
        await setup.wait(61)
        assert (setup.ended(), setup.owner.users) == ({"idle": 3}, 1)
        await setup.wait(600)
        assert (setup.ended(), setup.owner.users) == ({"idle": 4}, 0)

    run(models, work, most=2)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"sequence_id": 1.5}, "sequence_id is 1.5; expected a whole number or a short string"),
        ({"sequence_id": True}, "sequence_id is True; expected a whole number or a short string"),
        ({"sequence_id": "a" * 201}, "sequence_id is '"),
        ({"sequence_id": 1, "sequence_start": 1}, "sequence_start is 1; expected true or false"),
        ({"sequence_id": "new"}, "sequence_id is new, which is for sequence_start alone: send the answer's"),
        ({"sequence_end": True}, "sequence_start and sequence_end need a sequence_id, which is not 0"),
    ],
)
def test_parameters_of_sequences(parameters: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError) as error:
        step_of(parameters)
    assert str(error.value).startswith(text)
    assert step_of({}) == step_of({"sequence_id": 0, "sequence_start": False}) == step_of({"sequence_id": ""}) is None
    assert step_of({"sequence_id": "a", "sequence_start": True}) == Step("a", True, False)


Client = Callable[..., Any]


@pytest.fixture(params=["http", "grpc"])
def clients(request: pytest.FixtureRequest) -> Callable[[Server], Any]:
    """Gives a client of a server, and the function that asks one step of a sequence."""
    kind = request.param

    def connected(server: Server) -> Any:
        module = tritonclient.http if kind == "http" else tritonclient.grpc
        client = module.InferenceServerClient(server.address if kind == "http" else server.grpc)

        def ask(name: str, result: str, sequence: int | str, *arrays: Any, **step: bool) -> Any:
            inputs = []
            for tensor, array in zip(client_inputs(name), arrays, strict=True):
                inputs.append(module.InferInput(tensor, array.shape, "INT32" if array.dtype == np.int32 else "FP32"))
                inputs[-1].set_data_from_numpy(array)
            return client.infer(name, inputs, sequence_id=sequence, **step).as_numpy(result)

        def client_inputs(name: str) -> list[str]:
            told = client.get_model_metadata(name)
            return [row["name"] for row in told["inputs"]] if kind == "http" else [row.name for row in told.inputs]

        return ask

    return connected


@pytest.fixture(scope="module")
def server(served: Path) -> Iterator[Server]:
    with serving(served, "--grpc-port", "0", "--sequences", "2", "--idle", "30") as started:
        yield started


def test_tritonclient(server: Server, clients: Any) -> None:
    ask = clients(server)
    for sequence in (2**40, "a b"):
        for turn in range(3):
            doubled = ask("add", "doubled", sequence, ONES, sequence_start=not turn)
            np.testing.assert_array_equal(doubled, 2 * turn * ONES, strict=True)
    assert server.counted("stagec_sequences{") == 2
    for text, statuses, call in (
        ("add: sequence 3: 2 others have state already", ("429", "RESOURCE_EXHAUSTED"), ("add", "doubled", 3, ONES)),
        ("add: sequence 4 does not exist", ("404", "NOT_FOUND"), ("add", "doubled", 4, ONES)),
        ("add: it keeps total for a sequence: give", ("400", "INVALID_ARGUMENT"), ("add", "doubled", 0, ONES)),
        (
            "scaled keeps no state: sequence_id is",
            ("501", "UNIMPLEMENTED"),
            ("scaled", "result", 5, np.ones((1, 2), "f4")),
        ),
    ):
        with pytest.raises(tritonclient.utils.InferenceServerException) as error:
            ask(*call, sequence_start=call[2] == 3)
        assert text in error.value.message()
        assert error.value.status().removeprefix("StatusCode.") in statuses
    for sequence in (2**40, "a b"):
        np.testing.assert_array_equal(ask("peek", "result", sequence, sequence_end=True), 3 * ONES)
    assert server.counted("stagec_sequences{") == 0


def test_the_server_makes_ids(served: Path) -> None:
    """Nobody can guess them; with --own-ids there are no others."""
    assert step_of({"sequence_id": "new", "sequence_start": True}) != step_of(
        {"sequence_id": "new", "sequence_start": True}
    )
    with (
        serving(served, "--grpc-port", "0", "--own-ids") as server,
        tritonclient.http.InferenceServerClient(server.address) as by_http,
        tritonclient.grpc.InferenceServerClient(server.grpc) as by_rpc,
    ):
        made = set()
        for client, module in ((by_http, tritonclient.http), (by_rpc, tritonclient.grpc)):
            tensor = module.InferInput("x", [3], "FP32")
            tensor.set_data_from_numpy(ONES)
            for _ in range(2):
                told = client.infer("add", [tensor], sequence_id="new", sequence_start=True).get_response()
                parameters = told["parameters"] if client is by_http else told.parameters
                given = parameters["sequence_id"] if client is by_http else parameters["sequence_id"].string_param
                made.add(given)
                answer = client.infer("add", [tensor], sequence_id=given)
                np.testing.assert_array_equal(answer.as_numpy("doubled"), 2 * ONES)
                told = answer.get_response()
                assert not told.get("parameters") if client is by_http else not told.parameters
            for chosen in (7, "mine"):
                with pytest.raises(
                    tritonclient.utils.InferenceServerException, match="cannot begin: this server makes"
                ):
                    client.infer("add", [tensor], sequence_id=chosen, sequence_start=True)
            answer = client.infer("add", [tensor], sequence_id=given, sequence_start=True, sequence_end=True)
            np.testing.assert_array_equal(answer.as_numpy("doubled"), 0 * ONES)
        assert len(made) == 4
        assert min(map(len, made)) >= 22


def test_functions_share_a_state_of_the_same_arrays_alone(models: dict[str, Model]) -> None:
    other = copy.copy(models["peek"])
    other.states = {"total": models["learned"].states["learned"]}
    other.usage = models["learned"].usage
    why = "its state total is f32[24], and that of add is f32[3]"
    assert server_module._other_state(other, [models["predict"], models["add"]]) == why
    assert not server_module._other_state(models["peek"], [models["learned"], models["add"]])


def test_the_server_says_that_it_has_sequences(server: Server) -> None:
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        assert "sequence" in client.get_server_metadata().extensions
        config = client.get_model_config("learned").config
        assert config.sequence_batching.max_sequence_idle_microseconds == 600_000_000
        assert client.get_model_config("add").config.sequence_batching.max_sequence_idle_microseconds == 30_000_000
        assert not client.get_model_config("predict").config.HasField("sequence_batching")
    assert "add 1.2.0: not gathered: it keeps state: total\n" in server.told


def test_a_sequence_ends_with_the_bundle_that_it_began_with(served: Path, tmp_path: Path, clients: Any) -> None:
    place = tmp_path / "models.aot"
    shutil.copy(served, place)
    with serving(place, "--grpc-port", "0", "--watch") as server:
        ask = clients(server)
        ask("add", "doubled", 1, ONES, sequence_start=True)
        files = server.descriptors()
        put(served, place, "1.3.0")
        until(lambda: version_of(server) == "1.3.0")
        status, answer = server.ask(
            "POST",
            "/v2/models/add/infer",
            {
                "inputs": [{"name": "x", "shape": [3], "datatype": "FP32", "data": [1, 1, 1]}],
                "parameters": {"sequence_id": 1},
            },
        )
        assert (status, answer["model_version"]) == (200, "1.2.0")
        assert answer["outputs"][0]["data"] == [2, 2, 2]
        ask("add", "doubled", 2, ONES, sequence_start=True)
        np.testing.assert_array_equal(ask("peek", "result", 1, sequence_end=True), 2 * ONES)
        np.testing.assert_array_equal(ask("peek", "result", 2), ONES)
        until(lambda: server.descriptors() <= files + 1)  # the old bundle is closed


TRANSFORMER = """
[manifest]
name = "chat"
version = "1.0.0"
[targets.cpu]
platform = "cpu"
isa = "AVX2"
parallelism = 2

[functions.prefill]
entry = "examples.transformer.model:prefill"
avals = "avals:prefill"
bind = { params = "weights.safetensors" }
buckets = { length = [4] }
donate_argnames = ["cache"]
targets = ["cpu"]
serve.state = { cache = { argument = "cache", result = "result[1]" } }

[functions.decode]
entry = "examples.transformer.model:decode"
avals = "avals:decode"
bind = { params = "weights.safetensors" }
donate_argnames = ["cache"]
targets = ["cpu"]
serve.state = { cache = { argument = "cache", result = "result[1]", idle = 600 } }
"""

AVALS = f"""
import jax
import jax.numpy as jnp

from examples.transformer import model

def _state():
    return jax.eval_shape(lambda: model.init(0, **{SIZES}))

def _cache():
    array = jax.ShapeDtypeStruct(({SIZES["layers"]}, 1, {POSITIONS}, 1, {SIZES["head"]}), jnp.bfloat16)
    return model.Cache(array, array, jax.ShapeDtypeStruct((), jnp.int32))

def _length():
    return jax.export.symbolic_shape("1, length", constraints=["length <= {POSITIONS}"])

def prefill():
    return _state().params, _cache(), jax.ShapeDtypeStruct(_length(), jnp.int32)

def decode():
    return _state().params, _cache(), jax.ShapeDtypeStruct((1,), jnp.int32)
"""


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a language model: reading a prompt and decoding share a cache."""
    root = tmp_path_factory.mktemp("chat")
    (root / "examples" / "transformer").mkdir(parents=True)
    shutil.copy(ROOT / "examples" / "transformer" / "model.py", root / "examples" / "transformer")
    (root / "avals.py").write_text(AVALS)
    (root / "chat.toml").write_text(TRANSFORMER)
    params = jax.eval_shape(lambda: transformer.init(jax.numpy.uint32(0), **SIZES)).params
    draw = np.random.default_rng(0).standard_normal
    arrays = {
        ".".join(key.key for key in path): draw(aval.shape).astype(np.float32)
        for path, aval in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    save_file(arrays, root / "weights.safetensors")
    (root / "out").mkdir()
    return build("chat.toml", root / "out", root)


def test_a_language_model_decodes(chat: Path, clients: Any) -> None:
    """Two conversations at once have the bits of loops of calls, each of which has its own cache."""
    prompts = np.array([[[1, 2, 3, 4]], [[9, 8, 7, 6]]], np.int32)
    expected = []
    with stagec.load(chat) as bundle:
        for prompt in prompts:
            keys = np.zeros((SIZES["layers"], 1, POSITIONS, 1, SIZES["head"]), ml_dtypes.bfloat16)
            cache: Any = stagec.device_put({"keys": keys, "values": keys, "length": np.int32(0)})
            logits, cache = bundle["prefill"](cache, prompt)
            rows = [logits.numpy()]
            while len(rows) < POSITIONS - 3:
                token = np.argmax(rows[-1], axis=1).astype(np.int32)
                logits, cache = bundle["decode"](cache, token)
                rows.append(logits.numpy())
            expected.append(rows)
    assert not np.array_equal(expected[0][-1], expected[1][-1])
    with serving(chat, "--grpc-port", "0") as server:
        assert "decode 1.0.0: not gathered: it keeps state: cache\n" in server.told
        answers: list[list[Any]] = [[], []]

        def converse(number: int) -> None:
            ask, rows = clients(server), answers[number]
            rows.append(ask("prefill", "result[0]", number + 1, prompts[number], sequence_start=True))
            while len(rows) < POSITIONS - 3:
                token = np.argmax(rows[-1], axis=1).astype(np.int32)
                rows.append(ask("decode", "result[0]", number + 1, token, sequence_end=len(rows) == POSITIONS - 4))

        with threads(functools.partial(converse, 0), functools.partial(converse, 1)):
            pass
        np.testing.assert_array_equal(answers, expected, strict=True)
        assert server.counted("stagec_sequences{") == 0
