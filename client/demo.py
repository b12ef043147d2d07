"""The demonstration: both services on free ports, one generation that lookup helps, what it took, an orderly end. It measures nothing new."""

import asyncio
import sys
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from client.client import Client
from client.pair import Pair, plan
from client.render import summarise
from client.scrape import scrape
from client.streaming import stream_text
from client.supervisor import Supervisor
from client.up import children, free_ports, line_writer, show_loading
from shared.errors import OutriderError

_TEXT = (
    "The lighthouse stands on the northern cape. Every evening the keeper climbs the ninety-nine steps and lights the lamp. "
    "Every morning the keeper climbs the ninety-nine steps again and puts out the lamp. Ships that pass the northern cape look "
    "for the light, and when they see the light they know that the harbour is near."
)
_PROMPT = [{"role": "user", "content": f"Repeat the following text, word for word.\n\n{_TEXT}"}]
_ATTACH_S = 60.0
_GRACE_S = 15.0
_SETTLE_S = 1.5  # the services bring some of their numbers up to date once a second


async def run_demo(target: str | None, draft: str | None, max_tokens: int, console: Console) -> None:
    """Show that the pair works; text goes to standard output, all else to the console.

    Args:
        target: None is the default model.
        draft: None is n-gram lookup.
        max_tokens: most tokens to generate.
        console: for logs, progress and figures.

    Raises:
        OutriderError: anything did not work, a draft that was never accepted included.
    """
    pair = _plan(target, draft)
    async with Supervisor(children(pair), line_writer(console), _GRACE_S) as supervisor:
        await show_loading(supervisor, console)
        async with Client(pair.verifier.listen) as client:
            await wait_for_drafter(client)
            console.rule("the text, as it comes", style="dim")
            completion = await stream_text(client, _PROMPT, {"max_tokens": max_tokens, "temperature": 0.0})
            if not sys.stdout.isatty():
                sys.stdout.write("\n")
                sys.stdout.flush()
            console.rule(style="dim")
            console.print(summarise(completion), style="bold", markup=False, soft_wrap=True)
        await asyncio.sleep(_SETTLE_S)
        of_verifier, of_draft = await _scrape(pair.verifier.metrics), await _scrape(pair.draft.metrics)
        console.print(metrics_table(of_verifier, of_draft))
        _check(completion.timings.received_tokens, completion.usage.accepted_tokens, of_verifier)
    console.print("both services have stopped", style="dim")


def metrics_table(of_verifier: Mapping[str, float], of_draft: Mapping[str, float]) -> Table:
    """The key metrics of both services.

    Args:
        of_verifier: samples by name, as `scrape` gives them.
        of_draft: the same of the draft service.
    """
    accepted, drafted = (
        of_verifier.get("outrider_spec_decode_num_accepted_tokens_total"),
        of_verifier.get("outrider_spec_decode_num_draft_tokens_total"),
    )
    rounds = of_verifier.get("outrider_spec_decode_num_drafts_total")
    generated, latency = of_verifier.get("outrider_generation_tokens_total"), of_verifier.get("outrider_e2e_request_latency_seconds_sum")
    rows = [
        ("verifier", "acceptance rate (accepted / drafted)", _ratio(accepted, drafted), ".3f"),
        ("verifier", "mean accepted length (1 + accepted / rounds)", None if (mean := _ratio(accepted, rounds)) is None else 1 + mean, ".2f"),
        ("verifier", "drafted tokens", drafted, ".0f"),
        ("verifier", "accepted tokens", accepted, ".0f"),
        ("verifier", "stale guesses", of_verifier.get("outrider_draft_stale_total"), ".0f"),
        ("verifier", "time to first token, s", _mean(of_verifier, "outrider_time_to_first_token_seconds"), ".3f"),
        ("verifier", "tokens per second", _ratio(generated, latency), ".1f"),
        ("verifier", "verify step, ms", _milliseconds(_mean(of_verifier, "outrider_verify_step_seconds")), ".1f"),
        ("verifier", "wait for guesses per step, ms", _milliseconds(_mean(of_verifier, "outrider_draft_wait_seconds")), ".2f"),
        ("draft", "guesses sent", of_draft.get("outrider_draft_guesses_sent_total"), ".0f"),
        ("draft", "guesses that the target's tokens equalled", of_draft.get("outrider_draft_guesses_matched_total"), ".0f"),
        ("draft", "draft step, ms", _milliseconds(_mean(of_draft, "outrider_draft_step_seconds")), ".2f"),
    ]
    table = Table("service", "metric", "value", box=None, header_style="bold", pad_edge=False)
    table.columns[2].justify = "right"
    for service, name, figure, form in rows:
        table.add_row(service, name, "not reported" if figure is None else format(figure, form))
    return table


def _plan(target: str | None, draft: str | None) -> Pair:
    verifier_link, verifier_door, verifier_metrics, draft_door, draft_metrics = (f"127.0.0.1:{port}" for port in free_ports(5))
    to_verifier = ["--listen", verifier_door, "--link", verifier_link, "--metrics", verifier_metrics, "--log-level", "warning"]
    to_draft = ["--listen", draft_door, "--metrics", draft_metrics, "--log-level", "error"]  # while the verifier loads, nobody answers: no news
    return plan(
        [*to_verifier, *([f"--target={target}"] if target else [])],
        [*to_draft, *([f"--draft={draft}"] if draft else [])],
        ["log-format=console"],
    )


async def wait_for_drafter(client: Client) -> None:
    """Return once a draft service is attached to the verifier.

    Raises:
        OutriderError: the verifier refuses it, or none comes in time.
    """
    try:
        async with asyncio.timeout(_ATTACH_S):
            while not (info := await client.info()).drafters:
                if info.refused_drafters:
                    raise OutriderError(f"the verifier refused the draft service: {info.refused_drafters[-1].reason}")
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise OutriderError(f"no draft service attached within {_ATTACH_S:.0f} s") from None


async def _scrape(address: str) -> dict[str, float]:
    try:
        return await scrape(address)
    except OSError as error:
        raise OutriderError(f"no metrics at {address}: {error}") from error


def _check(received: int, accepted: int, of_verifier: Mapping[str, float]) -> None:
    if not received:
        raise OutriderError("nothing was generated")
    if not accepted:
        raise OutriderError("no guess of the draft service was accepted")
    if (counted := of_verifier.get("outrider_spec_decode_num_accepted_tokens_total")) != accepted:
        raise OutriderError(f"the verifier's metrics count {counted} accepted tokens, the answer {accepted}")


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _mean(samples: Mapping[str, float], histogram: str) -> float | None:
    return _ratio(samples.get(f"{histogram}_sum"), samples.get(f"{histogram}_count"))


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
