import queue
import time
from collections.abc import Iterator, Sequence

import pytest

from draft_service.drafter import Drafter
from draft_service.engine import DraftEngine
from draft_service.ngram import NgramProposer
from shared.link import Begin, FromDrafter, ProposalBatch, StepBatch
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
