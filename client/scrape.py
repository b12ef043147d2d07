"""Reads a service's Prometheus metrics as plain numbers. It knows the format, not the names."""

import asyncio
import urllib.request
from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 5.0


async def scrape(address: str) -> dict[str, float]:
    """Every sample of http://`address`/metrics by its name, those that differ only in labels added up.

    Raises:
        OSError: it cannot be read.
    """
    return read_samples(await scrape_text(address))


async def scrape_text(address: str) -> str:
    """http://`address`/metrics as it is.

    Raises:
        OSError: it cannot be read.
    """
    return await asyncio.to_thread(_fetch, address)


def read_samples(text: str) -> dict[str, float]:
    """Samples of the Prometheus text format by name, added up over labels. Buckets of histograms are left out."""
    samples: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                samples[sample.name] += sample.value
    return dict(samples)


def read_by_label(text: str, name: str, label: str) -> dict[str, float]:
    """Samples of one name by the value of one label, added up over the others."""
    samples: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and label in sample.labels:
                samples[sample.labels[label]] += sample.value
    return dict(samples)


def _fetch(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as response:
        return str(response.read().decode())
