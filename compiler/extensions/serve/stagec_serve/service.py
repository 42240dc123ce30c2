"""The answers of a server for all protocols: models by name, their results, and the limits of a request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from stagec.core.builds.version import VERSION
from stagec.core.messages.errors import StagecError
from stagec.core.messages.refusal import Refusal
from stagec_serve import logs
from stagec_serve.batching import Batcher
from stagec_serve.encoding import InterfaceOf, Request, known_parameters
from stagec_serve.metrics import Metrics, Took, statistics
from stagec_serve.model import Model
from stagec_serve.refusal import STATUS, RequestError
from stagec_serve.repository import Repository
from stagec_serve.sequences import Sequences, Step
from stagec_serve.tensors import Interface
from stagec_serve.trust import Tokens

Answer = TypeVar("Answer")
_EXTENSIONS = ["binary_tensor_data", "model_repository", "model_configuration", "sequence", "statistics", "parameters"]
_UNLOADED = "was unloaded by a client"
_LARGE = 2**16
"""Requests of more bytes are read and written in a thread, so that other requests do not wait."""


class Service:
    """The models of a server.

    metrics, options: of all requests; the options are the command's. ending: whether it ends: it is not ready any more.
    admit: raises RequestError ("token") for the headers of a request that needs a token and has none.
    control_port: the only one on which clients load and unload models; None: every one.
    repository: the models that are offered. loading: how far the first load is; "" when it is done.
    agree: makes a change (`prepare`), here or in all workers.
    ask: asks all workers for "metrics" or "statistics"; None: there are none.
    others: how many of the workers are ready; "": all are.
    """

    def __init__(
        self,
        metrics: Metrics,
        options: Namespace,
        load: Callable[[], Repository],
        sequences: Sequences,
        tokens: Tokens | None = None,
        control_port: int | None = None,
    ) -> None:
        """There are no models before the first `reload`.

        load: loads the bundle as it is now; it takes long, and runs in a thread.
        tokens: of which a request needs one; None: it needs none.
        """
        self.metrics, self.options, self.control_port = metrics, options, control_port
        self.body, self._most = options.body * 2**20, options.memory * 2**20
        self.repository = Repository()
        self.loading, self.others, self.ending = "nothing is loaded", "", False
        self._load, self._sequences = load, sequences
        self.admit = tokens.check if tokens else lambda _: None
        self._changing, self._held = asyncio.Lock(), 0
        self._prepared: tuple[Callable[[], None], Callable[[], None]] | None = None
        self.agree: Callable[[Mapping[str, Any]], Awaitable[None]] = self._alone
        self.ask: Callable[[str], Awaitable[Any]] | None = None

    @property
    def ready(self) -> bool:
        """Whether requests can be answered, now and for a while."""
        return not self.loading and not self.others and not self.ending

    async def exposition(self) -> bytes:
        """Return the metrics for Prometheus."""
        return (await self.ask("metrics")).encode() if self.ask else self.metrics.as_text()

    def tell(self, progress: str) -> None:
        """Take how far loading is. It may be called in any thread."""
        if self.loading:
            self.loading = progress

    def _check_ready(self) -> None:
        if self.loading:
            raise RequestError("unavailable", f"the server is not ready: {self.loading}")

    def batcher(self, name: str, version: str | None = None) -> Batcher:
        """Return the queue of a model. version: None: any. Raises RequestError ("not-found", "unavailable")."""
        self._check_ready()
        repository = self.repository
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

    async def told(self, method: str, name: str = "", version: str | None = None, ready: bool = False) -> Any:
        """Return the answer to a method of the protocol that says how something is.

        ready: of the index: models that can be asked alone. Raises RequestError as `batcher`.
        """
        match method:
            case "ServerLive":
                return {"live": True}
            case "ServerReady":
                return {"ready": self.ready}
            case "ServerMetadata":
                return {"name": "stagec", "version": VERSION, "extensions": _EXTENSIONS}
            case "RepositoryIndex":
                return {"models": [row for row in self._index() if not ready or row["state"] == "READY"]}
            case "ModelStatistics":
                batchers = [self.batcher(name, version)] if name else self.repository.batchers.values()
                took: Took = await self.ask("statistics") if self.ask else self.metrics.durations()
                models = [batcher.model for batcher in batchers]
                return {"model_stats": [statistics(model.name, model.version, took) for model in models]}
        batcher = self.batcher(name, version)
        if method == "ModelReady":
            return {"name": name, "ready": True}
        if method == "ModelConfig":
            return {"config": batcher.model.config(batcher.delay, self._sequences.idle(batcher.model))}
        return batcher.model.metadata()

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
        it gets, as for `Repository.load`; the bundle stays then. Raises RequestError ("unsupported", "not-found",
        "unavailable", "request").
        """
        repository = self.repository
        if not self.options.control and self.control_port is None:
            what = f"{name[:200]}: this server does not {change} models for clients; start it with --control"
            raise RequestError("unsupported", what)
        if self.control_port not in (None, port):
            raise RequestError("unsupported", f"{name[:200]}: this port does not {change} models; --control-port does")
        self._check_ready()
        if change == "load" and parameters:
            self.batcher(name)
            await self.agree({"kind": "weights", "name": name, "parameters": dict(parameters)})
            return
        known_parameters(name, parameters, True, "unload_dependents")  # there are none
        unloaded = repository.unloaded - {name}
        if change == "unload" or name in repository.unloaded:
            if name not in repository.unloaded:
                self.batcher(name)
            unloaded |= {name} if change == "unload" else set()
            await self.agree({"kind": "unloaded", "unloaded": sorted(unloaded)})
            return
        others = {model: given for model, given in repository.given.items() if model != name}
        try:
            await self.agree({"kind": "bundle", "weights": others, "unloaded": sorted(unloaded)})
        except (StagecError, Refusal) as error:
            raise RequestError("unavailable", str(error).partition("\n")[0]) from error
        self.batcher(name)

    async def reload(self) -> None:
        """Load the bundle's file, and offer its models instead of the present ones, with the weights that it has.

        Models that a client has unloaded stay so. Running requests end with their models, which are unloaded then.
        Raises the errors of loading, and RequestError ("unavailable") if it lacks a model that is offered now; then
        nothing has changed.
        """
        await self.agree({"kind": "bundle", "weights": {}, "unloaded": sorted(self.repository.unloaded)})

    async def _alone(self, what: Mapping[str, Any]) -> None:
        async with self._changing:
            await self.prepare(what)
            self.end(taken=True)

    async def prepare(self, what: Mapping[str, Any]) -> dict[str, str]:
        """Do all of a change that can fail; return the digest of each model after it. Then `end` it.

        what: "kind" is "bundle" (load the file again, with "weights", for each model that has others, and without
        those of "unloaded"), "weights" ("name" and "parameters" as of `Repository.load`), or "unloaded". Raises the
        errors of `change` and `reload`.
        """
        repository = self.repository
        match what["kind"]:
            case "bundle":
                try:
                    repository = await self._loaded(what)
                except BaseException:
                    self.metrics.loads.labels("failed").inc()
                    raise
                self._prepared = functools.partial(self._replace, repository), repository.close
            case "weights":
                batcher = self.batcher(what["name"])
                take = await repository.load(batcher, what["parameters"])
                with_weights = functools.partial(self._with_weights, take, batcher, what["parameters"]["weights"])
                self._prepared = with_weights, lambda: None
            case "unloaded":
                self._prepared = functools.partial(setattr, repository, "unloaded", {*what["unloaded"]}), lambda: None
        return {name: batcher.model.digest for name, batcher in repository.batchers.items()}

    def end(self, taken: bool) -> None:
        """Let what was prepared last be what is offered, or undo it."""
        prepared, self._prepared = self._prepared, None
        if prepared:
            prepared[0 if taken else 1]()

    def _with_weights(self, take: Callable[[], None], batcher: Batcher, file: str) -> None:
        take()
        what = "%s has the weights of %s from the next request on; its digest is %s"
        self.metrics.log.info(what, batcher.model.name, file, batcher.model.digest)
        self._offer()

    async def _loaded(self, what: Mapping[str, Any]) -> Repository:
        """Return the bundle's models, of which each can take the place of the present one."""
        new = await _in_daemon(self._load)
        try:
            if not new.batchers:
                why = "; ".join(f"{name}: {reason}" for name, reason in new.left_out.items())
                raise RequestError("unavailable", f"nothing can be served: {why or 'the bundle is empty'}")
            lacking = sorted(self.repository.batchers.keys() - {*what["unloaded"]} - new.batchers.keys())
            if lacking:
                why = "; ".join(f"{name}: {new.left_out.get(name, 'it has none')}" for name in lacking)
                raise RequestError("unavailable", f"the new bundle cannot serve what the old one serves: {why}")
            for name, given in what["weights"].items():
                if name in new.batchers:
                    (await new.load(new.batchers[name], given))()
        except BaseException:
            new.close()
            raise
        new.unloaded = {*what["unloaded"]} & new.batchers.keys()
        return new

    def _replace(self, repository: Repository) -> None:
        """Offer other models from the next request on."""
        self.metrics.loads.labels("loaded").inc()
        old, self.repository = self.repository, repository
        self.loading = ""
        models = [batcher.model for batcher in repository.batchers.values()]
        self.metrics.log.info("models are %s", {model.name: f"{model.version} ({model.digest})" for model in models})
        self._offer()
        old.replaced = True
        old.leave(0)

    def _offer(self) -> None:
        batchers = self.repository.batchers
        models = (batcher.model for batcher in batchers.values())
        self.metrics.offered((m.name, m.version, m.digest, m.target, m.kind) for m in models)
        for name, batcher in batchers.items():
            self.metrics.waiting.labels(name).set_function(functools.partial(getattr, batcher, "waiting"))

    @contextlib.contextmanager
    def counted(self, name: str, version: str | None) -> Iterator[Repository]:
        """Yield who has a model, for one request, and count the request by its outcome. Raises as `batcher`."""
        self.batcher(name, version)
        repository, status = self.repository, 499  # a client that is gone, as nginx counts it
        began = time.monotonic()
        repository.enter()
        logs.note(model=name)
        try:
            yield repository
            status = 200
        except RequestError as error:
            status = STATUS[error.code]
            raise
        except Exception:
            status = STATUS["failed"]
            raise
        finally:
            self.metrics.requests.labels(name, status).inc()
            self.metrics.took(name, "success" if status == 200 else "fail", time.monotonic() - began)
            repository.leave()

    def hold(self, count: int, held: contextlib.ExitStack) -> None:
        """Count bytes of a request, until `held` ends. Raises RequestError ("busy") if they are too many."""
        if self._held + count > self._most:
            raise RequestError("busy", "the server holds as many bytes of requests as it may; try again later")
        self._hold(count)
        held.callback(self._hold, -count)

    def _hold(self, count: int) -> None:
        self._held += count

    async def answer(
        self,
        name: str,
        repository: Repository,
        size: int,
        held: contextlib.ExitStack,
        read: Callable[[InterfaceOf], Request],
        write: Callable[[Model, Request, Any], Answer],
        is_alone: bool = False,
    ) -> Answer:
        """Return the output of `write` for a request's results.

        name, repository: of its model. size: bytes of the request, which `read` reads. held: as of `hold`; work that
        outlives this keeps it. is_alone: as of `Batcher.call`. Raises RequestError ("timeout"), and the errors of these
        functions, `Sequences.begin` and `Batcher.call`.
        """
        seconds, now, metrics = self.options.timeout, asyncio.get_running_loop().time, self.metrics

        def interface_of(step: Step | None) -> Interface:
            return self._living(name, repository, step).batchers[name].model.interface

        began = came = now()
        try:
            async with asyncio.timeout(seconds) as limit:
                request = await maybe_in_thread(size, held, lambda: read(interface_of))
                metrics.took(name, "compute_input", now() - began)
                if 0 < request.timeout < seconds:
                    seconds = request.timeout
                    limit.reschedule(began + seconds)
                logs.note(id=request.request_id)
                owner, step, begin = self._living(name, repository, request.step), request.step, None
                batcher = owner.batchers[name]
                model = batcher.model
                if now() >= (limit.when() or 0):  # a call that nobody waits for lets no timer run
                    raise TimeoutError
                if step is not None:
                    begin = functools.partial(self._sequences.begin, model, step, owner)
                results = await batcher.call(request.arrays, begin, model, held, request.priority, is_alone)
                size, began = sum(array.nbytes for array in results), now()
                answer = await maybe_in_thread(size, held, lambda: write(model, request, results))
                metrics.took(name, "compute_output", now() - began)
                return answer
        except TimeoutError:
            raise RequestError("timeout", f"{name} took over {seconds:g} seconds") from None
        finally:
            metrics.seconds.labels(name).observe(now() - came)

    def _living(self, name: str, repository: Repository, step: Step | None) -> Repository:
        """Return who has the model for a request; a sequence keeps the bundle of its first request."""
        model = repository.batchers[name].model
        if step is None and model.states:
            what = f"it keeps {', '.join(model.states)} for a sequence: give the parameter sequence_id"
            raise RequestError("request", f"{name}: {what}")
        if step is not None and not model.states:
            raise RequestError("unsupported", f"{name} keeps no state: sequence_id is for functions that do")
        owner = self._sequences.owner(model, step) or repository
        assert isinstance(owner, Repository)
        if name not in owner.batchers:
            what = "the sequence has a bundle that has no such model, and was replaced: begin another one"
            raise RequestError("not-found", f"{name}: {what}")
        return owner


async def _in_daemon(work: Callable[[], Answer]) -> Answer:
    """Do work in a thread for which nobody waits when the process ends: a load may take minutes."""
    future: Future[Answer] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  # who waits gets it
            future.set_exception(error)

    threading.Thread(target=run, name="stagec-load", daemon=True).start()
    return await asyncio.wrap_future(future)


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
