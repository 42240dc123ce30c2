"""A server's counters for Prometheus: https://prometheus.io/docs/instrumenting/exposition_formats."""

from __future__ import annotations

import functools
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from stagec.core.builds import naming

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_ROWS = tuple(2**power for power in range(13))


@dataclass
class _Durations:
    """count: how many. ns: nanoseconds, of all together."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.ns += round(seconds * 10**9)


@dataclass
class Statistics:
    """What Triton's extension for statistics says of a model.

    last: milliseconds since 1970 at the last call; 0: there was none. rows, calls: that ran. of: requests by what took
    the time ("success", "fail", "queue", "compute_input", "compute_output"), and calls ("compute_infer").
    batches: calls by their rows.
    """

    last: int = 0
    rows: int = 0
    calls: int = 0
    of: defaultdict[str, _Durations] = field(default_factory=lambda: defaultdict(_Durations))
    batches: defaultdict[int, _Durations] = field(default_factory=lambda: defaultdict(_Durations))

    def told(self, name: str, version: str) -> dict[str, Any]:
        """Return the fields of Triton's ModelStatistics."""
        kinds = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
        batches = [{"batch_size": rows, "compute_infer": vars(took)} for rows, took in sorted(self.batches.items())]
        return {
            "name": name,
            "version": version,
            "last_inference": self.last,
            "inference_count": self.rows,
            "execution_count": self.calls,
            "inference_stats": {kind: vars(self.of[kind]) for kind in kinds},
            "batch_stats": batches,
        }


class Metrics:
    """The counters of one server.

    requests: by model and status. seconds: from the last byte of a request to its answer, by model.
    waiting: requests in the queue, by model. sequences: the live ones, by state.
    crowded: requests that were refused because there are too many connections.
    loads: of bundles, by outcome ("loaded" or "failed"). load_seconds: of the last one.
    statistics: Triton's, by model.
    """

    log = logging.getLogger("stagec_serve")

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        what = "Requests of inference, by HTTP status"
        self.requests = Counter("stagec_requests", what, ("model", "status"), registry=registry)
        self.seconds = _histogram("stagec_request_seconds", "Seconds that a request took", _SECONDS, registry)
        what = "Requests that wait for a call"
        self.waiting = Gauge("stagec_waiting_requests", what, ("model",), registry=registry)
        self._calls = Counter("stagec_calls", "Calls of executables", ("model", "bucket"), registry=registry)
        self._rows = _histogram("stagec_call_rows", "Rows of a call, without padding", _ROWS, registry)
        self._call_seconds = _histogram("stagec_call_seconds", "Seconds that a call took", _SECONDS, registry)
        self.sequences = Gauge("stagec_sequences", "Sequences that have a state", ("state",), registry=registry)
        what = "Sequences that ended, by reason"
        self._ended = Counter("stagec_sequences_ended", what, ("state", "reason"), registry=registry)
        what = "Requests that were refused because there are too many connections"
        self.crowded = Counter("stagec_crowded_requests", what, registry=registry)
        self.loads = Counter("stagec_loads", "Loads of the bundle, by outcome", ("outcome",), registry=registry)
        self.load_seconds = Gauge("stagec_load_seconds", "Seconds that the last load took", registry=registry)
        what = "1 for each model that is offered: what runs"
        self._offered = Gauge("stagec_model", what, ("model", "version", "digest", "target", "kind"), registry=registry)
        self.statistics: defaultdict[str, Statistics] = defaultdict(Statistics)
        for metric in (self.requests, self.seconds, self.waiting, self._calls, self._rows, self._call_seconds):
            # It takes a lock each time, and there are few.
            metric.labels = functools.cache(metric.labels)  # type: ignore[method-assign, assignment]

    def ran(
        self, model: str, bucket: Mapping[str, int], rows: int, seconds: float, waited: Iterable[float] = ()
    ) -> None:
        """Count a call of an executable. rows: of requests, without padding. waited: seconds that each has waited."""
        statistics = self.statistics[model]
        statistics.last = round(time.time() * 1000)
        statistics.rows += rows
        statistics.calls += 1
        statistics.of["compute_infer"].add(seconds)
        statistics.batches[rows].add(seconds)
        for wait in waited:
            statistics.of["queue"].add(wait)
        self._calls.labels(model, naming.bucket(bucket)).inc()
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

    def told(self, models: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
        """Return Triton's statistics of models, given by name and version."""
        return [self.statistics[name].told(name, version) for name, version in models]

    def as_text(self) -> bytes:
        """Return all of them in Prometheus' text format."""
        return generate_latest(self._registry)


_LARGEST = ("stagec_loads", "stagec_load_seconds", "stagec_model", "process_start_time_seconds", "process_max_fds")
"""Of several processes the largest, and not the sum."""


def summed(texts: Iterable[str], ended: Iterable[str]) -> str:
    """Return the metrics of several processes as those of one. ended: of processes that are gone: they count on."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text, is_gone in (*((text, False) for text in texts), *((text, True) for text in ended)):
        for family in text_string_to_metric_families(text):
            if is_gone and family.type == "gauge":
                continue
            families.setdefault(family.name, family)
            largest = family.name in _LARGEST or family.name.endswith("_created")
            known = values.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                before = known.get(key, 0)
                known[key] = max(before, sample.value) if largest else before + sample.value

    class Sums(Collector):
        def collect(self) -> Iterator[Metric]:
            for name, family in families.items():
                family.samples = []
                for (of, labels), number in values[name].items():
                    family.add_sample(of, dict(labels), number)
                yield family

    registry = CollectorRegistry()
    registry.register(Sums())
    return generate_latest(registry).decode()


def _histogram(name: str, what: str, buckets: Sequence[float], registry: CollectorRegistry) -> Histogram:
    return Histogram(name, what, ("model",), buckets=buckets, registry=registry)
