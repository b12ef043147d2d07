"""Several proposers as one: who is asked when, in which mode, and whose a guess is said to be."""

import pytest

from draft_service.composite import CompositeProposer
from draft_service.drafter import Drafter
from draft_service.proposer import CannotServe, Guess
from draft_service.tail import DraftSequence
from shared.link import Begin, StepBatch, Welcome
from shared.sampling import Mode, SamplingParams
from tests.support.drafting import begin, commit
from tests.support.proposers import RuleProposer, count_up


def found_after_nines(text: list[int], room: int) -> list[int]:
    """Two guesses after a 9, nothing elsewhere: a lookup."""
    return [9, 9][:room] if text[-1] == 9 else []


class Lookup(RuleProposer):
    kinds = ("ngram",)


class Model(RuleProposer):
    kinds = ("model",)


def composite() -> tuple[CompositeProposer, Lookup, Model]:
    first, second = Lookup(found_after_nines), Model(count_up)
    return CompositeProposer(first, second), first, second


def sequence(number: int, last: int, mode: Mode = Mode.COUPLED) -> DraftSequence:
    return DraftSequence.of(Begin(number, 2, (5, last), mode, SamplingParams(), 1, 16), 64, 1000)


def test_the_second_is_asked_for_what_the_first_has_not():
    proposer, first, second = composite()
    sequences = [sequence(1, 3), sequence(2, 9), sequence(3, 4)]
    for each in sequences:
        proposer.open(each)
    answers = proposer.propose([(each, 4) for each in sequences])
    assert answers == [[Guess(4, maker="model")], [Guess(9, maker="ngram")] * 2, [Guess(5, maker="model")]]
    assert (first.asked, second.asked) == ([[1, 2, 3]], [[1, 3]])
    proposer.propose([(sequences[1], 1)])
    assert second.asked == [[1, 3]], "nobody is left to ask for"


def test_in_rejection_mode_the_text_has_no_say_in_who_guesses():
    proposer, first, second = composite()
    drawn, coupled = sequence(1, 9, Mode.REJECTION), sequence(2, 9)
    for each in (drawn, coupled):
        proposer.open(each)
    answers = proposer.propose([(drawn, 4), (coupled, 4)])
    assert [guess.maker for guesses in answers for guess in guesses or ()] == ["model", "ngram", "ngram"]
    assert (first.asked, second.asked) == ([[2]], [[1]])


def test_an_empty_answer_and_a_late_one_stay_what_they_are():
    silent = CompositeProposer(Lookup(found_after_nines), Model(lambda text, room: None if text[-1] == 3 else []))
    sequences = [sequence(1, 3), sequence(2, 4)]
    for each in sequences:
        silent.open(each)
    assert silent.propose([(each, 4) for each in sequences]) == [None, []]


def test_both_know_a_sequence_or_neither():
    proposer, first, second = composite()
    with pytest.raises(CannotServe):
        proposer.open(sequence(1, 2_000))
    assert (first.opened, second.opened) == ([], [])
    known = sequence(2, 3)
    proposer.open(known)
    assert (first.opened, second.opened) == ([2], [2])
    proposer.close(known)
    assert (first.opened, second.opened) == ([], [])


def test_guesses_are_counted_for_who_made_them():
    proposer, _, _ = composite()
    drafter = Drafter(proposer, 4, lambda: 0.0)
    drafter.attach(Welcome(1000, 64, 64, 100))
    drafter.apply(StepBatch(1, begins=(begin(1, (5, 8), window=4),)))
    while drafter.has_work:
        drafter.step()
    assert drafter.stats.guesses_sent == {"model": 1, "ngram": 3}, "8, then 9 by the model, what follows it is found"
    drafter.apply(StepBatch(2, commits=(commit(1, 2, (9, 9, 7), window=1),)))
    assert drafter.stats.guesses_matched == {"model": 1, "ngram": 1}
    assert drafter.stats.guesses_refuted == {"ngram": 1}
    assert drafter.stats.guesses_dropped == {"ngram": 2}
