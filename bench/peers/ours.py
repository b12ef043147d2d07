"""Our services as the driver uses them: a batch of prompts over gRPC, stamped as it comes. It knows no peer."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bench.peers.lines import Answer, Arrivals, Job
from client import Client, Usage
from client.demo import wait_for_drafter
from client.pair import plan
from client.supervisor import Child, Supervisor
from client.up import children, free_ports, line_writer

_GRACE_S = 30.0
# The peer's prefix cache never finds a whole block in prompts this short; ours would, of prompts that come again.
_SETTINGS = ("prefix-cache=off", "kv-blocks=1024", "log-level=warning")
# What `outrider up` sets because two services share the cores.
_FOR_TWO = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@asynccontextmanager
async def serve(target: str, draft: str | None, assignments: Sequence[str], log: Path) -> AsyncIterator[Client]:
    """Both services with `outrider up`'s settings, or the verifier alone, on ports of their own; yields a client once they serve.

    Args:
        target: model of the verifier.
        draft: model of the draft service; None starts none.
        assignments: further `SETTING=VALUE`, as for `outrider up`.
        log: file for what they print.
    """
    listen, link, draft_listen = (f"127.0.0.1:{port}" for port in free_ports(3))
    pair = plan(
        ["--target", target, "--listen", listen, "--link", link, "--metrics", ""],
        ["--listen", draft_listen, "--metrics", "", *(["--draft", draft] if draft else [])],
        [*(setting for setting in _SETTINGS if not _is_set(setting, assignments)), *assignments],
    )
    started = children(pair) if draft else [_alone(children(pair)[0])]
    with log.open("w") as file:
        async with Supervisor(started, line_writer(Console(file=file)), _GRACE_S) as supervisor:
            await supervisor.wait_until_ready()
            async with Client(listen) as client:
                if draft:
                    await wait_for_drafter(client)
                yield client


def _alone(child: Child) -> Child:
    """As somebody starts a verifier by hand: with nobody to share the cores with, threads wait as OpenMP has it."""
    return replace(child, environment={name: value for name, value in child.environment.items() if name not in _FOR_TWO})


async def run(client: Client, job: Job) -> Answer:
    """One batch, all requests at once."""
    arrivals = Arrivals(len(job.prompts))
    usages = await asyncio.gather(*(_stream(client, job, index, arrivals) for index in range(len(job.prompts))))
    rounds = sum(usage.rounds for usage in usages)
    return arrivals.to_answer(sum(usage.accepted_tokens for usage in usages) / rounds if rounds else None)


async def _stream(client: Client, job: Job, index: int, arrivals: Arrivals) -> Usage:
    generation = client.generate(job.prompts[index], temperature=job.temperature, seed=job.seed + index, max_tokens=job.max_tokens, ignore_eos=True)
    async with generation:
        async for part in generation:
            arrivals.add(index, part.token_ids)
        return generation.result.usage


def _is_set(setting: str, assignments: Sequence[str]) -> bool:
    name = setting.partition("=")[0]
    return any(assignment.partition("=")[0].rpartition(".")[2].replace("_", "-") == name for assignment in assignments)
