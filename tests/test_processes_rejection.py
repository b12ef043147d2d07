"""Invariant 6 through the wire: in rejection mode the joint law of the first three tokens is the target's.

A real verifier and a real draft service, whose guesses come of another model, or of a speculator with lookup switched on: 20,000 requests
with the seeds 0..N-1. Each goes on for a few tokens, so that guesses for the first three are there; nothing is selected by what came. What the
services draw in this mode is private and new in every run: ALPHA is the rate of false alarms.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
from outrider.v1 import generate_pb2, verifier_pb2_grpc
from scipy import stats

from shared.engine.model_loader import load
from tests.support.model_dir import save_small_vocabulary
from tests.support.processes import DEADLINE_S, Services, VerifierProcess
from tests.support.tiny_speculators import save_speculator, trained_speculator

NUM_REQUESTS = 20_000
CONCURRENCY = 192
ALPHA = 1e-4
NUM_IDS = 5
NUM_TOKENS = 3
MAX_TOKENS = 5
PROMPT = (1, 3)
MIN_EXPECTED = 10

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Outcome:
    """First tokens of all requests, and what speculation did for them."""

    texts: Counter[tuple[int, ...]]
    rounds: int
    drafted: int
    accepted: int
    accepted_early: int  # among the first tokens


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("models")
    return (
        save_small_vocabulary(directory / "target", NUM_IDS, seed=1, scale_head=4.0),
        save_small_vocabulary(directory / "draft", NUM_IDS, seed=2, scale_head=4.0),
    )


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with Services() as services:
        yield services


@pytest.fixture(autouse=True)
def logs(services: Services) -> Iterator[None]:
    yield
    services.show()


@pytest.fixture(scope="module", params=["model", "speculator"])
def outcome(request: pytest.FixtureRequest, services: Services, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    target, draft = models
    if request.param == "speculator":
        speculator = trained_speculator(load(str(target), "float64"))
        directory = save_speculator(speculator, tmp_path_factory.mktemp("speculator"))
        flags: tuple[str, ...] = ("--speculator", str(directory), "--ngram-first", "on")
    else:
        flags = ("--draft", str(draft))
    verifier = services.launch_large_verifier(
        target, "--max-num-seqs", str(CONCURRENCY), "--max-draft-tokens", "3", "--window", "6", seconds=0.06
    ).serving()
    services.launch_draft(verifier.address, verifier.link, "--capacity", str(CONCURRENCY), *flags).attached()
    return asyncio.run(run_all(verifier))


async def run_all(verifier: VerifierProcess) -> Outcome:
    texts: Counter[tuple[int, ...]] = Counter()
    usage, accepted_early = generate_pb2.Usage(), 0
    seeds = iter(range(NUM_REQUESTS))

    async def work(channel: grpc.aio.Channel) -> None:
        nonlocal accepted_early
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        for seed in seeds:
            token_ids: list[int] = []
            async for response in stub.Generate(make_request(seed), timeout=DEADLINE_S):
                accepted_early += max(0, min(NUM_TOKENS - len(token_ids), response.output.accepted))
                token_ids += response.output.token_ids
                usage.rounds += response.finished.usage.rounds
                usage.drafted_tokens += response.finished.usage.drafted_tokens
                usage.accepted_tokens += response.finished.usage.accepted_tokens
            texts[tuple(token_ids[:NUM_TOKENS])] += 1

    async with grpc.aio.insecure_channel(verifier.address) as channel, asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(work(channel))
    return Outcome(texts, usage.rounds, usage.drafted_tokens, usage.accepted_tokens, accepted_early)


def make_request(seed: int) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        token_ids=generate_pb2.TokenIds(ids=PROMPT),
        sampling=generate_pb2.Sampling(temperature=1.0, seed=seed),
        stopping=generate_pb2.Stopping(max_tokens=MAX_TOKENS),
        mode=generate_pb2.VERIFICATION_MODE_REJECTION,
    )


def joint_law(model_dir: Path) -> dict[tuple[int, ...], float]:
    """Probability of every text of NUM_TOKENS tokens after the prompt, by the unmodified model."""
    model = load(str(model_dir), "float64").model
    model.set_attn_implementation("eager")
    texts = list(itertools.product(range(NUM_IDS), repeat=NUM_TOKENS))
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *text] for text in texts]), use_cache=False).logits[:, len(PROMPT) - 1 : -1, :NUM_IDS]
    chosen = logits.log_softmax(-1).gather(-1, torch.tensor(texts)[..., None])[..., 0]
    return dict(zip(texts, chosen.sum(-1).exp().tolist(), strict=True))


def p_value(texts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Chi-square test; texts that are expected fewer than MIN_EXPECTED times count as one."""
    num_texts = texts.total()
    common = [text for text, probability in law.items() if probability * num_texts >= MIN_EXPECTED]
    expected = [law[text] * num_texts for text in common]
    observed = [texts[text] for text in common]
    if num_texts - sum(expected) >= MIN_EXPECTED:
        expected, observed = [*expected, num_texts - sum(expected)], [*observed, num_texts - sum(observed)]
    return float(stats.chisquare(observed, [count * sum(observed) / sum(expected) for count in expected]).pvalue)


def test_the_first_three_tokens_have_the_targets_joint_law(outcome: Outcome, models: tuple[Path, Path]) -> None:
    assert outcome.texts.total() == NUM_REQUESTS
    # Drafts were really tested, where it counts, and rejected.
    assert outcome.rounds > NUM_REQUESTS / 20
    assert outcome.accepted_early > NUM_REQUESTS / 50
    assert outcome.drafted - outcome.accepted > NUM_REQUESTS / 20
    assert p_value(outcome.texts, joint_law(models[0])) > ALPHA


def test_that_very_test_would_notice_the_drafts_law(outcome: Outcome, models: tuple[Path, Path]) -> None:
    """Negative control."""
    assert p_value(outcome.texts, joint_law(models[1])) < ALPHA
