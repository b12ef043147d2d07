"""Coupled verification is plain sampling, whatever was guessed."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.noise import noise_key
from shared.picking import pick_tokens
from shared.sampling import Pick, SamplingParams, TokenRules
from tests.support.tabular import TabularModel
from verifier_service.coupled import verify_coupled
from verifier_service.verdict import Verdict

TARGET = TabularModel(num_ids=6, seed=1)
PROMPT = (0, 3)


def pick_rows(rules, key, committed, guesses):
    """The target's picks in the K + 1 rows of one sequence."""
    rows = [Pick(rules, key, committed, guesses[:i]) for i in range(len(guesses) + 1)]
    return pick_tokens(TARGET.logits([[*row.committed, *row.guesses] for row in rows]), rows)


def plain(rules, key, num_tokens):
    text = list(PROMPT)
    while len(text) < len(PROMPT) + num_tokens:
        text += pick_rows(rules, key, text, ()).tolist()
    return text


@given(
    sampling=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
        top_k=st.sampled_from([0, 3]),
        top_p=st.sampled_from([1.0, 0.8]),
        frequency_penalty=st.sampled_from([0.0, 0.7]),
        repetition_penalty=st.sampled_from([1.0, 1.4]),
    ),
    seed=st.integers(0, 2**64 - 1),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_guesses_give_the_text_of_plain_sampling(sampling, seed, data):
    rules, key = TokenRules(sampling, len(PROMPT), vocab_size=6), noise_key(seed)
    expected = plain(rules, key, 12)
    text, accepted = list(PROMPT), 0
    while len(text) < 10:
        # Right at some places and anything at the others, ids that no token has included.
        guesses = [data.draw(st.one_of(st.just(expected[i]), st.integers(-2, 8))) for i in range(len(text), len(text) + data.draw(st.integers(0, 4)))]
        [verdict] = verify_coupled(pick_rows(rules, key, text, tuple(guesses))[None], [guesses])
        assert len(verdict.token_ids) == verdict.accepted + 1
        assert list(verdict.token_ids[: verdict.accepted]) == guesses[: verdict.accepted]
        accepted += verdict.accepted
        text += verdict.token_ids
    assert text == expected[: len(text)]


def test_noise_keyed_by_row_instead_of_position_would_differ():
    # Negative control of the test above: the same rounds, with noise that depends on the place in the round.
    rules, key = TokenRules(SamplingParams(), len(PROMPT), vocab_size=6), noise_key(5)
    expected = plain(rules, key, 12)
    text = list(PROMPT)
    while len(text) < 10:
        guesses = expected[len(text) : len(text) + 2]
        rows = [pick_rows(rules, noise_key(i), [*text, *guesses[:i]], ())[0] for i in range(3)]
        [verdict] = verify_coupled(torch.stack(rows)[None], [guesses])
        text += verdict.token_ids
    assert text != expected[: len(text)]


def test_the_longest_matching_prefix_is_accepted():
    target_ids = torch.tensor([[4, 5, 6], [4, 5, 6], [4, 5, 6], [4, -1, -1], [-1, -1, -1]])
    guesses = [(4, 5), (4, 6), (3, 5), (), ()]
    assert verify_coupled(target_ids, guesses) == [
        Verdict(2, (4, 5, 6)),
        Verdict(1, (4, 5)),
        Verdict(0, (4,)),
        Verdict(0, (4,)),
        Verdict(0, ()),
    ]


def test_a_missing_row_is_no_token_even_where_it_was_guessed():
    # A drafter that guesses -1 must not be told that the filling of a contracted tensor is a token.
    verdicts = verify_coupled(torch.tensor([[2, 7, -1], [-1, -1, -1]]), [(-1,), ()])
    assert verdicts == [Verdict(0, (2,)), Verdict(0, ())]


def test_a_guess_whose_own_row_cannot_be_picked_from_is_as_if_it_had_not_come():
    verdicts = verify_coupled(torch.tensor([[2, -1, 4], [2, 3, -1], [-1, 3, 4]]), [(2, 3), (2, 3), (1, 3)])
    assert verdicts == [Verdict(0, (2,)), Verdict(1, (2, 3)), Verdict(0, ())]
