"""Invariants 4 and 9 through the wire: real processes over real gRPC say what plain decoding says, and count what they did.

One verifier and a drafter of every kind; each test asks for its own. Token for token in float64 against `tests.support.oracle`.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from client import Client, Part
from client.bench.delay_proxy import DelayProxy
from shared.engine.model_loader import load
from shared.sampling import Mode, SamplingParams
from shared.tokenizer import load_tokenizer
from tests.support.calls import Referee, complete, complete_all, to_options
from tests.support.model_dir import EOS_IDS, ModelDirs, save_models
from tests.support.processes import DraftProcess, Services, VerifierProcess, scrape, until
from tests.support.tiny_speculators import save_speculator, trained_speculator
from verifier_service.request import Request, Stopping

MAX_DRAFT_TOKENS = 4
STOP_IDS = frozenset(range(10, 30))
GREEDY = SamplingParams(temperature=0.0)

# Values are exact in float32, as they travel.
REQUESTS = [
    Request("greedy", (4, 20, 33), GREEDY, Stopping(48), seed=0),
    Request("sampled", (5, 6, 7, 8), SamplingParams(), Stopping(48), seed=2**64 - 1),
    Request("top-k", (9, 10, 9, 10, 9), SamplingParams(temperature=0.75, top_k=8), Stopping(40), seed=3),
    Request("top-p", (12,) * 20, SamplingParams(temperature=1.25, top_p=0.75, min_p=0.03125), Stopping(40), seed=4),
    Request(
        "penalties",
        (40, 41, 42),
        SamplingParams(temperature=0.875, repetition_penalty=1.25, presence_penalty=0.5, frequency_penalty=0.375),
        Stopping(40),
        seed=5,
    ),
    Request("biased", (50, 51), SamplingParams(0.0, repetition_penalty=1.125, logit_bias=((70, 5.0), (90, -4.0))), Stopping(40), seed=6),
    Request("eos", (60, 61), SamplingParams(temperature=1.5), Stopping(200, min_tokens=12, eos_ids=EOS_IDS), seed=7),
    Request("stop-token", (70, 71, 72), SamplingParams(temperature=1.5), Stopping(200, min_tokens=5, stop_ids=STOP_IDS), seed=8),
]

# Of each kind of drafter, between which bounds the share of its guesses lies that are accepted.
ACCEPTANCE = {"perfect": (1.0, 1.0), "noisy": (0.4, 0.97), "lying": (0.3, 0.7), "random": (0.0, 0.3), "ngram": (0.0, 1.0), "speculator": (0.0, 0.9)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelDirs:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def referee(models: ModelDirs) -> Referee:
    return Referee(models)


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with Services() as services:
        yield services


@pytest.fixture(autouse=True)
def logs(services: Services) -> Iterator[None]:
    yield
    services.show()


@pytest.fixture(scope="module")
def lonely(services: Services, models: ModelDirs) -> VerifierProcess:
    """No drafter ever attaches to it."""
    return services.launch_verifier(models.target, name="lonely").serving()


@pytest.fixture(scope="module")
def verifier(services: Services, models: ModelDirs) -> VerifierProcess:
    return services.launch_large_verifier(models.target, "--max-draft-tokens", str(MAX_DRAFT_TOKENS)).serving()


@pytest.fixture(scope="module")
def speculator(models: ModelDirs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_speculator(trained_speculator(load(str(models.target), "float64")), tmp_path_factory.mktemp("speculator"))


@pytest.fixture(scope="module")
def drafters(services: Services, models: ModelDirs, speculator: Path, verifier: VerifierProcess) -> Iterator[dict[str, DraftProcess]]:
    """One of every kind, all attached; the noisy one is 10 ms away."""
    near = (verifier.address, verifier.link)
    with DelayProxy(verifier.link, delay_s=0.01) as far:
        started = {
            "perfect": services.launch_draft(*near, draft=models.target, name="perfect"),
            "noisy": services.launch_draft(verifier.address, far.address, draft=models.noisy, name="noisy"),
            "lying": services.launch_liar(*near, draft=models.target, rate=0.33, name="lying"),
            "random": services.launch_liar(*near, draft=models.target, rate=1.0, name="random"),
            "ngram": services.launch_draft(*near, "--ngram-min", "1", name="ngram"),
            "speculator": services.launch_draft(*near, "--speculator", str(speculator), "--ngram-first", "on", name="speculator"),
        }
        for drafter in started.values():
            drafter.attached()
        yield started


def asked_of(kind: str | None) -> list[Request]:
    return [replace(request, preferred_drafter=kind, max_draft_tokens=MAX_DRAFT_TOKENS) for request in REQUESTS]


async def test_without_a_drafter_the_output_is_that_of_plain_decoding(lonely: VerifierProcess, referee: Referee) -> None:
    asked = asked_of(None)
    completions = await complete_all(lonely.address, asked)
    for request, completion in zip(asked, completions, strict=True):
        referee.check(request, completion)
        assert completion.usage.rounds == 0
    assert {completion.reason for completion in completions} == {"length", "eos", "stop_token"}


@pytest.mark.parametrize("kind", ACCEPTANCE)
async def test_with_a_drafter_the_output_is_that_of_plain_decoding_and_the_counters_are_those_of_the_rounds(
    kind: str, verifier: VerifierProcess, drafters: dict[str, DraftProcess], referee: Referee
) -> None:
    asked, parts = asked_of(kind), list[Part]()
    before = await scrape(verifier.metrics)
    completions = await complete_all(verifier.address, asked, parts.append)
    after = await scrape(verifier.metrics)
    for request, completion in zip(asked, completions, strict=True):
        referee.check(request, completion)

    rounds, drafted, accepted = (
        sum(getattr(completion.usage, name) for completion in completions) for name in ("rounds", "drafted_tokens", "accepted_tokens")
    )
    low, high = ACCEPTANCE[kind]
    if kind in ("ngram", "random"):  # steps of a millisecond: what is nearly always wrong, or rarely there, may never be in time to be scored
        assert low * drafted <= accepted <= high * drafted
    else:
        assert drafted > (10 if kind == "speculator" else 50)  # that one is wrong so often that few of its guesses are worth a row
        assert low <= accepted / drafted <= high
    assert accepted == sum(part.accepted for part in parts)
    assert rounds >= sum(part.accepted > 0 for part in parts)
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    assert len(parts) == num_tokens - accepted + sum(len(part.token_ids) == part.accepted > 0 for part in parts)
    for name, counted in (
        ("spec_decode_num_drafts_total", rounds),
        ("spec_decode_num_draft_tokens_total", drafted),
        ("spec_decode_num_draft_tokens_per_pos_total", drafted),
        ("spec_decode_num_accepted_tokens_total", accepted),
        ("spec_decode_num_accepted_tokens_per_pos_total", accepted),
        ("acceptance_length_count", rounds),
        ("acceptance_length_sum", rounds + accepted),
        ("generation_tokens_total", num_tokens),
        ("prompt_tokens_total", sum(len(request.prompt_ids) for request in asked)),
        ("request_success_total", len(asked)),
        ("requests_failed_total", 0),
    ):
        assert after(name) - before(name) == counted, name

    async def guesses_came() -> bool:  # links are counted once a second
        return (await scrape(verifier.metrics))("received_guesses_total") > before("received_guesses_total")

    await until(guesses_came, "guesses of this drafter are counted")


async def test_the_edge_door_gives_the_same_and_asks_for_its_own_drafter(drafters: dict[str, DraftProcess], referee: Referee) -> None:
    asked = asked_of(None)
    completions = await complete_all(drafters["perfect"].address, asked)
    for request, completion in zip(asked, completions, strict=True):
        referee.check(request, completion)
        assert completion.usage.accepted_tokens == completion.usage.drafted_tokens  # no other drafter is always right
    assert sum(completion.usage.accepted_tokens for completion in completions) > 50
    async with Client(drafters["perfect"].address) as client:
        info = await client.info()
    assert info.draft_service is not None
    assert (info.draft_service.name, info.draft_service.attached) == ("perfect", True)
    assert {drafter.name for drafter in info.drafters} == set(ACCEPTANCE)


async def test_a_broken_call_is_resumed_with_the_same_text(verifier: VerifierProcess, drafters: dict[str, DraftProcess], referee: Referee) -> None:
    whole = replace(REQUESTS[1], preferred_drafter="noisy", max_draft_tokens=MAX_DRAFT_TOKENS)
    async with Client(verifier.address) as client:
        for num_read in (1, 3, 9):
            text, token_ids = "", list[int]()
            async with client.generate(whole.prompt_ids, **to_options(whole)) as generation:
                for _ in range(num_read):
                    part = await anext(generation)
                    text, token_ids = text + part.text, [*token_ids, *part.token_ids]
            rest = await complete(client, replace(whole, request_id="rest", resume_ids=tuple(token_ids)))
            assert rest.usage.generated_tokens == 48
            assert len(rest.token_ids) == 48 - len(token_ids)
            assert (*token_ids, *rest.token_ids) == tuple(referee.tokens(whole))
            assert text + rest.text == referee.decode(referee.tokens(whole))


async def test_speculation_can_be_turned_off_for_a_request(verifier: VerifierProcess, drafters: dict[str, DraftProcess], referee: Referee) -> None:
    plain = replace(REQUESTS[1], request_id="plain", max_draft_tokens=0)
    beside = replace(REQUESTS[1], request_id="beside", max_draft_tokens=MAX_DRAFT_TOKENS, preferred_drafter="perfect")
    off, on = await complete_all(verifier.address, [plain, beside])
    referee.check(plain, off)
    referee.check(beside, on)
    assert (off.usage.rounds, off.usage.drafted_tokens) == (0, 0)
    assert on.usage.rounds > 0


async def test_text_and_chat_are_tokenised_with_the_models_own_template(
    verifier: VerifierProcess, drafters: dict[str, DraftProcess], models: ModelDirs, referee: Referee
) -> None:
    tokenizer = load_tokenizer(models.target)
    messages = [{"role": "user", "content": "hello the world"}]
    async with Client(verifier.address) as client:
        for prompt, prompt_ids in (("hello the world", tokenizer.encode("hello the world")), (messages, tokenizer.render_chat(messages))):
            completion = await client.complete(prompt, seed=4, max_tokens=24, ignore_eos=True)
            assert completion.prompt_token_ids == tuple(prompt_ids)
            referee.check(Request("any", tuple(prompt_ids), SamplingParams(), Stopping(24), seed=4), completion)


async def test_a_stop_string_ends_the_text_before_its_first_character(
    verifier: VerifierProcess, drafters: dict[str, DraftProcess], referee: Referee
) -> None:
    whole = referee.decode(referee.tokens(REQUESTS[1]))
    stop = whole[20:24]
    async with Client(verifier.address) as client:
        options = to_options(replace(REQUESTS[1], preferred_drafter="perfect", max_draft_tokens=MAX_DRAFT_TOKENS))
        completion = await client.complete(REQUESTS[1].prompt_ids, stop=[stop], **options)
    assert completion.text == whole[: whole.index(stop)]
    assert (completion.reason, completion.matched) == ("stop_string", stop)
    assert completion.token_ids == tuple(referee.tokens(REQUESTS[1])[: len(completion.token_ids)])
    assert completion.usage.accepted_tokens <= completion.usage.drafted_tokens <= MAX_DRAFT_TOKENS * completion.usage.rounds


async def test_rejection_mode_with_one_possible_token_is_plain_decoding(
    verifier: VerifierProcess, drafters: dict[str, DraftProcess], referee: Referee
) -> None:
    """Greedy and top-k of one leave nothing to chance, so that the ratio test must give exactly the target's tokens."""
    asked = [
        replace(
            request, request_id=f"{kind}-{index}", sampling=sampling, mode=Mode.REJECTION, preferred_drafter=kind, max_draft_tokens=MAX_DRAFT_TOKENS
        )
        for kind in ("perfect", "noisy")
        for index, (request, sampling) in enumerate((request, sampling) for request in REQUESTS[:2] for sampling in (GREEDY, SamplingParams(top_k=1)))
    ]
    completions = await complete_all(verifier.address, asked)
    for request, completion in zip(asked, completions, strict=True):
        referee.check(request, completion)
    assert sum(completion.usage.accepted_tokens for completion in completions) > 50
