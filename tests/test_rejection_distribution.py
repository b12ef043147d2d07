"""Rejection mode gives the target's distribution: the joint law of the first three tokens of a request.

The rounds run for all requests side by side, through the functions that the services run: scores, wire form and draws of the drafter, the
verifier's ratio test, uniforms from private keys. The target and the draft are tables over the last two tokens; with penalties the whole text
counts. A drafter runs ahead and keeps a tail of its guesses; how far it is, what has arrived and how many guesses are scored depends on clocks
alone; late guesses are matched. Nothing is selected by the length of a block: rounds go on until three tokens are there.

Seeds are 0..N-1, so nothing here is flaky; alpha is the false alarm rate of each chi-square test at the time the seeds were chosen.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from scipy import stats
from torch import Tensor

from shared.drawing import invert, pad, to_wire
from shared.noise import derive_key, key_tensor, uniforms
from shared.picking import probabilities, process
from shared.sampling import Pick, SamplingParams, TokenRules
from tests.support.tabular import TabularModel
from verifier_service.rejection import Guesses, Uniforms, uniforms_from, verify_batch

NUM_REQUESTS = 100_000
ALPHA = 1e-4
NUM_TOKENS = 3
NUM_IDS = 5  # of the target; the draft also knows id 5, which the target does not
NUM_DRAFT_IDS = 6
MAX_AHEAD = 3  # guesses in a tail, and in a round
PROMPT = (1, 3)
TARGET, DRAFT = TabularModel(NUM_IDS, seed=1), TabularModel(NUM_DRAFT_IDS, seed=2)

# Texts up to the longest that a row stands for, as nodes of a tree: node -> node * NUM_DRAFT_IDS + 1 + token.
TEXTS = [text for depth in range(NUM_TOKENS + MAX_AHEAD) for text in itertools.product(range(NUM_DRAFT_IDS), repeat=depth)]


def child(nodes: Tensor, token_ids: Tensor) -> Tensor:
    return nodes * NUM_DRAFT_IDS + 1 + token_ids


@dataclass(frozen=True)
class Tables:
    """For every text: the target's distribution, what the draft draws from, and what it says that it draws from."""

    target: Tensor  # [texts, NUM_IDS]
    support: Tensor  # [texts, pairs]
    drawn_from: Tensor  # [texts, pairs]
    claimed: Tensor  # [texts, pairs]


def make_tables(sampling: SamplingParams, draft_sampling: SamplingParams, max_pairs: int = 64, claimed_pairs: int = 64) -> Tables:
    texts = [[*PROMPT, *text] for text in TEXTS]

    def scores(model, parameters, num_ids):
        picks = [Pick(TokenRules(parameters, len(PROMPT), num_ids), 0, PROMPT, text) for text in TEXTS]
        return process(model.logits(texts), picks), picks

    target = probabilities(*scores(TARGET, sampling, NUM_IDS))
    support, drawn_from = pad(to_wire(scores(DRAFT, draft_sampling, NUM_DRAFT_IDS)[0], max_pairs))
    best_first = torch.arange(support.shape[-1])
    return Tables(target, support, drawn_from, torch.where(best_first < claimed_pairs, drawn_from, 0.0))


@dataclass(frozen=True)
class Keys:
    """[N] each, int64 bits."""

    draft: Tensor
    accept: Tensor
    residual: Tensor
    plain: Tensor


@pytest.fixture(scope="module")
def keys() -> Keys:
    return Keys(*(key_tensor(derive_key(seed, label) for seed in range(NUM_REQUESTS)) for label in ("draft", "accept", "residual", "plain")))


Trim = Callable[[Guesses, Tensor], Tensor]  # guesses and target rows to the number of guesses to use


@dataclass(frozen=True)
class Practice:
    """How the services behave; the defaults obey the one rule, every other value breaks it."""

    verify: Callable[[Tensor, Guesses, Uniforms], tuple[Tensor, Tensor]] = verify_batch
    min_confidence: float = 0.0  # a drafter does not send a token that it has drawn with less
    trim: Trim | None = None


def first_tokens(tables: Tables, keys: Keys, practice: Practice = Practice(), seed: int = 0) -> Tensor:
    """Runs all requests until each has three tokens: [N, NUM_TOKENS] ids."""
    clocks = torch.Generator().manual_seed(seed)
    num_requests = len(keys.draft)
    emitted = torch.full((num_requests, NUM_TOKENS), -1)
    live = torch.arange(num_requests)
    length = torch.zeros(num_requests, dtype=torch.int64)  # tokens after the prompt
    node = torch.zeros(num_requests, dtype=torch.int64)
    tail = torch.full((num_requests, MAX_AHEAD), -1)
    tail_length = torch.zeros(num_requests, dtype=torch.int64)
    arrived = torch.zeros(num_requests, dtype=torch.int64)
    while len(live):
        ahead = torch.randint(0, MAX_AHEAD + 1, live.shape, generator=clocks)
        grow_tails(tables, keys.draft[live], length, node, tail, tail_length, ahead, practice.min_confidence)
        arrived = torch.minimum(arrived + torch.randint(0, MAX_AHEAD + 1, live.shape, generator=clocks), tail_length)
        counts = torch.minimum(arrived, torch.randint(0, MAX_AHEAD + 1, live.shape, generator=clocks))

        rows = [node]
        for i in range(MAX_AHEAD):
            rows.append(torch.where(i < counts, child(rows[-1], tail[:, i]), 0))
        places = torch.stack(rows, dim=1)
        scored = torch.arange(MAX_AHEAD) < counts[:, None]
        guesses = Guesses(torch.where(scored, tail, -1), counts, tables.support[places[:, :-1]], tables.claimed[places[:, :-1]] * scored[..., None])
        target = tables.target[places]
        if practice.trim is not None:
            counts = practice.trim(guesses, target)
            scored = torch.arange(MAX_AHEAD) < counts[:, None]
            guesses = Guesses(torch.where(scored, guesses.token_ids, -1), counts, guesses.support, guesses.weights)
        positions = length + len(PROMPT)
        draws = Uniforms(*(uniforms_from(positions, stream[live], MAX_AHEAD + 1) for stream in (keys.accept, keys.residual, keys.plain)))
        accepted, next_ids = practice.verify(target, guesses, draws)

        for i in range(MAX_AHEAD + 1):
            is_emitted = i <= accepted
            token_ids = next_ids if i == MAX_AHEAD else torch.where(i < accepted, tail[:, i], next_ids)
            wanted = is_emitted & (length + i < NUM_TOKENS)
            emitted[live[wanted], (length + i)[wanted]] = token_ids[wanted]
            node = torch.where(is_emitted, child(node, token_ids), node)
        # A tail whose head is what was emitted lives on; its last token may be one that had not arrived, or was not scored.
        matches = (accepted < tail_length) & (tail.gather(1, accepted.clamp(max=MAX_AHEAD - 1)[:, None])[:, 0] == next_ids)
        gone = accepted + 1
        kept = torch.where(matches, tail_length - gone, 0)
        arrived = torch.where(matches, (arrived - gone).clamp(min=0), 0)
        tail = tail.gather(1, (torch.arange(MAX_AHEAD) + gone[:, None]).clamp(max=MAX_AHEAD - 1))
        length = length + gone
        going = length < NUM_TOKENS
        live, length, node, tail, tail_length, arrived = (state[going] for state in (live, length, node, tail, kept, arrived))
    return emitted


def grow_tails(tables, draft_keys, length, node, tail, tail_length, ahead, min_confidence):
    """Draws guesses behind each tail until it holds `ahead`, in place; a token below the confidence ends its tail unsent."""
    end = node
    may_grow = torch.ones_like(ahead, dtype=torch.bool)
    for i in range(MAX_AHEAD):
        grows = (i >= tail_length) & (i < ahead) & may_grow
        end = torch.where(grows | (i < tail_length), end, 0)
        places = invert(tables.drawn_from[end], uniforms(draft_keys, length + len(PROMPT) + i))
        confident = tables.drawn_from[end, places] >= min_confidence
        may_grow = may_grow & (confident | ~grows)
        grows = grows & confident
        tail[grows, i] = tables.support[end, places][grows]
        tail_length[grows] = i + 1
        end = torch.where(i < tail_length, child(end, tail[:, i].clamp(min=0)), 0)


def p_value(tables: Tables, emitted: Tensor) -> float:
    """Chi-square of the joint law; cells with an expectation under 10 are pooled."""
    assert emitted.min() >= 0
    assert emitted.max() < NUM_IDS, "the target's tokens alone are emitted"
    texts = torch.tensor(list(itertools.product(range(NUM_IDS), repeat=NUM_TOKENS)))
    node = torch.zeros(len(texts), dtype=torch.int64)
    expected = torch.full((len(texts),), float(len(emitted)), dtype=torch.float64)
    for i in range(NUM_TOKENS):
        expected *= tables.target[node, texts[:, i]]
        node = child(node, texts[:, i])
    powers = torch.tensor([NUM_IDS**2, NUM_IDS, 1])
    observed = torch.bincount((emitted * powers).sum(-1), minlength=len(texts)).double()
    assert observed[expected == 0].sum() == 0, "what the target excludes is never emitted"
    rare = expected < 10
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    if expected[-1] < 10:  # the pool itself is too small to stand alone
        observed, expected = (torch.cat([cells[:-2], cells[-2:].sum()[None]]) for cells in (observed, expected))
    assert len(expected) > 20
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, len(expected) - 1))


PLAIN = SamplingParams()
SAMPLINGS = {
    "plain": (PLAIN, PLAIN),
    "top-k": (SamplingParams(top_k=4), SamplingParams(top_k=4)),
    "top-p": (SamplingParams(top_p=0.9), SamplingParams(top_p=0.9)),
    "penalties": (SamplingParams(repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.4),) * 2,
    "everything": (SamplingParams(temperature=1.3, top_k=4, top_p=0.95, min_p=0.02, frequency_penalty=0.5, logit_bias=((2, 0.7),)),) * 2,
    "a draft that ignores the target's masks": (SamplingParams(top_k=3), PLAIN),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_first_three_tokens_have_the_targets_joint_law(name, keys):
    tables = make_tables(*SAMPLINGS[name])
    assert p_value(tables, first_tokens(tables, keys)) > ALPHA


def test_a_draft_cut_to_few_pairs_before_its_draw_is_exact(keys):
    tables = make_tables(PLAIN, PLAIN, max_pairs=2)
    assert p_value(tables, first_tokens(tables, keys)) > ALPHA


def test_certain_guesses_are_exempt_from_the_selection_rules(keys):
    # A greedy draft is a function of the text: it may be trimmed after a look.
    tables = make_tables(PLAIN, PLAIN, max_pairs=1)
    assert p_value(tables, first_tokens(tables, keys, Practice(trim=trim_unlikely))) > ALPHA


def test_guesses_are_accepted_and_tails_survive(keys):
    # The simulation would show nothing if guesses were seldom tested.
    tested, accepted_all = [], []

    def watch(target, guesses, draws):
        accepted, next_ids = verify_batch(target, guesses, draws)
        tested.append(int(guesses.counts.sum()))
        accepted_all.append(int(accepted.sum()))
        return accepted, next_ids

    first_tokens(make_tables(PLAIN, PLAIN), keys, Practice(verify=watch))
    assert sum(tested) > NUM_REQUESTS
    assert 0.3 < sum(accepted_all) / sum(tested) < 0.9
    assert len(tested) > 2


# Practices that break the one rule: each is told apart from the target at the same N.


def draw_after_rejection_from_target(target, guesses, draws):
    accepted, next_ids = verify_batch(target, guesses, draws)
    rejected = (accepted < guesses.counts).nonzero()[:, 0]
    at = accepted[rejected]
    next_ids[rejected] = invert(target[rejected, at], draws.residual[rejected, at])
    return accepted, next_ids


def draw_residual_with_the_accept_uniform(target, guesses, draws):
    return verify_batch(target, guesses, Uniforms(draws.accept, draws.accept, draws.plain))


def until_first(stop: Tensor, counts: Tensor) -> Tensor:
    """Number of guesses before the first where `stop` holds."""
    return torch.minimum((~stop).long().cumprod(-1).sum(-1), counts)


def confidence(guesses: Guesses) -> Tensor:
    return (guesses.weights * (guesses.support == guesses.token_ids[..., None])).sum(-1)


def trim_unlikely(guesses: Guesses, target: Tensor) -> Tensor:
    """Keeps what comes before the first token that the target finds unlikely."""
    ids = guesses.token_ids.clamp(0, NUM_IDS - 1)[..., None]
    return until_first(target[:, :-1].gather(-1, ids)[..., 0] < 0.2, guesses.counts)


def drop_low_confidence(guesses: Guesses, target: Tensor) -> Tensor:
    return until_first(confidence(guesses) < 0.2, guesses.counts)


def drop_proposals_with_a_masked_token(guesses: Guesses, target: Tensor) -> Tensor:
    is_token = guesses.token_ids < NUM_IDS
    probs = target[:, :-1].gather(-1, torch.where(is_token, guesses.token_ids, 0).clamp(min=0)[..., None])[..., 0]
    is_masked = (~is_token | (probs == 0)) & (guesses.token_ids >= 0)
    return torch.where(is_masked.any(-1), 0, guesses.counts)


MASKED = SAMPLINGS["a draft that ignores the target's masks"]
BROKEN = {
    "wrong residual": (make_tables(PLAIN, PLAIN), Practice(verify=draw_after_rejection_from_target)),
    "truncated after sampling": (make_tables(PLAIN, PLAIN, claimed_pairs=3), Practice()),
    "one uniform for accept and residual": (make_tables(PLAIN, PLAIN), Practice(verify=draw_residual_with_the_accept_uniform)),
    "p_min on the sampled token": (make_tables(PLAIN, PLAIN), Practice(min_confidence=0.2)),
    "dropped low-confidence token": (make_tables(PLAIN, PLAIN), Practice(trim=drop_low_confidence)),
    "masked token that voids its proposal": (make_tables(*MASKED), Practice(trim=drop_proposals_with_a_masked_token)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_noticed(name, keys):
    tables, practice = BROKEN[name]
    assert p_value(tables, first_tokens(tables, keys, practice)) < ALPHA
