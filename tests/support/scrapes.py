"""Metrics on a registry of their own, read as a scrape would."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from draft_service.metrics import DraftMetrics
from draft_service.servicer import SERVICE_NAME as DRAFT_SERVICE
from shared.rpc.serving_metrics import ServingMetrics
from verifier_service.link_servicer import SERVICE_NAME as LINK_SERVICE
from verifier_service.metrics import VerifierMetrics
from verifier_service.servicer import SERVICE_NAME as VERIFIER_SERVICE

COMMON = {"model_name": "tiny", "engine": "0"}
MAX_DRAFT_TOKENS = 4


@dataclass
class Clock:
    """Seconds that pass when told."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class Scrape:
    """Reads a registry by sample name (without `outrider_`) and labels."""

    def __init__(self, registry: CollectorRegistry, common: dict[str, str]) -> None:
        self.registry = registry
        self.common = common

    def __call__(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"outrider_{name}", self.common | labels)
        assert value is not None, f"{name} {labels} is not exported"
        return value


def verifier(max_draft_tokens: int = MAX_DRAFT_TOKENS) -> tuple[VerifierMetrics, Scrape]:
    """A verifier's metrics."""
    registry = CollectorRegistry()
    return VerifierMetrics(registry, "tiny", max_draft_tokens), Scrape(registry, COMMON)


def drafter() -> tuple[DraftMetrics, Scrape]:
    """A draft service's metrics."""
    registry = CollectorRegistry()
    return DraftMetrics(registry, ("ngram", "model")), Scrape(registry, {})


def serving(clock: Clock | None = None) -> tuple[ServingMetrics, Scrape]:
    """What both services have."""
    registry = CollectorRegistry()
    return ServingMetrics(registry, (VERIFIER_SERVICE, LINK_SERVICE, DRAFT_SERVICE), clock or Clock()), Scrape(registry, {})
