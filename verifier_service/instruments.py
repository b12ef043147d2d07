"""Families of Prometheus metrics with the labels that all of a verifier's have, and counters fed with totals. It does not know which there are."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREFIX = "outrider_"
OTHER = "other"
_COMMON = ("model_name", "engine")  # vLLM's labels, so that its dashboards work with another prefix


class Maker:
    """Registers families with the common labels bound, and their children."""

    def __init__(self, registry: CollectorRegistry, common: Mapping[str, str]) -> None:
        self._registry = registry
        self._common = dict(common)

    def counter(self, name: str, text: str) -> Counter:
        """A counter."""
        return Counter(PREFIX + name, text, _COMMON, registry=self._registry).labels(**self._common)

    def gauge(self, name: str, text: str) -> Gauge:
        """A gauge."""
        return Gauge(PREFIX + name, text, _COMMON, registry=self._registry).labels(**self._common)

    def histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        """A histogram."""
        return Histogram(PREFIX + name, text, _COMMON, buckets=tuple(buckets), registry=self._registry).labels(**self._common)

    def family(self, name: str, text: str, label: str) -> Callable[[str], Gauge]:
        """A gauge whose label values are known only later: give one, get its child."""
        family = Gauge(PREFIX + name, text, (*_COMMON, label), registry=self._registry)
        return lambda value: family.labels(**self._common, **{label: value})

    def counters(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        """Counters by a label's values."""
        family = Counter(PREFIX + name, text, (*_COMMON, label), registry=self._registry)
        return {value: family.labels(**self._common, **{label: value}) for value in values}

    def pairs(self, name: str, text: str, labels: tuple[str, str], values: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Counter]:
        """Counters by the values of two labels."""
        family = Counter(PREFIX + name, text, (*_COMMON, *labels), registry=self._registry)
        return {value: family.labels(**self._common, **dict(zip(labels, value, strict=True))) for value in values}

    def gauges(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Gauge]:
        """Gauges by a label's values."""
        family = Gauge(PREFIX + name, text, (*_COMMON, label), registry=self._registry)
        return {value: family.labels(**self._common, **{label: value}) for value in values}


class Cumulative:
    """A counter fed with totals. A total that seems to fall (read while a link went) is waited out, never counted twice."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._total = 0

    def raise_to(self, total: int) -> None:
        """Takes a total."""
        if total > self._total:
            self._counter.inc(total - self._total)
            self._total = total


def raise_all(children: Mapping[str, Cumulative], totals: Mapping[str, int]) -> None:
    """Takes totals by reason; those of unknown reasons are added up as `other`."""
    for reason, child in children.items():
        if reason != OTHER:
            child.raise_to(totals.get(reason, 0))
    children[OTHER].raise_to(sum(total for reason, total in totals.items() if reason not in children or reason == OTHER))
