"""Counters, gauges and histograms in the text format of Prometheus.

Names follow vLLM, with the prefix `manyheads_`. No label has values that clients choose.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence

__all__ = ["Counter", "Gauge", "Histogram", "Metrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Counter:
    """A number that only grows, one for each value of its label.

    Args:
        name: without prefix.
        text: what it counts.
        label: name of the label; empty: there is one number only.
        values: all values of the label; others are refused with KeyError.
    """

    def __init__(self, name: str, text: str, label: str = "", values: Sequence[str] = ("",)) -> None:
        self.name, self.text, self.label = name, text, label
        self._counts = dict.fromkeys(values, 0.0)
        self._lock = threading.Lock()

    def add(self, amount: float = 1, value: str = "") -> None:
        """Add an amount to the number of a label's value."""
        with self._lock:
            self._counts[value] += amount

    def total(self) -> float:
        """Return the sum over all values of the label."""
        return sum(self._counts.values())

    def lines(self) -> list[str]:
        """Return the samples."""
        return [
            f"{self.name}{_labels(**{self.label: value} if self.label else {})} {_number(count)}"
            for value, count in self._counts.items()
        ]


class Gauge:
    """A number that is determined when the metrics are read.

    Args: name: without prefix; text: what it is; read: returns the number.
    """

    def __init__(self, name: str, text: str, read: Callable[[], float]) -> None:
        self.name, self.text, self._read = name, text, read

    def lines(self) -> list[str]:
        """Return the sample."""
        return [f"{self.name} {_number(self._read())}"]


class Histogram:
    """Counts of observations by size.

    Args: name: without prefix; text: what is observed; bounds: upper bounds of the buckets, ascending.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float] = _SECONDS) -> None:
        self.name, self.text, self._bounds = name, text, tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Count one observation."""
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def lines(self) -> list[str]:
        """Return the samples: cumulative buckets, sum and count."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        lines, so_far = [], 0
        for bound, count in zip((*map(_number, self._bounds), "+Inf"), counts, strict=True):
            so_far += count
            lines.append(f'{self.name}_bucket{{le="{bound}"}} {so_far}')
        return [*lines, f"{self.name}_sum {_number(total)}", f"{self.name}_count {so_far}"]


class Metrics:
    """All metrics of a server.

    REASONS: why requests are refused. ENDINGS: how requests end that the engine accepted.
    """

    PREFIX = "manyheads_"
    REASONS = ("queue", "tokens", "loading", "draining", "body_size", "slow_body", "key", "host", "invalid")
    ENDINGS = ("completed", "cancelled", "deadline", "failed")

    def __init__(self) -> None:
        self.requests = Counter("request_success_total", "Requests by their end.", "finished_reason", self.ENDINGS)
        self.rejected = Counter("requests_rejected_total", "Requests refused, by reason.", "reason", self.REASONS)
        self.prompt_tokens = Counter("prompt_tokens_total", "Tokens of prompts and sources that were accepted.")
        self.generation_tokens = Counter("generation_tokens_total", "Tokens that were generated.")
        self.steps = Counter("engine_steps_total", "Steps of all batches.")
        self.first_token = Histogram("time_to_first_token_seconds", "From arrival to the first result.")
        self.each_token = Histogram("time_per_output_token_seconds", "Duration of a step of a batch.")
        self.latency = Histogram("e2e_request_latency_seconds", "From arrival to the end of the answer.")
        self.queue_time = Histogram("request_queue_time_seconds", "From arrival to the first step.")
        self.batch_rows = Histogram("batch_rows", "Rows of a batch when it starts.", _ROWS)
        self.gauges: list[Gauge] = []

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge."""
        self.gauges.append(Gauge(name, text, read))

    def render(self) -> str:
        """Return the text that Prometheus reads."""
        kinds = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}
        lines = []
        for metric in (*(one for one in vars(self).values() if type(one) in kinds), *self.gauges):
            name = self.PREFIX + metric.name
            lines += [f"# HELP {name} {metric.text}", f"# TYPE {name} {kinds[type(metric)]}"]
            lines += [self.PREFIX + line for line in metric.lines()]
        return "\n".join(lines) + "\n"


def _labels(**labels: str) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
