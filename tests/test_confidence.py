"""How sure a draft is of a guess: against the definition, spelt out, and against what it is to foresee."""

import math

import torch

from draft_service.confidence import confidence
from shared.noise import gumbel, key_tensor, noise_key
from shared.picking import pick_tokens, process
from shared.sampling import Pick, SamplingParams, TokenRules


def picks_of(num_rows: int, temperature: float, vocab: int) -> list[Pick]:
    rules = TokenRules(SamplingParams(temperature=temperature), 1, vocab)
    return [Pick(rules, noise_key(row), [0] * (row + 1)) for row in range(num_rows)]


def test_it_is_the_share_of_the_pick_in_the_softmax_of_scores_with_their_noise():
    vocab = 40  # fewer than the rivals that are looked at
    logits = 3 * torch.randn(6, vocab, generator=torch.Generator().manual_seed(0))
    for temperature in (0.0, 0.7):
        picks = picks_of(6, temperature, vocab)
        scores, chosen = process(logits, picks), pick_tokens(logits, picks)
        for row, (pick, share) in enumerate(zip(picks, confidence(scores, picks, chosen).tolist(), strict=True)):
            noise = gumbel(key_tensor([pick.key]), torch.tensor([pick.position]), torch.arange(vocab)) * (temperature > 0)
            expected = (scores[row].double() + noise).softmax(-1)[chosen[row]]
            assert math.isclose(share, expected, rel_tol=1e-6)


def test_a_pick_from_far_behind_is_weighed_against_the_best_it_has_beaten():
    logits = torch.zeros(1, 1_000)
    logits[0, 900:] = 1.0
    (share,) = confidence(logits, picks_of(1, 0.0, 1_000), torch.tensor([5])).tolist()
    assert math.isclose(share, 1 / (1 + 64 * math.e), rel_tol=1e-6)


def test_rows_without_a_pick_harm_no_others():
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(0))
    picks = picks_of(2, 1.0, 30)
    chosen = pick_tokens(logits, picks)
    whole = confidence(process(logits, picks), picks, chosen)
    broken = logits.clone()
    broken[0] = torch.nan
    chosen[0] = -1
    assert confidence(process(broken, picks), picks, chosen)[1] == whole[1]


def test_it_tells_guesses_that_another_model_shares_from_those_that_it_does_not():
    """Scores of a target that is the draft with some noise on it; the share of the pick is told from chance by far."""
    generator = torch.Generator().manual_seed(1)
    draft = 4 * torch.randn(400, 50, generator=generator)
    target = draft + torch.randn(400, 50, generator=generator)
    for temperature in (0.0, 1.0):
        picks = picks_of(400, temperature, 50)
        chosen = pick_tokens(draft, picks)
        is_right = pick_tokens(target, picks) == chosen
        shares = confidence(process(draft, picks), picks, chosen)
        assert shares[is_right].mean() > shares[~is_right].mean() + 0.15
