"""A server's counters for Prometheus: https://prometheus.io/docs/instrumenting/exposition_formats."""

from __future__ import annotations

import functools
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector, generate_latest
from prometheus_client.parser import text_string_to_metric_families

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_ROWS = tuple(2**power for power in range(13))
Took = Sequence[tuple[str, str | int, int, int]]
"""Durations of models: the model, what took the time, how often it did, and nanoseconds of all together.

What: requests by "success", "fail", "queue", "compute_input" and "compute_output"; calls by the number of their rows.
"last" has milliseconds since 1970 at the last call.
"""


class Metrics:
    """The counters of one server.

    requests: by model and status. seconds: from the last byte of a request to its answer, by model.
    waiting: requests in the queue, by model. sequences: the live ones, by state.
    crowded: requests that were refused because there are too many connections.
    loads: of bundles, by outcome ("loaded" or "failed"). load_seconds: of the last one.
    """

    log = logging.getLogger("stagec_serve")

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def made(kind: Any, name: str, what: str, *labels: str, **more: Any) -> Any:
            metric = kind(f"stagec_{name}", what, labels, registry=registry, **more)
            if "model" in labels:  # to look labels up takes a lock each time, and there are few
                metric.labels = functools.cache(metric.labels)
            return metric

        seconds = functools.partial(made, Histogram, buckets=_SECONDS)
        self.requests = made(Counter, "requests", "Requests of inference, by HTTP status", "model", "status")
        self.seconds = seconds("request_seconds", "Seconds that a request took", "model")
        self.waiting = made(Gauge, "waiting_requests", "Requests that wait for a call", "model")
        self._calls = made(Counter, "calls", "Calls of executables", "model", "bucket")
        self._rows = made(Histogram, "call_rows", "Rows of a call, without padding", "model", buckets=_ROWS)
        self._call_seconds = seconds("call_seconds", "Seconds that a call took", "model")
        self.sequences = made(Gauge, "sequences", "Sequences that have a state", "state")
        self._ended = made(Counter, "sequences_ended", "Sequences that ended, by reason", "state", "reason")
        what = "Requests that were refused because there are too many connections"
        self.crowded = made(Counter, "crowded_requests", what)
        self.loads = made(Counter, "loads", "Loads of the bundle, by outcome", "outcome")
        self.load_seconds = made(Gauge, "load_seconds", "Seconds that the last load took")
        labels = ("model", "version", "digest", "target", "kind")
        self._offered = Gauge("stagec_model", "1 for each model that is offered: what runs", labels, registry=registry)
        self._took: defaultdict[tuple[str, str | int], list[int]] = defaultdict(lambda: [0, 0])

    def took(self, model: str, what: str | int, seconds: float) -> None:
        """Count a duration, as `Took` has it."""
        durations = self._took[model, what]
        durations[0] += 1
        durations[1] += round(seconds * 10**9)

    def ran(self, model: str, bucket: str, rows: int, seconds: float, waited: Iterable[float] = ()) -> None:
        """Count a call of an executable. rows: of requests, without padding. waited: seconds that each has waited."""
        self._took[model, "last"] = [round(time.time() * 1000), 0]
        self.took(model, rows, seconds)
        for wait in waited:
            self.took(model, "queue", wait)
        self._calls.labels(model, bucket).inc()
        self._rows.labels(model).observe(rows)
        self._call_seconds.labels(model).observe(seconds)

    def offered(self, rows: Iterable[tuple[str, str, str, str, str]]) -> None:
        """Set the offered models: name, version, digest, target, and "executable" or "compiled" of each."""
        self._offered.clear()
        for row in rows:
            self._offered.labels(*row).set(1)

    def ended(self, state: str, reason: str) -> None:
        """Count the end of a sequence. reason: "end", "idle", "restarted" or "failed"."""
        self._ended.labels(state, reason).inc()

    def durations(self) -> Took:
        """Return all durations."""
        return [(model, what, count, ns) for (model, what), (count, ns) in self._took.items()]

    def as_text(self) -> bytes:
        """Return all counters in Prometheus' text format."""
        return generate_latest(self._registry)


def statistics(name: str, version: str, took: Took) -> dict[str, Any]:
    """Return the fields of Triton's ModelStatistics. took: of all processes."""
    of: defaultdict[str | int, dict[str, int]] = defaultdict(lambda: {"count": 0, "ns": 0})
    last = 0
    for model, what, count, ns in took:
        if model == name and what == "last":
            last = max(last, count)
        elif model == name:
            for key in (what, "compute_infer") if isinstance(what, int) else (what,):
                of[key] = {"count": of[key]["count"] + count, "ns": of[key]["ns"] + ns}
    kinds = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
    batches = sorted(rows for rows in of if isinstance(rows, int))
    return {
        "name": name,
        "version": version,
        "last_inference": last,
        "inference_count": sum(rows * of[rows]["count"] for rows in batches),
        "execution_count": of["compute_infer"]["count"],
        "inference_stats": {kind: of[kind] for kind in kinds},
        "batch_stats": [{"batch_size": rows, "compute_infer": of[rows]} for rows in batches],
    }


_LARGEST = ("stagec_loads", "stagec_load_seconds", "stagec_model", "process_start_time_seconds", "process_max_fds")
"""Of several processes the largest, and not the sum."""


def summed(texts: Iterable[str], ended: Iterable[str]) -> str:
    """Return the metrics of several processes as those of one. ended: of processes that are gone: they count on."""
    families: dict[str, Metric] = {}
    values: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
    for text, is_gone in (*((text, False) for text in texts), *((text, True) for text in ended)):
        for family in text_string_to_metric_families(text):
            if is_gone and family.type == "gauge":
                continue
            families.setdefault(family.name, family)
            largest = family.name in _LARGEST or family.name.endswith("_created")
            for sample in family.samples:
                key = family.name, sample.name, tuple(sorted(sample.labels.items()))
                before = values.get(key, 0)
                values[key] = max(before, sample.value) if largest else before + sample.value

    class Sums(CollectorRegistry):
        def collect(self) -> Iterable[Metric]:
            return families.values()

    for family in families.values():
        family.samples = []
    for (name, sample_name, labels), value in values.items():
        families[name].add_sample(sample_name, dict(labels), value)
    return generate_latest(Sums()).decode()
