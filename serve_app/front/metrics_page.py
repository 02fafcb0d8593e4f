"""`/metrics`: what the replicas of all models have counted, added up and written as Prometheus' text."""

import asyncio
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.requests import Request
from starlette.responses import Response

from serve_app.front.endpoints import catalogue
from serve_app.front.endpoints.endpoint import Handler, Handlers
from serve_app.front.peers import Everybody
from serve_app.metrics.catalogue import (
    EXPORTED,
    REPLICAS,
    SILENT_REPLICAS,
    Kind,
    Metric,
    common_labels,
)
from serve_app.metrics.tally import Distribution, Key, Sums
from serve_app.models.model_client import ModelClient, Scrape
from serve_app.models.registry import of_each
from serve_app.models.remote_errors import unwrap

logger = logging.getLogger(__name__)

_REPLICAS_ANSWER_WITHIN_S = 0.7
_ALL_WITHIN_S = 0.9  # Prometheus gives up after a time of its own; ours is a second
_ALL_ENGINES = "all"


class Exposition:
    """Answers `GET /metrics`. Wakes no model, and waits for no replica that is stuck."""

    def __init__(self, models: Mapping[str, ModelClient], everybody: Everybody) -> None:
        self._models = models
        self._everybody = everybody

    def handlers(self) -> Handlers:
        return [Handler(catalogue.METRICS, self.respond)]

    async def respond(self, request: Request, asked: None) -> Response:
        scrapes = await of_each(self._models, self._scrape)
        sums = await self._everybody.share({name: each.snapshots for name, each in scrapes.items()})
        found = [ModelMetrics(name, sums[name], each) for name, each in scrapes.items()]
        return Response(render(found), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _scrape(self, model: ModelClient) -> Scrape:
        try:
            async with asyncio.timeout(_ALL_WITHIN_S):
                return await model.metrics(_REPLICAS_ANSWER_WITHIN_S)
        except Exception as exc:  # noqa: BLE001  # the other models are to be seen all the same
            logger.warning("no metrics of %s: %s", model.info.model_id, unwrap(exc))
            return Scrape()


class ModelMetrics:
    """All series of one model."""

    def __init__(self, model_id: str, sums: Sums, scrape: Scrape) -> None:
        self._model_id = model_id
        self._sums = _ZERO + sums
        self._scrape = scrape

    def add_to(self, family: Family, metric: Metric) -> None:
        for key, value in sorted(self._sums.counters.items()):
            if key[0] == metric.name:
                assert isinstance(family, CounterMetricFamily)
                family.add_metric(self._labels(metric, _ALL_ENGINES, key), value)
        for key, found in sorted(self._sums.distributions.items(), key=lambda item: item[0]):
            if key[0] == metric.name:
                assert isinstance(family, HistogramMetricFamily)
                labels = self._labels(metric, _ALL_ENGINES, key)
                family.add_metric(labels, _cumulative(metric, found), found.total)
        if metric.kind is Kind.GAUGE:
            assert isinstance(family, GaugeMetricFamily)
            for labels, value in self._gauges(metric):
                family.add_metric(labels, value)

    def _gauges(self, metric: Metric) -> Iterator[tuple[list[str], float]]:
        if metric is SILENT_REPLICAS:
            yield [self._model_id], self._scrape.silent
        elif metric is REPLICAS:
            states = [snapshot.state for snapshot in self._scrape.snapshots]
            for state in metric.labels["state"]:
                yield [self._model_id, state], states.count(state)  # type: ignore[arg-type]  # a StrEnum
        else:
            for snapshot in self._scrape.snapshots:
                for key, value in snapshot.gauges.items():
                    if key[0] == metric.name:
                        yield self._labels(metric, snapshot.replica_id, key), value

    def _labels(self, metric: Metric, engine: str, key: Key) -> list[str]:
        where = [engine] if len(common_labels(metric)) > 1 else []
        return [self._model_id, *where, *key[1]]


class _Families(Collector):
    def __init__(self, found: Sequence[ModelMetrics]) -> None:
        self._found = found

    def collect(self) -> Iterator[Family]:
        for metric in EXPORTED:
            family = _FAMILIES[metric.kind](
                metric.name, metric.help, labels=(*common_labels(metric), *metric.labels)
            )
            for model in self._found:
                model.add_to(family, metric)
            yield family


def render(found: Sequence[ModelMetrics]) -> bytes:
    """Prometheus' text format, version 0.0.4."""
    return generate_latest(_Families(found))


def _cumulative(metric: Metric, found: Distribution) -> list[tuple[str, float]]:
    bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
    return list(zip(bounds, itertools.accumulate(found.counts), strict=True))


def _zero() -> Sums:
    """Every series that can be told beforehand, so that its first event is an increase."""
    counters: dict[Key, float] = {}
    distributions: dict[Key, Distribution] = {}
    for metric in EXPORTED:
        nothing = Distribution((0,) * (len(metric.buckets) + 1), 0.0)
        for labels in metric.series:
            if metric.kind is Kind.COUNTER:
                counters[metric.name, labels] = 0
            elif metric.kind is Kind.HISTOGRAM:
                distributions[metric.name, labels] = nothing
    return Sums(counters, distributions)


_ZERO = _zero()
_FAMILIES: Mapping[Kind, type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}
