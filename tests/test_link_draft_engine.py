import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from draft_service.drafter import Drafter
from draft_service.engine import DraftEngine
from draft_service.ngram import NgramProposer
from draft_service.proposer import Guess
from draft_service.tail import DraftSequence
from shared.link import Begin, Decline, FromDrafter, ProposalBatch, StepBatch
from shared.sampling import Mode, SamplingParams
from tests.support.rpc import WELCOME

REPETITIVE = Begin(7, 6, (1, 2, 3, 1, 2, 3), Mode.COUPLED, SamplingParams(temperature=0), 0, 4)


class _Link:
    """What an engine sends on one link."""

    def __init__(self) -> None:
        self.frames: queue.Queue[FromDrafter] = queue.Queue()

    def send(self, frames: Sequence[FromDrafter]) -> None:
        for frame in frames:
            self.frames.put(frame)

    def next_guesses(self) -> ProposalBatch:
        while True:
            frame = self.frames.get(timeout=30)
            if isinstance(frame, ProposalBatch) and frame.proposals:
                return frame


@pytest.fixture
def engine() -> Iterator[DraftEngine]:
    crashes: list[BaseException] = []
    engine = DraftEngine(Drafter(NgramProposer(2, 3), 4, time.monotonic), crashes.append, time.monotonic)
    engine.start()
    yield engine
    engine.stop()
    assert crashes == []


def test_what_the_verifier_says_leads_to_guesses_on_its_link(engine: DraftEngine) -> None:
    link = _Link()
    engine.attach(WELCOME, link.send)
    engine.apply(StepBatch(1, (REPETITIVE,)))
    (proposal,) = link.next_guesses().proposals
    assert (proposal.sequence, proposal.start, proposal.token_ids[0]) == (7, 6, 1)
    assert engine.age_s < 30


def test_a_fault_of_the_proposer_does_not_end_the_engine() -> None:
    class Faulty(NgramProposer):
        def propose(self, requests: Sequence[tuple[DraftSequence, int]]) -> list[list[Guess]]:
            if any(sequence.number == 7 for sequence, _ in requests):
                raise RuntimeError("CUDA out of memory")
            return super().propose(requests)

    crashes: list[BaseException] = []
    engine, link = DraftEngine(Drafter(Faulty(2, 3), 4, time.monotonic), crashes.append, time.monotonic), _Link()
    engine.start()
    engine.attach(WELCOME, link.send)
    engine.apply(StepBatch(1, (REPETITIVE,)))
    assert isinstance(link.frames.get(timeout=30), Decline)
    engine.apply(StepBatch(2, (replace(REPETITIVE, sequence=8),)))
    assert [proposal.sequence for proposal in link.next_guesses().proposals] == [8]
    engine.stop()
    assert crashes == []


def test_a_new_link_knows_nothing_of_the_old_one(engine: DraftEngine) -> None:
    old, new = _Link(), _Link()
    engine.attach(WELCOME, old.send)
    engine.apply(StepBatch(1, (REPETITIVE,)))
    old.next_guesses()
    engine.reset()
    engine.attach(WELCOME, new.send)
    engine.apply(StepBatch(2, (Begin(9, 6, REPETITIVE.token_ids, Mode.COUPLED, SamplingParams(), 0, 4),)))
    batch = new.next_guesses()
    assert ([proposal.sequence for proposal in batch.proposals], batch.step) == ([9], 2)
