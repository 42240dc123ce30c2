"""The answers of a server for all protocols: models by name, their results, and the limits of a request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

from stagec.core.builds.version import VERSION
from stagec.core.messages.errors import StagecError
from stagec.core.messages.refusal import Refusal
from stagec_serve import access
from stagec_serve.batching import Batcher
from stagec_serve.encoding import InterfaceOf, Request, known_parameters
from stagec_serve.metrics import Metrics
from stagec_serve.model import Model
from stagec_serve.refusal import STATUS, RequestError
from stagec_serve.sequences import Sequences, Step
from stagec_serve.swapping import Swapping
from stagec_serve.tensors import Interface
from stagec_serve.trust import Tokens

Answer = TypeVar("Answer")
_EXTENSIONS = ("model_configuration", "sequence", "statistics", "parameters")
_UNLOADED = "was unloaded by a client"
_LARGE = 2**16
"""Requests of more bytes are read and written in a thread, so that other requests do not wait."""


@dataclass(frozen=True)
class Limits:
    """The limits of one request, and of all together.

    body: bytes of a request's body. bodies: bytes of all bodies that the server holds.
    seconds: for the body of a request to arrive, and then for its answer to be made.
    strict: whether a parameter that the server does not know is an error.
    """

    body: int = 2**26
    bodies: int = 2**29
    seconds: float = 60
    strict: bool = False


@dataclass(eq=False)
class Repository:
    """The models of a bundle, loaded.

    batchers: of the models by name. left_out: why other functions of the bundle are not offered, by name.
    swapping: gives models other weights; None: there are no models. close: unloads the bundle.
    unloaded: models that a client has unloaded. users: requests under way, and states of sequences.
    replaced: whether another one is offered instead; then it is closed when it has no users.
    """

    batchers: Mapping[str, Batcher]
    left_out: Mapping[str, str]
    swapping: Swapping | None
    close: Callable[[], None]
    unloaded: set[str] = field(default_factory=set)
    users: int = 0
    replaced: bool = False

    def enter(self) -> None:
        """Count one more user."""
        self.users += 1

    def leave(self) -> None:
        """Count one less."""
        self.users -= 1
        self.close_unused()

    def close_unused(self) -> None:
        """Unload the bundle if nobody needs it any more."""
        if self.replaced and not self.users:
            self.close()


class Chosen(NamedTuple):
    """The queue of a model, and the repository that has it."""

    batcher: Batcher
    repository: Repository


class Service:
    """The models of a server.

    metrics, limits: of all requests. ending: whether the server ends: it is not ready any more.
    control_port: the only one on which clients load and unload models; None: every one.
    repository: the models that are offered. loading: how far the first load is; "" when it is done.
    agree: makes a change (`prepare`), here or in all workers. drop: undoes a `prepare`.
    ask: asks all workers for "metrics" or "statistics"; None: there are none.
    others: how many of the workers are ready; "": all are.
    """

    def __init__(
        self,
        metrics: Metrics,
        limits: Limits,
        load: Callable[[], Repository],
        control: bool = False,
        sequences: Sequences | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        """There are no models before the first `reload`.

        load: loads the bundle as it is now; it takes long, and runs in a thread.

        control: whether clients may load and unload models. tokens: of which a request needs one; None: it needs none.
        """
        self.control_port: int | None = None
        self.metrics, self.limits = metrics, limits
        self.ending = False
        self.repository = Repository({}, {}, None, lambda: None)
        self.loading = "nothing is loaded"
        self._load, self._control, self._tokens = load, control, tokens
        self._loading = asyncio.Lock()
        self._held = 0
        self._sequences = sequences or Sequences(1, 60, metrics)
        self.agree: Callable[[Mapping[str, Any]], Awaitable[None]] = self._alone
        self.ask: Callable[[str, object], Awaitable[Any]] | None = None
        self.others = ""
        self._take: Callable[[], None] = lambda: None
        self.drop: Callable[[], None] = lambda: None

    @property
    def ready(self) -> bool:
        """Whether requests can be answered, now and for a while."""
        return not self.loading and not self.others and not self.ending

    async def exposition(self) -> bytes:
        """Return the metrics for Prometheus."""
        return (await self.ask("metrics", None)).encode() if self.ask else self.metrics.as_text()

    def tell(self, progress: str) -> None:
        """Take how far loading is. It may be called in any thread."""
        if self.loading:
            self.loading = progress

    def admit(self, headers: Mapping[str, str]) -> None:
        """Raise RequestError ("token") for a request that needs a token and has none."""
        if self._tokens is not None:
            self._tokens.check(headers)

    def metadata(self, extensions: Sequence[str]) -> dict[str, Any]:
        """Return the protocol's metadata of a server. extensions: of the protocol, those of the caller."""
        return {"name": "stagec", "version": VERSION, "extensions": [*extensions, *_EXTENSIONS]}

    def batcher(self, name: str, version: str | None) -> Batcher:
        """Return the queue of a model. version: None: any. Raises RequestError ("not-found", "unavailable")."""
        repository = self.repository
        if self.loading:
            raise RequestError("unavailable", f"the server is not ready: {self.loading}")
        if name in repository.left_out:
            raise RequestError("unavailable", repository.left_out[name])
        if name in repository.unloaded:
            raise RequestError("unavailable", f"{name} {_UNLOADED}")
        batcher = repository.batchers.get(name)
        if batcher is None:
            models = ", ".join(repository.batchers)
            raise RequestError("not-found", f"there is no model {name[:200]}; the models are {models}")
        if version not in (None, batcher.model.version):
            raise RequestError("not-found", f"{name} has version {batcher.model.version} and no other")
        return batcher

    def config(self, batcher: Batcher) -> dict[str, Any]:
        """Return Triton's ModelConfig of a model."""
        return batcher.config(self._sequences.idle(batcher.model))

    async def statistics(self, name: str = "", version: str | None = None) -> dict[str, Any]:
        """Return Triton's statistics of a model, or of all. Raises RequestError as `batcher`."""
        batchers = [self.batcher(name, version)] if name else self.repository.batchers.values()
        models = [(batcher.model.name, batcher.model.version) for batcher in batchers]
        of = await self.ask("statistics", models) if self.ask else self.metrics.told(models)
        return {"model_stats": of}

    def index(self, ready: bool = False) -> list[dict[str, str]]:
        """Return name, version, state and reason of each model. ready: of those that can be asked alone."""
        return [row for row in self._index() if not ready or row["state"] == "READY"]

    def _index(self) -> Iterator[dict[str, str]]:
        repository = self.repository
        for name, batcher in repository.batchers.items():
            state, reason = ("UNAVAILABLE", _UNLOADED) if name in repository.unloaded else ("READY", "")
            yield {"name": name, "version": batcher.model.version, "state": state, "reason": reason}
        for name, reason in repository.left_out.items():
            yield {"name": name, "state": "UNAVAILABLE", "reason": reason}

    async def change(self, name: str, change: str, parameters: Mapping[str, Any], port: int | None = None) -> None:
        """Load or unload a model. change: "load" or "unload". port: that the request came to; None: of gRPC.

        To load one that is offered already is to load the bundle's file again. parameters: of "load": the weights that
        it gets, as for `Swapping.load`; the bundle stays then. Raises RequestError ("unsupported", "not-found",
        "unavailable", "request").
        """
        repository = self.repository
        if not self._control:
            what = f"{name[:200]}: this server does not {change} models for clients; start it with --control"
            raise RequestError("unsupported", what)
        if self.control_port not in (None, port):
            raise RequestError("unsupported", f"{name[:200]}: this port does not {change} models; --control-port does")
        if self.loading:
            raise RequestError("unavailable", f"the server is not ready: {self.loading}")
        if change == "load" and parameters:
            self.batcher(name, None)
            await self.agree({"kind": "weights", "name": name, "parameters": dict(parameters)})
            return
        known_parameters(name, parameters, True, "unload_dependents")  # there are none
        unloaded = repository.unloaded - {name}
        if change == "load" and name not in repository.unloaded:
            assert repository.swapping is not None
            others = {model: given for model, given in repository.swapping.given.items() if model != name}
            try:
                await self.agree({"kind": "bundle", "weights": others, "unloaded": sorted(unloaded)})
            except (StagecError, Refusal) as error:
                raise RequestError("unavailable", str(error).partition("\n")[0]) from error
            self.batcher(name, None)
            return
        if name not in repository.unloaded:
            self.batcher(name, None)
        unloaded |= {name} if change == "unload" else set()
        await self.agree({"kind": "unloaded", "unloaded": sorted(unloaded)})

    async def reload(self) -> None:
        """Load the bundle's file, and offer its models instead of the present ones, with the weights that it has.

        Models that a client has unloaded stay so. Running requests end with their models, which are unloaded then.
        Raises the errors of `load`, and RequestError ("unavailable") if it lacks a model that is offered now; then
        nothing has changed.
        """
        await self.agree({"kind": "bundle", "weights": {}, "unloaded": sorted(self.repository.unloaded)})

    async def _alone(self, what: Mapping[str, Any]) -> None:
        async with self._loading:
            await self.prepare(what)
            self.take()

    async def prepare(self, what: Mapping[str, Any]) -> dict[str, str]:
        """Do all of a change that can fail; return the digest of each model after it. Then `take` or `drop` it.

        what: "kind" is "bundle" (load the file again, with "weights", for each model that has others, and without
        those of "unloaded"), "weights" ("name" and "parameters" as of `Swapping.load`), or "unloaded". Raises the
        errors of `change` and `reload`.
        """
        repository = self.repository
        match what["kind"]:
            case "bundle":
                try:
                    new = await self._loaded(what)
                except BaseException:
                    self.metrics.loads.labels("failed").inc()
                    raise
                self._take, self.drop = functools.partial(self.replace, new), new.close
                return {name: batcher.model.digest for name, batcher in new.batchers.items()}
            case "weights":
                batcher = self.batcher(what["name"], None)
                assert repository.swapping is not None
                take = await repository.swapping.load(batcher, what["parameters"])
                self._take = functools.partial(self._with_weights, take, batcher, what["parameters"]["weights"])
            case "unloaded":
                self._take = functools.partial(setattr, repository, "unloaded", {*what["unloaded"]})
        return {name: batcher.model.digest for name, batcher in repository.batchers.items()}

    def take(self) -> None:
        """Let what was prepared last be what is offered."""
        take = self._take
        self._take = self.drop = lambda: None
        take()

    def _with_weights(self, take: Callable[[], None], batcher: Batcher, file: str) -> None:
        take()
        what = "%s has the weights of %s from the next request on; its digest is %s"
        self.metrics.log.info(what, batcher.model.name, file, batcher.model.digest)
        self._tell(self.repository)

    async def _loaded(self, what: Mapping[str, Any]) -> Repository:
        new = await _in_daemon(self._load)
        try:
            self._check(new, {*what["unloaded"]})
            for name, given in what["weights"].items():
                if name in new.batchers and new.swapping is not None:
                    (await new.swapping.load(new.batchers[name], given))()
        except BaseException:
            new.close()
            raise
        new.unloaded = {*what["unloaded"]} & new.batchers.keys()
        return new

    def _check(self, new: Repository, unloaded: set[str]) -> None:
        """Raise RequestError ("unavailable") if other models cannot take the place of the present ones."""
        if not new.batchers:
            why = "; ".join(f"{name}: {reason}" for name, reason in new.left_out.items())
            raise RequestError("unavailable", f"nothing can be served: {why or 'the bundle is empty'}")
        needed = self.repository.batchers.keys() - unloaded
        lacking = [f"{name}: {new.left_out.get(name, 'it has none')}" for name in sorted(needed - new.batchers.keys())]
        if lacking:
            what = f"the new bundle cannot serve what the old one serves: {'; '.join(lacking)}"
            raise RequestError("unavailable", what)

    def replace(self, repository: Repository) -> None:
        """Offer other models from the next request on."""
        self.metrics.loads.labels("loaded").inc()
        old, self.repository = self.repository, repository
        self.loading = ""
        versions = {
            name: f"{batcher.model.version} ({batcher.model.digest})" for name, batcher in repository.batchers.items()
        }
        self.metrics.log.info("models are %s", versions)
        self._tell(repository)
        old.replaced = True
        old.close_unused()

    def _tell(self, repository: Repository) -> None:
        models = (batcher.model for batcher in repository.batchers.values())
        self.metrics.offered((m.name, m.version, m.digest, m.target, m.kind) for m in models)

    @contextlib.contextmanager
    def counted(self, name: str, version: str | None) -> Iterator[Chosen]:
        """Yield the queue of a model for one request, and count the request by its outcome. Raises as `batcher`."""
        chosen = Chosen(self.batcher(name, version), self.repository)
        status = 499  # a client that is gone, as nginx counts it
        began = time.monotonic()
        chosen.repository.enter()
        access.note(model=name)
        try:
            yield chosen
            status = 200
        except RequestError as error:
            status = STATUS[error.code]
            raise
        finally:
            self.metrics.requests.labels(name, status).inc()
            outcome = "success" if status == 200 else "fail"
            self.metrics.statistics[name].of[outcome].add(time.monotonic() - began)
            chosen.repository.leave()

    def hold(self, count: int, held: contextlib.ExitStack) -> None:
        """Count bytes of a request, until `held` ends. Raises RequestError ("busy") if they are too many."""
        if self._held + count > self.limits.bodies:
            raise RequestError("busy", "the server holds as many bytes of requests as it may; try again later")
        self._hold(count)
        held.callback(self._hold, -count)

    def _hold(self, count: int) -> None:
        self._held += count

    async def answer(
        self,
        chosen: Chosen,
        size: int,
        held: contextlib.ExitStack,
        read: Callable[[InterfaceOf], Request],
        write: Callable[[Model, Request, Any], Answer],
    ) -> Answer:
        """Return the output of `write` for a request's results.

        size: bytes of the request, which `read` reads. held: as of `hold`; work that outlives this keeps it.
        Raises RequestError ("timeout"), and the errors of these functions, `Sequences.begin` and `Batcher.call`.
        """
        name, seconds = chosen.batcher.model.name, self.limits.seconds
        loop, of = asyncio.get_running_loop(), self.metrics.statistics[name].of

        def interface_of(step: Step | None) -> Interface:
            return self._living(chosen, step).batcher.model.interface

        with self.metrics.seconds.labels(name).time():
            try:
                async with asyncio.timeout(seconds) as limit:
                    began = loop.time()
                    request = await maybe_in_thread(size, held, lambda: read(interface_of))
                    of["compute_input"].add(loop.time() - began)
                    if 0 < request.timeout < seconds:
                        seconds = request.timeout
                        limit.reschedule(began + seconds)
                    access.note(id=request.request_id)
                    batcher, repository = self._living(chosen, request.step)
                    model, step, begin = batcher.model, request.step, None
                    if step is not None:
                        begin = functools.partial(self._sequences.begin, model, step, repository)
                    results = await batcher.call(request.arrays, begin, model, held, request.priority)
                    size, began = sum(array.nbytes for array in results), loop.time()
                    answer = await maybe_in_thread(size, held, lambda: write(model, request, results))
                    of["compute_output"].add(loop.time() - began)
                    return answer
            except TimeoutError:
                raise RequestError("timeout", f"{name} took over {seconds:g} seconds") from None

    def _living(self, chosen: Chosen, step: Step | None) -> Chosen:
        """Return the models for a request; a sequence keeps the bundle of its first request."""
        model = chosen.batcher.model
        if step is None and model.states:
            what = f"it keeps {', '.join(model.states)} for a sequence: give the parameter sequence_id"
            raise RequestError("request", f"{model.name}: {what}")
        if step is not None and not model.states:
            raise RequestError("unsupported", f"{model.name} keeps no state: sequence_id is for functions that do")
        owner = self._sequences.owner(model, step)
        if owner is None or owner is chosen.repository:
            return chosen
        assert isinstance(owner, Repository)
        if model.name not in owner.batchers:
            what = "the sequence has a bundle that has no such model, and was replaced: begin another one"
            raise RequestError("not-found", f"{model.name}: {what}")
        return Chosen(owner.batchers[model.name], owner)


async def _in_daemon(work: Callable[[], Answer]) -> Answer:
    """Do work in a thread for which nobody waits when the process ends: a load may take minutes."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Answer] = loop.create_future()

    def set_result(result: Answer | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("Answer", result))

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  # who waits gets it
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(set_result, result, failed)

    threading.Thread(target=run, name="stagec-load", daemon=True).start()
    return await future


async def maybe_in_thread(size: int, held: contextlib.ExitStack, work: Callable[[], Answer]) -> Answer:
    """Do work on `size` bytes, in a thread if they are many. held: ends after the work, if nobody waits for it."""
    if size <= _LARGE:
        return work()
    future = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        rest = held.pop_all()

        def end(done: asyncio.Future[Answer]) -> None:
            rest.close()
            if not done.cancelled():
                done.exception()  # nobody asks for it

        future.add_done_callback(end)
        raise
    finally:
        del future  # it has the error of the work, whose traceback has this frame: a cycle, which keeps the request
