"""Counters, gauges and histograms for Prometheus.

Names follow vLLM, with the prefix `manyheads_`. No label has values that clients choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """All metrics of a server.

    REASONS: why requests are refused. ENDINGS: how requests end that the engine accepted.
    """

    REASONS = ("queue", "tokens", "loading", "draining", "body_size", "slow_body", "key", "host", "invalid")
    ENDINGS = ("completed", "cancelled", "deadline", "failed")

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counters("request_success", "Requests by their end.", "finished_reason", self.ENDINGS)
        self.rejected = self._counters("requests_rejected", "Requests refused, by reason.", "reason", self.REASONS)
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts and sources that were accepted.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens that were generated.")
        self.steps = self._counter("engine_steps", "Steps of all batches.")
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first result.")
        self.each_token = self._histogram("time_per_output_token_seconds", "Duration of a step of a batch.")
        self.latency = self._histogram("e2e_request_latency_seconds", "From arrival to the end of the answer.")
        self.queue_time = self._histogram("request_queue_time_seconds", "From arrival to the first step.")
        self.batch_rows = self._histogram("batch_rows", "Rows of a batch when it starts.", _ROWS)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, text, labels, namespace="manyheads", registry=self._registry)

    def _counters(self, name: str, text: str, label: str, values: Sequence[str]) -> dict[str, Counter]:
        counter = self._counter(name, text, [label])
        return {value: counter.labels(value) for value in values}

    def _histogram(self, name: str, text: str, bounds: Sequence[float] = _SECONDS) -> Histogram:
        return Histogram(name, text, namespace="manyheads", registry=self._registry, buckets=bounds)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a number that is determined when the metrics are read."""
        Gauge(name, text, namespace="manyheads", registry=self._registry).set_function(read)

    def render(self) -> str:
        """Return the text that Prometheus reads."""
        return generate_latest(self._registry).decode()
