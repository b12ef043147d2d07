"""From logits to tokens: against a slow, plain reading of the specification, row by row."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.noise import gumbel, key_tensor
from shared.picking import UNUSABLE_ID, finite_rows, pick_tokens, pick_usable, probabilities, process
from shared.sampling import SamplingParams
from tests.support.picks import make_pick

INF = float("inf")


def expected_scores(logits, pick):
    """The specification, one token at a time, in plain Python."""
    rules, sampling = pick.rules, pick.rules.sampling
    scores = list(logits)
    history = [*pick.committed, *pick.guesses]
    output = history[rules.prompt_length :]
    for token_id in {token_id for token_id in history if 0 <= token_id < len(scores)}:
        score = scores[token_id]
        scores[token_id] = score / sampling.repetition_penalty if score > 0 else score * sampling.repetition_penalty
        scores[token_id] -= sampling.presence_penalty * (token_id in output) + sampling.frequency_penalty * output.count(token_id)
    for token_id, addend in sampling.logit_bias:
        scores[token_id] += addend
    scores = [score if token_id < rules.vocab_size else -INF for token_id, score in enumerate(scores)]
    if pick.position < rules.suppressed_until:
        left = [-INF if token_id in rules.suppressed_ids else score for token_id, score in enumerate(scores)]
        scores = left if max(left) > -INF else scores
    if sampling.is_greedy:
        return scores
    scores = [score / sampling.temperature for score in scores]
    order = sorted(range(len(scores)), key=lambda token_id: (-scores[token_id], token_id))
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = [math.exp(scores[token_id] - scores[order[0]]) for token_id in order]
    if sampling.top_p < 1:
        num_kept = 1
        while num_kept < len(order) and math.fsum(weights[:num_kept]) < sampling.top_p * math.fsum(weights):
            num_kept += 1
        order = order[:num_kept]
    kept = {token_id for token_id, weight in zip(order, weights, strict=False) if weight >= sampling.min_p}
    return [score if token_id in kept else -INF for token_id, score in enumerate(scores)]


# Shares and thresholds that no small sum of weights meets exactly: at an exact meeting rounding decides, in either reading.
SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 5, 100]),
    top_p=st.sampled_from([1.0, 0.12345, 0.51234, 0.91234, 0.99991]),
    min_p=st.sampled_from([0.0, 0.0, 0.0312345, 0.412345]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.25]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    logit_bias=st.sampled_from([(), ((0, 3.5), (4, -2.0)), ((2, -100.0),)]),
)
# Few values, so that ties are common.
ROWS = st.lists(st.sampled_from([-3.0, -1.5, -0.5, 0.0, 0.5, 1.0, 2.0, 2.5]), min_size=8, max_size=8)
IDS = st.lists(st.integers(0, 7), max_size=5).map(tuple)


@st.composite
def batches(draw):
    num_rows = draw(st.integers(1, 6))
    logits = torch.tensor([draw(ROWS) for _ in range(num_rows)], dtype=torch.float64)
    picks = [
        make_pick(
            draw(SAMPLINGS),
            seed=draw(st.integers(0, 2**64 - 1)),
            committed=(0, *draw(IDS)),
            guesses=draw(IDS),
            prompt_length=draw(st.integers(0, 2)),
            vocab_size=draw(st.sampled_from([6, 8, 100])),
            suppressed=draw(st.sampled_from([(), (1,), (1, 3), tuple(range(8))])),
            until=draw(st.sampled_from([0, 4, 100])),
        )
        for _ in range(num_rows)
    ]
    return logits, picks


@given(batches())
@settings(max_examples=250, deadline=None)
def test_scores_follow_the_specification(batch):
    logits, picks = batch
    scores = process(logits, picks)
    for row, pick in enumerate(picks):
        expected = expected_scores(logits[row].tolist(), pick)
        assert scores[row].tolist() == pytest.approx(expected[: scores.shape[1]], rel=1e-12)
        assert set(expected[scores.shape[1] :]) <= {-INF}


@given(batches(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_a_row_does_not_depend_on_its_batch_or_its_place(batch, random):
    logits, picks = batch
    together, tokens = process(logits, picks), pick_tokens(logits, picks)
    order = random.sample(range(len(picks)), random.randint(1, len(picks)))
    apart = process(logits[order], [picks[row] for row in order])
    # Ids that no row of a batch has are cut off.
    assert apart.equal(together[order][:, : apart.shape[1]])
    assert (together[order][:, apart.shape[1] :] == -INF).all()
    assert pick_tokens(logits[order], [picks[row] for row in order]).equal(tokens[order])


def test_a_wide_row_does_not_depend_on_its_batch():
    # Wide enough for tiles, for the first look at the nucleus and for a second one.
    logits = torch.randn(6, 40_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * torch.tensor([[0.1], [1], [2], [4], [8], [3]])
    samplings = [SamplingParams(top_p=0.9), SamplingParams(top_p=0.97), SamplingParams(top_p=0.8, top_k=3000), SamplingParams(min_p=0.01)]
    picks = [make_pick(sampling, seed=seed) for seed, sampling in enumerate([*samplings, SamplingParams(), SamplingParams(temperature=0.0)])]
    scores, tokens = process(logits, picks), pick_tokens(logits, picks)
    for row in range(6):
        assert process(logits[row : row + 1], picks[row : row + 1]).equal(scores[row : row + 1])
        assert pick_tokens(logits[row : row + 1], picks[row : row + 1]).equal(tokens[row : row + 1])
    reversed_rows = list(reversed(range(6)))
    assert pick_tokens(logits[reversed_rows], [picks[row] for row in reversed_rows]).equal(tokens[reversed_rows])


def test_ids_beyond_the_tokenizer_cannot_win():
    logits = torch.tensor([[0.0, 1.0, 50.0]]).expand(2, 3)
    picks = [make_pick(SamplingParams(temperature=temperature), vocab_size=2) for temperature in (0.0, 1.0)]
    assert max(pick_tokens(logits, picks).tolist()) < 2


def test_suppressed_ids_come_back_at_their_position():
    logits = torch.tensor([[0.0, 9.0, 1.0]]).expand(3, 3)
    greedy = SamplingParams(temperature=0.0)
    picks = [make_pick(greedy, guesses=guesses, suppressed=(1,), until=5) for guesses in ((), (2,), (2, 2))]
    assert [pick.position for pick in picks] == [3, 4, 5]
    assert pick_tokens(logits, picks).tolist() == [2, 2, 1]


def test_suppression_of_every_token_is_lifted():
    picks = [make_pick(SamplingParams(temperature=t), suppressed=(0, 1, 2), until=99, vocab_size=3) for t in (0.0, 1.0)]
    logits = torch.tensor([[0.0, 2.0, 1.0, 5.0]]).expand(2, 4)
    assert process(logits, picks).isfinite().tolist() == [[True, True, True]] * 2
    assert pick_tokens(logits, picks)[0] == 1
    assert not probabilities(process(logits, picks), picks).isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [5, 300, 151_936])
def test_greedy_ties_go_to_the_lowest_id(dtype, width):
    logits = torch.zeros(3, width, dtype=dtype)
    logits[1, [3, width - 1]] = 1.0
    logits[2, width // 2 :] = 1.0
    picks = [make_pick(SamplingParams(temperature=0.0))] * 3
    assert pick_tokens(logits, picks).tolist() == [0, 3, width // 2]


def test_tied_noisy_scores_go_to_the_lowest_id():
    # Scores so large that the noise is lost in rounding: a tie of everything, searched in tiles and one by one.
    picks = [make_pick()]
    everything = torch.full((1, 100_000), 1e30, dtype=torch.float64)
    assert pick_tokens(everything, picks).tolist() == [0]
    few = torch.zeros(1, 100_000, dtype=torch.float64)
    few[0, [777, 5_000, 99_999]] = 1e30
    assert pick_tokens(few, picks).tolist() == [777]


def full_noisy_argmax(scores, picks):
    """Noise for every token, and the first of the best: what the bound and the tiles must not change."""
    keys, positions = key_tensor(pick.key for pick in picks), torch.tensor([pick.position for pick in picks])
    totals = scores + gumbel(keys[:, None], positions[:, None], torch.arange(scores.shape[-1]))
    return [row.index(max(row)) for row in totals.tolist()]


@given(
    width=st.sampled_from([3, 17, 900, 9000]),
    scale=st.sampled_from([0.0, 0.5, 3.0, 10.0, 100.0]),
    sampling=st.builds(
        SamplingParams, temperature=st.sampled_from([0.5, 1.0, 5.0]), top_k=st.sampled_from([0, 0, 4]), top_p=st.sampled_from([1.0, 0.9])
    ),
    seed=st.integers(0, 2**63 - 1),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
@settings(max_examples=100, deadline=None)
def test_skipping_tokens_that_cannot_win_changes_no_pick(width, scale, sampling, seed, dtype):
    logits = (torch.randn(4, width, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
    picks = [make_pick(sampling, seed=seed + row, committed=tuple(range(row + 1)), prompt_length=0) for row in range(4)]
    assert pick_tokens(logits, picks).tolist() == full_noisy_argmax(process(logits, picks), picks)


def test_picks_follow_the_softmax():
    # Chi-square over 1e5 fixed seeds, 4 degrees of freedom, false alarm rate 1e-4 (critical value 23.51).
    num_seeds = 100_000
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.5]])
    picks = [make_pick(SamplingParams(temperature=0.8), seed=seed) for seed in range(num_seeds)]
    expected = probabilities(process(logits, picks[:1]), picks[:1])[0] * num_seeds
    counts = torch.bincount(pick_tokens(logits.expand(num_seeds, 5), picks), minlength=5)
    assert ((counts - expected) ** 2 / expected).sum() < 23.51
    # Negative control: the distribution at another temperature.
    wrong = logits[0].double().softmax(-1) * num_seeds
    assert ((counts - wrong) ** 2 / wrong).sum() > 23.51


def test_malformed_rows_are_told_apart_and_hurt_no_other():
    good = [0.5, -1.0, 2.0, 0.0]
    bad = [[float("nan"), 1.0, 2.0, 3.0], [INF, 0.0, 0.0, 0.0], [-INF] * 4, [float("nan")] * 4]
    logits = torch.tensor([good, *bad, good])
    for sampling in (SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=2, top_p=0.9, min_p=0.1, repetition_penalty=1.1)):
        picks = [make_pick(sampling, suppressed=(0,), until=99)] * 6
        assert finite_rows(logits).tolist() == [True, False, False, False, False, True]
        tokens = pick_tokens(logits, picks)
        assert ((tokens >= 0) & (tokens < 4)).all()
        assert tokens[[0, 5]].tolist() == pick_tokens(logits[[0]], picks[:1]).tolist() * 2
    assert finite_rows(torch.tensor([[-INF, 0.0]])).tolist() == [True]


def test_logits_are_not_changed():
    logits = torch.randn(2, 9, dtype=torch.float64)
    before = logits.clone()
    sampling = SamplingParams(temperature=0.5, top_k=2, repetition_penalty=1.5, logit_bias=((1, 1.0),))
    pick_tokens(logits, [make_pick(sampling, suppressed=(2,), until=9)] * 2)
    assert logits.equal(before)


def test_scores_are_float32_or_wider():
    for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        assert process(torch.zeros(1, 4, dtype=dtype), [make_pick(SamplingParams(temperature=0.7, top_p=0.5))]).dtype == wanted


def test_no_rows_are_no_work():
    assert pick_tokens(torch.zeros(0, 5), []).shape == (0,)
    assert process(torch.zeros(0, 5), []).shape == (0, 5)


def test_probabilities_sum_to_one_and_are_certain_where_greedy():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]]).expand(2, 4)
    picks = [make_pick(SamplingParams(top_k=2)), make_pick(SamplingParams(temperature=0.0))]
    distributions = probabilities(process(logits, picks), picks)
    assert distributions.dtype == torch.float64
    assert distributions.tolist() == [[0.0, 0.5, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0]]


def test_rows_of_different_vocabularies_are_masked_each_at_its_own_end():
    logits = torch.tensor([[0.0, 1.0, 50.0, 60.0]]).expand(4, 4)
    picks = [make_pick(SamplingParams(temperature=temperature), vocab_size=size) for temperature in (0.0, 1.0) for size in (2, 3)]
    assert process(logits, picks).shape == (4, 3)
    assert pick_tokens(logits, picks).tolist()[:2] == [1, 2]
    assert process(logits, picks)[:, 2].tolist() == [-INF, 50.0, -INF, 50.0]


def test_nothing_is_copied_where_nothing_is_asked():
    logits = torch.randn(2, 9, dtype=torch.bfloat16)
    plain = [make_pick(SamplingParams(temperature=temperature), suppressed=(1,), until=3) for temperature in (0.0, 1.0)]
    assert process(logits, plain).data_ptr() == logits.data_ptr()
    assert process(logits, [make_pick(vocab_size=5)] * 2).data_ptr() == logits.data_ptr()
    asking = [make_pick(suppressed=(1,), until=4), make_pick()]
    assert process(logits, asking).dtype is torch.float32
    assert process(logits, asking)[1].equal(logits[1].float())


def test_the_same_call_tells_what_cannot_be_picked():
    logits = torch.tensor([[0.0, 1.0], [math.nan, 1.0], [-INF, -INF], [0.0, INF]])
    for temperatures in ([0.0] * 4, [1.0] * 4, [0.0, 1.0, 0.0, 1.0]):
        picks = [make_pick(SamplingParams(temperature=temperature)) for temperature in temperatures]
        assert (pick_usable(logits, picks) == UNUSABLE_ID).tolist() == (~finite_rows(logits)).tolist() == [False, True, True, True]
