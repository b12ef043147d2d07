"""The speculator as a proposer: which head guesses what, in a batch as alone, in both modes; what it cannot serve."""

import math

import pytest
import torch

from draft_service.proposer import CannotServe
from draft_service.speculator import SpeculatorProposer
from draft_service.tail import DraftSequence
from shared.hidden import to_wire
from shared.link import Begin
from shared.noise import noise_key
from shared.picking import pick_tokens
from shared.sampling import Mode, Pick, SamplingParams
from tests.support.tiny_speculators import tiny_speculator

SPECULATOR = tiny_speculator()
GREEDY = SamplingParams(temperature=0.0)


def sequence(
    number: int, sampling: SamplingParams = GREEDY, mode: Mode = Mode.COUPLED, tail: tuple[int, ...] = (), known: bool = True
) -> DraftSequence:
    hidden = to_wire(torch.randn(1, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(number)))[0] if known else None
    made = DraftSequence.of(Begin(number, 2, (5, 6, number), mode, sampling, 100 + number, 16, hidden=hidden), 64, 1000)
    made.extend(tail)
    return made


def foreseen(drafted: DraftSequence, room: int) -> list[int]:
    """The same by hand: head by head, each fed with the token before the one that it foresees."""
    assert drafted.hidden is not None
    state = SPECULATOR.begin(torch.frombuffer(bytearray(drafted.hidden.data), dtype=torch.float64)[None])
    fed, made = [drafted.committed[-1], *drafted.tail], []
    for index in range(min(3, len(drafted.tail) + room)):
        state = SPECULATOR.advance(index, state, torch.tensor([fed[index]]))
        if index + 1 < len(fed):
            continue  # that token is a guess already
        pick = Pick(drafted.rules, noise_key(drafted.draft_seed), drafted.committed, fed[1:])
        made.append(int(pick_tokens(SPECULATOR.logits(index, state), [pick])[0]))
        fed.append(made[-1])
    return made


def ids(guesses) -> list[int]:
    return [guess.token_id for guess in guesses]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(), SamplingParams(temperature=0.7, top_k=8)], ids=["greedy", "sampled", "truncated"])
def test_every_head_guesses_its_own_position_in_any_company(sampling):
    asked = [
        (sequence(1, sampling), 8),
        (sequence(2, sampling, tail=(9,)), 8),
        (sequence(3, sampling, tail=(9, 8)), 8),
        (sequence(4, sampling), 1),
        (sequence(5, sampling), 2),
    ]
    proposer = SpeculatorProposer(SPECULATOR, "tiny")
    expected = [foreseen(*request) for request in asked]
    assert [len(found) for found in expected] == [3, 2, 1, 1, 2]
    assert [ids(guesses) for guesses in proposer.propose(asked)] == expected
    assert [ids(proposer.propose([request])[0]) for request in asked] == expected


def test_it_rests_where_it_sees_nothing():
    proposer = SpeculatorProposer(SPECULATOR, "tiny")
    unknown, full = sequence(1, known=False), sequence(2, tail=(1, 2, 3))
    assert proposer.propose([(unknown, 4), (full, 4)]) == [[], []]
    assert proposer.stats.forwards == 0
    assert [len(guesses) for guesses in proposer.propose([(unknown, 4), (sequence(3), 4), (full, 4)])] == [0, 3, 0]


def test_in_rejection_mode_guesses_bring_what_they_were_drawn_from():
    proposer = SpeculatorProposer(SPECULATOR, "tiny")
    drawn, picked = sequence(1, SamplingParams(), Mode.REJECTION), sequence(2, SamplingParams())
    guesses, certain = proposer.propose([(drawn, 3), (picked, 3)])
    assert all(guess.distribution is None for guess in certain)
    state = SPECULATOR.begin(torch.frombuffer(bytearray(drawn.hidden.data), dtype=torch.float64)[None])
    for index, (token, guess) in enumerate(zip([drawn.committed[-1], *ids(guesses)], guesses, strict=False)):
        state = SPECULATOR.advance(index, state, torch.tensor([token]))
        weights = SPECULATOR.logits(index, state).softmax(-1)[0]
        assert guess.token_id in guess.distribution.token_ids
        for token_id, probability in zip(guess.distribution.token_ids, guess.distribution.probabilities, strict=True):
            assert math.isclose(probability, float(weights[token_id]), rel_tol=1e-6)


def test_a_row_that_is_not_finite_ends_that_sequence_alone():
    proposer = SpeculatorProposer(SPECULATOR, "tiny")
    broken, sound = sequence(1), sequence(2)
    broken.hidden = to_wire(torch.full((1, 64), math.nan, dtype=torch.float64))[0]
    answers = proposer.propose([(broken, 3), (sound, 3)])
    assert [len(guesses) for guesses in answers] == [0, 3]
    assert ids(answers[1]) == foreseen(sound, 3)
    assert proposer.stats.unusable_rows == 1


def test_what_it_cannot_read_it_cannot_serve():
    proposer = SpeculatorProposer(SPECULATOR, "tiny")
    wide, foreign = sequence(1), sequence(2)
    wide.hidden = to_wire(torch.zeros(1, 32, dtype=torch.float64))[0]
    foreign.committed[-1] = 64
    for asked, what in ((wide, "reads 64 numbers"), (foreign, "token 64")):
        with pytest.raises(CannotServe, match=what) as refusal:
            proposer.propose([(sequence(3), 3), (asked, 3)])
        assert refusal.value.number == asked.number
