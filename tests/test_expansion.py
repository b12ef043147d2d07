"""Expansion and contraction as one: whatever a row produced stands at its place."""

import typing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verifier_service.expansion import ABSENT_HIDDEN, ABSENT_ID, ABSENT_LOGPROB, ABSENT_PROBABILITY, Scored, Scorer, contract, expand

SCORERS = typing.get_args(Scorer)
VOCAB_SIZE = 50


@st.composite
def sequences(draw):
    """One sequence of any kind: verifying, plain, at the end of its prefill, in the midst of it."""
    committed = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12))
    kv_len = draw(st.integers(0, len(committed) - 1))
    num_tokens = draw(st.integers(1, len(committed) - kv_len))
    is_last = kv_len + num_tokens == len(committed)
    guesses = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6)) if is_last else []
    return committed, kv_len, num_tokens, guesses


MIXES = st.lists(sequences(), min_size=1, max_size=7).map(
    lambda mix: [
        Scored(committed, kv_len, block_table=(index,), guesses=guesses, num_tokens=num_tokens)
        for index, (committed, kv_len, num_tokens, guesses) in enumerate(mix)
    ]
)


def identity_model(spans):
    """Says of each row of logits whose it is and where: the block table names the sequence."""
    return [(span.block_table[0], position) for span in spans for position in range(span.end - span.num_logits, span.end)]


@given(MIXES, st.sampled_from(SCORERS))
def test_contraction_puts_every_tensor_of_every_row_at_its_place(mix, scorer):
    expansion = expand(mix, VOCAB_SIZE, scorer)
    whose = torch.tensor(identity_model(expansion.spans), dtype=torch.int64).view(-1, 2)
    ids = whose[:, 0] * 1000 + whose[:, 1]
    tensors = [
        (ids, ABSENT_ID),
        (ids[:, None] + torch.arange(3) / 4, ABSENT_PROBABILITY),
        (-ids.double(), ABSENT_LOGPROB),
        (ids[:, None, None] * torch.ones(2, 3, dtype=torch.float64), ABSENT_HIDDEN),
    ]
    width = 1 + max(len(scored.guesses) for scored in mix)
    for tensor, fill in tensors:
        contracted = contract(tensor, expansion, fill)
        assert contracted.shape == (len(mix), width, *tensor.shape[1:])
        assert contracted.dtype == tensor.dtype
        by_place = {tuple(place): row for place, row in zip(whose.tolist(), tensor, strict=True)}
        for index, scored in enumerate(mix):
            is_prefilling = scored.kv_len + scored.num_tokens < len(scored.committed)
            for row in range(width):
                has_row = not is_prefilling and row <= len(scored.guesses)
                if has_row:
                    assert contracted[index, row].equal(by_place[index, len(scored.committed) - 1 + row])
                else:
                    assert (contracted[index, row] == fill).all()


@given(MIXES, st.sampled_from(SCORERS))
def test_spans_run_every_token_once_at_its_position(mix, scorer):
    expansion = expand(mix, VOCAB_SIZE, scorer)
    fed = [(span.block_table[0], span.start + i, token_id) for span in expansion.spans for i, token_id in enumerate(span.token_ids)]
    assert fed == [
        (index, position, [*scored.committed, *scored.guesses][position])
        for index, scored in enumerate(mix)
        for position in range(scored.kv_len, scored.kv_len + scored.num_tokens + len(scored.guesses))
    ]
    assert len(expansion.places) == sum(span.num_logits for span in expansion.spans)


@given(MIXES)
def test_both_scorers_have_the_same_rows_in_the_same_places(mix):
    expanded, grouped = (expand(mix, VOCAB_SIZE, scorer) for scorer in ("expanded", "multi_query"))
    assert expanded.places == grouped.places
    assert identity_model(expanded.spans) == identity_model(grouped.spans)


def test_scorers_differ_in_their_spans_alone():
    scored = Scored(committed=(1, 2, 3), kv_len=2, block_table=(0,), guesses=(4, 5))
    expanded, grouped = (expand([scored], VOCAB_SIZE, scorer) for scorer in ("expanded", "multi_query"))
    assert [tuple(span.token_ids) for span in expanded.spans] == [(3,), (4,), (5,)]
    assert [tuple(span.token_ids) for span in grouped.spans] == [(3, 4, 5)]


def test_each_kind_of_sequence_fills_its_columns():
    mix = [
        Scored((1, 2, 3), 2, (0,), guesses=(7, 8)),
        Scored((1, 2), 1, (1,)),
        Scored((1, 2, 3, 4), 0, (2,), num_tokens=4),
        Scored((1, 2, 3, 4), 1, (3,), num_tokens=2),
    ]
    expansion = expand(mix, VOCAB_SIZE)
    assert expansion.places == ((0, 0), (0, 1), (0, 2), (1, 0), (2, 0))
    assert contract(torch.arange(5), expansion, ABSENT_ID).tolist() == [[0, 1, 2], [3, -1, -1], [4, -1, -1], [-1, -1, -1]]


@pytest.mark.parametrize("scorer", SCORERS)
def test_a_guess_outside_the_vocabulary_is_never_fed(scorer):
    scored = Scored((1, 2), 1, (0,), guesses=(VOCAB_SIZE, -1, 2**40, 3))
    fed = [token_id for span in expand([scored], VOCAB_SIZE, scorer).spans for token_id in span.token_ids]
    assert fed == [2, 0, 0, 0, 3]


def test_a_step_of_prefill_chunks_has_no_rows():
    expansion = expand([Scored((1, 2, 3), 0, (0,), num_tokens=2)], VOCAB_SIZE)
    assert expansion.places == ()
    assert contract(torch.zeros(0, dtype=torch.int64), expansion, ABSENT_ID).tolist() == [[-1]]


def test_a_tensor_with_other_rows_is_refused():
    expansion = expand([Scored((1, 2), 1, (0,), guesses=(3,))], VOCAB_SIZE)
    with pytest.raises(AssertionError, match="one place"):
        contract(torch.zeros(3), expansion, ABSENT_HIDDEN)


def test_guesses_in_the_midst_of_a_prefill_are_refused():
    with pytest.raises(AssertionError, match="guesses follow"):
        expand([Scored((1, 2, 3), 0, (0,), guesses=(4,))], VOCAB_SIZE)
