import pytest

from shared.link import Decline, End, EndReason, ProposalBatch, StepBatch
from tests.support.drafting import begin, commit, drafter_of, proposals_of, run
from tests.support.proposers import RuleProposer, count_up


class FaultyProposer(RuleProposer):
    """Fails where it is told to."""

    def __init__(self, *where: str) -> None:
        super().__init__(count_up)
        self.where = set(where)

    def open(self, sequence):
        self._maybe_fail("open")
        super().open(sequence)

    def close(self, sequence):
        super().close(sequence)
        self._maybe_fail("close")

    def propose(self, requests):
        self._maybe_fail("propose")
        answers = super().propose(requests)
        return answers[1:] if "answer" in self.where else answers

    def _maybe_fail(self, what: str) -> None:
        if what in self.where:
            raise RuntimeError(f"cannot {what}")


@pytest.mark.parametrize("where", [("propose",), ("answer",), ("propose", "close"), ("open",)])
def test_a_fault_of_the_proposer_declines_who_was_asked_for_and_the_drafter_goes_on(where):
    proposer = FaultyProposer()
    drafter = drafter_of(proposer)
    drafter.apply(StepBatch(1, begins=(begin(1, window=0),)))
    run(drafter)
    proposer.where = set(where)
    drafter.apply(StepBatch(2, begins=(begin(2), begin(3))))
    frames = run(drafter)
    assert [frame.sequence for frame in frames if isinstance(frame, Decline)] == [2, 3]
    assert proposals_of(frames) == []
    assert frames[-1].idle
    assert proposer.opened == [1]
    assert drafter.stats.failures == len(where) + ("close" in where) + (where == ("open",))
    proposer.where = set()
    drafter.apply(StepBatch(3, begins=(begin(4, window=1),), commits=(commit(1, 3, [4], window=1), commit(2, 3, [4]))))
    frames = run(drafter)
    assert [proposal.sequence for proposal in proposals_of(frames)] == [1, 4]
    assert [frame for frame in frames if not isinstance(frame, ProposalBatch)] == [], "a declined sequence is not asked for again"


def test_an_end_of_a_sequence_that_the_proposer_cannot_close_is_an_end_all_the_same():
    proposer = FaultyProposer("close")
    drafter = drafter_of(proposer, capacity=1)
    drafter.apply(StepBatch(1, begins=(begin(1),)))
    run(drafter)
    drafter.apply(StepBatch(2, begins=(begin(2),), ends=(End(1, EndReason.FINISHED),)))
    assert {proposal.sequence for proposal in proposals_of(run(drafter))} == {2}
    drafter.reset()
    assert drafter.stats.sequences == 0
