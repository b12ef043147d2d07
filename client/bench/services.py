"""The services that a benchmark starts: a pair, and others beside it that differ in one thing. It measures nothing."""

import asyncio
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from client.bench.cell import Endpoint
from client.client import Client
from client.demo import wait_for_drafter
from client.pair import Pair, plan
from client.supervisor import Child, Supervisor
from client.up import children, free_ports
from shared.address import split_address
from shared.errors import OutriderError
from verifier_service.config import VerifierConfig

_GRACE_S = 15.0
_LOG_LINES = 60
_HOST = "127.0.0.1"
_MAX_WINDOW = 256


@dataclass(frozen=True, slots=True)
class Station:
    """A verifier with or without a draft service.

    Args:
        name: told in logs.
        assignments: settings of the services, as for `outrider up --set`.
        has_drafter: whether a draft service is started.
        run_ahead: rounds that the drafter may be ahead of the one that is verified; None leaves the window alone.
    """

    name: str
    assignments: tuple[str, ...] = ()
    has_drafter: bool = True
    run_ahead: int | None = None


@dataclass(frozen=True, slots=True)
class Models:
    """What the services run.

    Args:
        target: hub id, directory or alias; None is the default.
        draft: hub id or directory; None is n-gram lookup.
        simulate: figures of stand-ins instead of both; empty for none.
        rtt_ms: round trip that is added to the link; None leaves it alone.
    """

    target: str | None
    draft: str | None
    simulate: str
    rtt_ms: float | None


@asynccontextmanager
async def started(stations: Sequence[Station], models: Models) -> AsyncIterator[Mapping[str, Endpoint]]:
    """Starts services on free ports and stops them at the end.

    Yields:
        What can be asked, by the station's name; drafters are attached.

    Raises:
        ConfigError: a setting is wrong.
        OutriderError: a service did not start, or what was done with them failed; the text has the end of the logs.
    """
    pairs = {station.name: _plan(models, station) for station in stations}
    log: deque[str] = deque(maxlen=_LOG_LINES)
    group = [child for station in stations for child in _children(station, pairs[station.name], models.rtt_ms)]
    async with AsyncExitStack() as open_:
        try:
            supervisor = await open_.enter_async_context(Supervisor(group, lambda name, line: log.append(f"{name}: {line}"), _GRACE_S))
            await supervisor.wait_until_ready()
            endpoints = {}
            for station in stations:
                pair = pairs[station.name][0]
                client = await open_.enter_async_context(Client(pair.verifier.listen))
                if station.has_drafter:
                    await wait_for_drafter(client)
                endpoints[station.name] = Endpoint(client, pair.verifier.metrics)
            yield endpoints
        except OutriderError as error:
            raise OutriderError("\n".join([str(error), *log])) from error


def _plan(models: Models, station: Station) -> tuple[Pair, str]:
    """The configurations of both services, and where the draft service's link goes: to the verifier's, or to a relay before it."""
    door, link, metrics, draft_door, draft_metrics, relay = (f"{_HOST}:{port}" for port in free_ports(6))
    to_verifier = [f"--listen={door}", f"--link={link}", f"--metrics={metrics}", "--log-level=warning"]
    to_draft = [f"--listen={draft_door}", f"--metrics={draft_metrics}", "--log-level=error"]
    if models.simulate:
        # Simulated machines are two, so the window is what it is on two.
        window = VerifierConfig.model_fields["window"].default
        to_verifier += ["--target=stand-in", f"--simulate={models.simulate}", f"--window={window}"]
        to_draft += [f"--simulate={models.simulate}"]
    else:
        to_verifier += [f"--target={models.target}"] if models.target else []
        to_draft += [f"--draft={models.draft}"] if models.draft else []
    if models.rtt_ms is not None:
        to_draft += [f"--link={relay}"]
    assignments = ["log-format=console", *station.assignments]
    pair = plan(to_verifier, to_draft, assignments)
    if station.run_ahead is not None:
        window = min(pair.verifier.max_draft_tokens * (1 + station.run_ahead), _MAX_WINDOW)
        pair = plan(to_verifier, to_draft, [*assignments, f"verifier.window={window}"])
    return pair, relay


def _children(station: Station, planned: tuple[Pair, str], rtt_ms: float | None) -> list[Child]:
    pair, relay = planned
    verifier, draft = children(pair)
    group = [verifier]
    if station.has_drafter and rtt_ms is not None:
        command = ("--listen", relay, "--target", pair.verifier.link, "--delay-ms", str(rtt_ms / 2))
        group.append(Child("relay", (sys.executable, "-P", "-m", "client.bench.delay_proxy", *command), os.environ, partial(_accepts, relay)))
    if station.has_drafter:
        group.append(draft)
    return [replace(child, name=f"{child.name} of {station.name}") for child in group]


async def _accepts(address: str) -> bool:
    try:
        _, writer = await asyncio.open_connection(*split_address(address))
    except OSError:
        return False
    writer.close()
    return True
