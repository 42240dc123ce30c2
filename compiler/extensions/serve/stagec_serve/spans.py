"""Spans of OpenTelemetry, if the package opentelemetry-api is installed: one for each request, one for each call.

The maker of the `TracerProvider`, such as `opentelemetry-instrument`, decides where they go.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any


@functools.cache
def _api() -> Any:
    """Return the API; None if it is not installed."""
    try:
        from opentelemetry import propagate, trace
    except ImportError:
        return None
    return propagate, trace


@contextlib.contextmanager
def request(model: str, headers: Mapping[str, str]) -> Iterator[None]:
    """Make a span of a request, below the span in its headers (`traceparent`).

    headers: with names in lower case.
    """
    api = _api()
    if api is None:
        yield
        return
    propagate, trace = api
    tracer, above = trace.get_tracer("stagec"), propagate.extract(headers)
    kind, attributes = trace.SpanKind.SERVER, {"stagec.model": model}
    with tracer.start_as_current_span(f"infer {model}", above, kind, attributes):
        yield


def context() -> Any:
    """Return the context of a request for its call; None if nobody makes spans."""
    api = _api()
    if api is None:
        return None
    span = api[1].get_current_span().get_span_context()
    return span if span.trace_id else None


@contextlib.contextmanager
def call(model: str, requests: list[Any]) -> Iterator[dict[str, Any]]:
    """Make a span of a call, below that of its first request and with links to all; yield its attributes.

    requests: the result of `context` for each.
    """
    attributes: dict[str, Any] = {}
    known = [span for span in requests if span is not None]
    if not known:
        yield attributes
        return
    _, trace = _api()
    above = trace.set_span_in_context(trace.NonRecordingSpan(known[0]))
    links = [trace.Link(span) for span in known]
    with trace.get_tracer("stagec").start_as_current_span(f"call {model}", above, links=links) as span:
        yield attributes
        span.set_attributes({f"stagec.{name}": value for name, value in attributes.items()})
