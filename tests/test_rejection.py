"""The ratio test, case by case. That the output has the target's distribution is shown in test_rejection_distribution.py."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.link import Distribution
from shared.noise import derive_key
from tests.support.draws import uniform
from verifier_service.rejection import Guesses, RejectionKeys, Uniforms, verify_batch, verify_rejection
from verifier_service.rejection import Tested as Proposed  # pytest would take a class called Test... for tests
from verifier_service.verdict import Verdict


def keys_of(seed):
    return RejectionKeys(*(derive_key(seed, stream) for stream in ("accept", "residual", "plain")))


def rows(*distributions):
    return torch.tensor([distributions], dtype=torch.float64)


def one_guess(token_id, support, weights):
    """A batch of one sequence with one guess."""
    return Guesses(torch.tensor([[token_id]]), torch.tensor([1]), torch.tensor([[support]]), torch.tensor([[weights]], dtype=torch.float64))


def draws(accept=0.5, residual=0.5, plain=0.5):
    return Uniforms(*(torch.full((1, 2), value, dtype=torch.float64) for value in (accept, residual, plain)))


def test_a_guess_is_accepted_below_the_ratio_of_probabilities():
    target = rows([0.3, 0.7, 0.0], [0.0, 0.0, 1.0])
    guess = one_guess(0, [0, 1], [0.6, 0.4])
    for accept, expected in ((0.499, (1, 2)), (0.5, (0, 1)), (0.501, (0, 1))):
        accepted, next_ids = verify_batch(target, guess, draws(accept=accept))
        assert (accepted.item(), next_ids.item()) == expected


def test_the_token_after_a_rejection_comes_from_the_residual():
    # target - draft = (-0.4, 0.1, 0.3): a quarter and three quarters.
    target = rows([0.1, 0.3, 0.6], [1.0, 0.0, 0.0])
    guess = one_guess(0, [0, 1, 2], [0.5, 0.2, 0.3])
    picked = [verify_batch(target, guess, draws(accept=0.9, residual=u))[1].item() for u in (0.01, 0.249, 0.251, 0.99)]
    assert picked == [1, 1, 2, 2]


def test_distributions_are_normalised_by_their_own_sum():
    target = rows([0.3, 0.7, 0.0], [0.0, 0.0, 1.0])
    for scale in (1.0, 0.9995, 7.0):
        guess = one_guess(0, [0, 1], [0.6 * scale, 0.4 * scale])
        assert verify_batch(target, guess, draws(accept=0.4999))[0] == 1
        assert verify_batch(target, guess, draws(accept=0.5001))[0] == 0


def test_the_target_is_drawn_from_where_no_residual_is_left():
    # Equal up to rounding, and the guess has none of the target's mass: what is left is a rounding error of token 2.
    target = rows([0.0, 0.5, 0.5], [1.0, 0.0, 0.0])
    guess = one_guess(0, [1, 2, 0], [0.5, 0.5 - 1e-15, 1e-15])
    picked = [verify_batch(target, guess, draws(residual=u))[1].item() for u in (0.2, 0.8)]
    assert picked == [1, 2]


@pytest.mark.parametrize("token_id", [3, 2**40, -1, -7])
def test_a_guess_outside_the_vocabulary_is_a_rejected_token_with_a_residual_draw(token_id):
    target = rows([0.3, 0.5, 0.2], [1.0, 0.0, 0.0])
    guess = one_guess(token_id, [token_id, 1], [0.5, 0.5])
    # target - draft = (0.3, 0, 0.2)
    for residual, expected in ((0.59, 0), (0.61, 2)):
        accepted, next_ids = verify_batch(target, guess, draws(accept=1e-9, residual=residual))
        assert (accepted.item(), next_ids.item()) == (0, expected)


def test_a_masked_guess_is_a_rejected_token_with_a_residual_draw():
    target = rows([0.0, 0.5, 0.5], [1.0, 0.0, 0.0])
    guess = one_guess(0, [0, 1], [0.75, 0.25])
    picked = [verify_batch(target, guess, draws(accept=1e-9, residual=u)) for u in (0.33, 0.34)]
    assert [(accepted.item(), next_ids.item()) for accepted, next_ids in picked] == [(0, 1), (0, 2)]


def test_certain_guesses_need_no_distribution():
    target = rows([0.3, 0.7], [1.0, 0.0])
    keys = keys_of(1)
    for length in range(200):
        [verdict] = verify_rejection(target, [Proposed(length, keys, guesses=(0,))])
        is_accepted = uniform(keys.accept, length) < 0.3
        # What is left of the target without its certain guess is the other token.
        assert verdict == (Verdict(1, (0, 0)) if is_accepted else Verdict(0, (1,)))


def test_equal_distributions_accept_everything():
    generator = torch.Generator().manual_seed(1)
    target = torch.rand(1, 5, 7, generator=generator, dtype=torch.float64)
    target /= target.sum(-1, keepdim=True)
    distributions = tuple(Distribution(tuple(range(7)), tuple(row.tolist())) for row in target[0, :4])
    for length in range(100):
        guesses = tuple(torch.multinomial(target[0, :4], 1, generator=generator)[:, 0].tolist())
        [verdict] = verify_rejection(target, [Proposed(length, keys_of(length), guesses, distributions)])
        assert verdict.accepted == 4
        assert verdict.token_ids[:4] == guesses


def test_each_draw_takes_its_own_stream_at_its_own_position():
    target = rows([0.5, 0.5, 0.0, 0.0], [0.0, 0.25, 0.25, 0.5])
    spread = Distribution((0, 1, 2, 3), (0.25, 0.25, 0.25, 0.25))

    def draw_of(stream, position, *weights):
        u = uniform(stream, position) * sum(weights)
        return next(index for index in range(len(weights)) if u < sum(weights[: index + 1]))

    for seed in range(60):
        keys, length = keys_of(seed), 10 + seed
        # Accepted for certain, since the target gives more than the draft: the next token is plain, one position on.
        [verdict] = verify_rejection(target, [Proposed(length, keys, (0,), (spread,))])
        assert verdict == Verdict(1, (0, draw_of(keys.plain, length + 1, 0, 0.25, 0.25, 0.5)))
        # Rejected for certain: the token at the same position comes from the residual stream.
        [verdict] = verify_rejection(target, [Proposed(length, keys, (2,), (spread,))])
        assert verdict == Verdict(0, (draw_of(keys.residual, length, 0.25, 0.25),))
        # Nothing guessed: plain.
        [verdict] = verify_rejection(target[:, :1], [Proposed(length, keys)])
        assert verdict == Verdict(0, (draw_of(keys.plain, length, 0.5, 0.5),))


def random_sequence(draw):
    num_guesses = draw(st.integers(0, 3))
    guesses = tuple(draw(st.integers(0, 6)) for _ in range(num_guesses))
    weights = st.lists(st.sampled_from([0.25, 1.0, 3.0]), min_size=7, max_size=7).map(tuple)
    distributions = tuple(Distribution(tuple(range(7)), draw(weights)) for _ in range(num_guesses)) if draw(st.booleans()) else ()
    return Proposed(draw(st.integers(1, 1000)), keys_of(draw(st.integers(0, 2**64 - 1))), guesses, distributions)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_verdict_does_not_depend_on_its_batch_or_its_place(data):
    tested = [random_sequence(data.draw) for _ in range(data.draw(st.integers(1, 5)))]
    width = 1 + max(len(scored.guesses) for scored in tested)
    target = torch.rand(len(tested), width, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999))))
    target /= target.sum(-1, keepdim=True)
    for index, scored in enumerate(tested):
        target[index, len(scored.guesses) + 1 :] = 0.0
    together = verify_rejection(target, tested)
    order = data.draw(st.permutations(range(len(tested))))
    assert verify_rejection(target[order], [tested[index] for index in order]) == [together[index] for index in order]
    for index, scored in enumerate(tested):
        assert verify_rejection(target[index : index + 1, : len(scored.guesses) + 1], [scored]) == [together[index]]


def test_a_sequence_without_rows_gets_an_empty_verdict():
    target = torch.cat([rows([0.0, 0.0], [0.0, 0.0]), rows([0.0, 1.0], [0.0, 0.0])])
    verdicts = verify_rejection(target, [Proposed(3, keys_of(1)), Proposed(3, keys_of(2))])
    assert verdicts == [Verdict(0, ()), Verdict(0, (1,))]


def test_an_empty_batch_has_no_verdicts():
    assert verify_rejection(torch.zeros(0, 1, 4, dtype=torch.float64), []) == []


def test_a_guess_whose_own_row_cannot_be_drawn_from_is_as_if_it_had_not_come():
    """Its uniform is not used either: the token comes from the stream of positions without a guess."""
    keys, spread = keys_of(3), Distribution((0, 1), (0.5, 0.5))
    target = rows([0.25, 0.75], [0.5, 0.5], [math.nan, math.nan])
    is_usable = torch.tensor([[True, True, False]])
    for length in range(50):
        [verdict] = verify_rejection(target, [Proposed(length, keys, (1, 0), (spread, spread))], is_usable)
        [expected] = verify_rejection(target[:, :2], [Proposed(length, keys, (1,), (spread,))])
        assert verdict == expected
        assert verdict.accepted == 1
    [verdict] = verify_rejection(target, [Proposed(1, keys, (1, 0), (spread, spread))], ~is_usable)
    assert verdict == Verdict(0, ())
