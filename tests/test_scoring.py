"""What cannot be picked from fails the request it belongs to, and nobody else; a guess that leads there fails no request at all."""

import math

import pytest

from shared.digest import extend
from shared.engine.block_allocator import BlockAllocator
from shared.engine.model_runner import ModelRunner
from shared.errors import CorruptOutput
from shared.link import Proposal
from shared.sampling import Mode, SamplingParams
from tests.support.tiny_models import tiny_llama
from verifier_service.generation import Generation, new_generation
from verifier_service.request import Request, Stopping
from verifier_service.scheduler import Scheduled
from verifier_service.scoring import Scoring
from verifier_service.verdict import Verdict

TARGET = tiny_llama()


class PoisonedRunner(ModelRunner):
    """Its logits are not a number behind one token."""

    def __init__(self, poison: int) -> None:
        super().__init__(TARGET, 32, 4)
        self._poison = poison

    def forward(self, spans):
        logits = super().forward(spans)
        fed = [token_id for span in spans for token_id in span.token_ids[len(span.token_ids) - span.num_logits :]]
        logits[[token_id == self._poison for token_id in fed]] = math.nan
        return logits


def decoding(number: int, last: int, allocator: BlockAllocator, mode: Mode = Mode.COUPLED, sampling: SamplingParams | None = None) -> Generation:
    request = Request(f"r{number}", (1, 2, last), sampling or SamplingParams(), Stopping(20), seed=number, mode=mode, max_draft_tokens=4)
    made = new_generation(number, request, TARGET.vocab_size, 0, 0.0)
    made.sequence.reserve(8, allocator)
    return made


def give(to: Generation, guesses: tuple[int, ...]) -> None:
    to.guesses.join(Proposal(to.number, 3, extend(0, to.committed), guesses), 8, False)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_request_whose_own_row_is_not_finite_fails_alone(mode):
    allocator = BlockAllocator(32, 4)
    bad, good = decoding(1, 60, allocator, mode), decoding(2, 3, allocator, mode)
    verdicts = Scoring(PoisonedRunner(60), TARGET.vocab_size, "expanded").score([Scheduled(bad, 3, 0), Scheduled(good, 3, 0)])
    assert isinstance(verdicts[0], CorruptOutput)
    assert isinstance(verdicts[1], Verdict)
    assert len(verdicts[1].token_ids) == 1


@pytest.mark.parametrize("scorer", ["expanded", "multi_query"])
def test_a_guess_whose_row_is_not_finite_fails_no_request(scorer):
    """The token before the poisoned row is what plain decoding says."""
    allocator = BlockAllocator(32, 4)
    plain, guessed = decoding(1, 3, allocator), decoding(1, 3, allocator)
    runner = PoisonedRunner(60)
    scoring = Scoring(runner, TARGET.vocab_size, scorer)
    [expected] = scoring.score([Scheduled(plain, 3, 0)])
    give(guessed, (60, 5))
    [verdict] = scoring.score([Scheduled(guessed, 3, 2)])
    assert verdict == expected
    assert isinstance(verdict, Verdict)


@pytest.mark.parametrize("mode", list(Mode))
def test_scores_that_overflow_fail_the_request_and_not_the_step(mode):
    """A penalty this small is refused at the boundary; if it got here it would make infinite scores of finite logits."""
    allocator = BlockAllocator(32, 4)
    overflowing = SamplingParams(repetition_penalty=1e-320)
    bad, good = decoding(1, 3, allocator, mode, overflowing), decoding(2, 3, allocator, mode)
    verdicts = Scoring(ModelRunner(TARGET, 32, 4), TARGET.vocab_size, "expanded").score([Scheduled(bad, 3, 0), Scheduled(good, 3, 0)])
    assert isinstance(verdicts[0], CorruptOutput)
    assert isinstance(verdicts[1], Verdict)


def test_a_guess_outside_the_vocabulary_is_a_rejected_token():
    allocator = BlockAllocator(32, 4)
    plain, guessed = decoding(1, 3, allocator), decoding(1, 3, allocator)
    scoring = Scoring(ModelRunner(TARGET, 32, 4), TARGET.vocab_size, "multi_query")
    [expected] = scoring.score([Scheduled(plain, 3, 0)])
    give(guessed, (2**32 - 1, TARGET.vocab_size))
    assert scoring.score([Scheduled(guessed, 3, 2)]) == [expected]


def test_both_modes_in_one_step_are_one_forward():
    allocator = BlockAllocator(32, 4)
    runner = ModelRunner(TARGET, 32, 4)
    plan = [Scheduled(decoding(number, 3, allocator, mode), 3, 0) for number, mode in enumerate([Mode.COUPLED, Mode.REJECTION, Mode.COUPLED])]
    assert all(isinstance(verdict, Verdict) for verdict in Scoring(runner, TARGET.vocab_size, "expanded").score(plan))
    assert runner.num_forwards == 1
