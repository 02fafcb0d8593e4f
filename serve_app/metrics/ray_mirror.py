"""What a replica counts, told to Ray as well: Ray's own dashboards read it there.

Recorded inside the replica, since they join on its worker id. Ray wants names without colons (one with
a colon is missing from its export, 2.60), and its histograms' sums are made of the buckets' middles:
exact ones are on `/metrics` only.
"""

from collections.abc import Mapping
from typing import Any

from ray.serve import metrics as serves

from serve_app.metrics.catalogue import OF_REPLICAS, Kind, Metric, begin_at_zero
from serve_app.metrics.tally import Key


class RayMirror:
    """A `Mirror` over Serve's metrics, which carry application, deployment and replica."""

    def __init__(self, model_name: str) -> None:
        """Make them all; only inside a replica."""
        self._tags = {"model_name": model_name}
        mirrored = [metric for metric in OF_REPLICAS if metric.in_ray]
        self._metrics = {metric.name: metric for metric in mirrored}
        self._counters = {m.name: _counter(m) for m in mirrored if m.kind is Kind.COUNTER}
        for name, counter in self._counters.items():
            begin_at_zero(counter, self._metrics[name], self._tags)
        self._gauges = {m.name: _gauge(m) for m in mirrored if m.kind is Kind.GAUGE}
        self._histograms = {m.name: _histogram(m) for m in mirrored if m.kind is Kind.HISTOGRAM}

    def add(self, metric: Metric, by: float, labels: tuple[str, ...]) -> None:
        if by > 0:  # Ray refuses 0
            self._counters[metric.name].inc(by, self._all_tags(metric, labels))

    def observe(self, metric: Metric, value: float, labels: tuple[str, ...]) -> None:
        self._histograms[metric.name].observe(value, self._all_tags(metric, labels))

    def set(self, gauges: Mapping[Key, float]) -> None:
        for (name, labels), value in gauges.items():
            self._gauges[name].set(value, self._all_tags(self._metrics[name], labels))

    def _all_tags(self, metric: Metric, labels: tuple[str, ...]) -> dict[str, str]:
        return self._tags | dict(zip(metric.labels, labels, strict=True))


def _tag_keys(metric: Metric) -> Any:
    """A tuple of any length, whatever Serve's annotations say."""
    return ("model_name", *metric.labels)


def _counter(metric: Metric) -> serves.Counter:
    return serves.Counter(metric.ray_name, metric.help, _tag_keys(metric))


def _gauge(metric: Metric) -> serves.Gauge:
    return serves.Gauge(metric.ray_name, metric.help, _tag_keys(metric))


def _histogram(metric: Metric) -> serves.Histogram:
    return serves.Histogram(metric.ray_name, metric.help, list(metric.buckets), _tag_keys(metric))
