"""Hidden states: the row that chose the last committed token, through the one map, to those who asked, with the length they belong to."""

import itertools
from collections.abc import Sequence

import pytest
import torch

from draft_service.drafter import Drafter
from draft_service.proposer import Guess
from draft_service.tail import DraftSequence
from shared.digest import extend
from shared.engine.block_allocator import BlockAllocator
from shared.engine.forward_batch import Span
from shared.engine.head_input import head_input
from shared.engine.model_runner import ModelRunner
from shared.hidden import to_rows, to_wire
from shared.link import Commit, Distribution, HiddenState, Proposal, StepBatch
from shared.sampling import Mode, SamplingParams
from tests.support.proposers import RuleProposer
from tests.support.tiny_models import tiny_llama
from tests.support.virtual_pair import Clock, VirtualPair, delay
from verifier_service.generation import new_generation
from verifier_service.outbox import Outbox
from verifier_service.request import Request, Stopping
from verifier_service.scheduler import Scheduled
from verifier_service.scoring import Scoring
from verifier_service.verdict import Verdict

TARGET = tiny_llama()
CHUNK = -1  # in the place of a number of guesses: a piece of a prompt, which has no row


@torch.inference_mode()
def what_the_head_reads(text: Sequence[int]) -> torch.Tensor:
    """In the row of the last token, by itself: [hidden_size]."""
    runner = ModelRunner(TARGET, 64, 4)
    with head_input(TARGET.model) as read:
        runner.forward([Span(tuple(text), 0, range(64), 1)])
    return read[0][0]


def assert_belongs(hidden: HiddenState | None, text: Sequence[int]) -> None:
    """That of the row before the last token of a text."""
    assert hidden is not None
    assert (hidden.dtype, hidden.shape, len(hidden.data)) == ("float64", (TARGET.hidden_size,), 8 * TARGET.hidden_size)
    torch.testing.assert_close(to_rows([hidden], torch.float64)[0], what_the_head_reads(text[:-1]), rtol=0, atol=1e-10)


def plain_tokens(prompt: tuple[int, ...], count: int) -> list[int]:
    """What greedy decoding says."""
    pair = VirtualPair(TARGET)
    return pair.run(Request("plain", prompt, SamplingParams(temperature=0.0), Stopping(count), seed=0))["plain"]


def scheduled(number: int, kind: int, num_right: int, mode: Mode, allocator: BlockAllocator) -> Scheduled:
    """A part of a step: a prompt with `kind` guesses, of which the first `num_right` are the target's own, or a chunk of it."""
    prompt = (3 + number, 17, 5, 40 + number)
    request = Request(f"r{number}", prompt, SamplingParams(temperature=0.0), Stopping(20), seed=number, mode=mode, max_draft_tokens=4)
    generation = new_generation(number, request, TARGET.vocab_size, 0, 0.0)
    generation.sequence.reserve(12, allocator)
    if kind == CHUNK:
        return Scheduled(generation, 2, 0)
    said = plain_tokens(prompt, 4)
    guesses = tuple(token if index < num_right else (token + 1) % TARGET.vocab_size for index, token in enumerate(said[:kind]))
    if guesses:
        drawn = tuple(Distribution((token,), (1.0,)) for token in guesses) if mode is Mode.REJECTION else ()
        generation.guesses.join(Proposal(number, len(prompt), extend(0, prompt), guesses, drawn), 8, False)
    return Scheduled(generation, len(prompt), len(guesses))


@pytest.mark.parametrize("scorer", ["expanded", "multi_query"])
@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_every_mix_of_proposal_lengths_gets_each_sequence_its_own_row(scorer, num_right):
    seen = set()
    for kinds in itertools.product([CHUNK, 0, 1, 3], repeat=3):
        allocator = BlockAllocator(64, 4)
        modes = [Mode.COUPLED, Mode.REJECTION, Mode.COUPLED]
        plan = [scheduled(number, kind, num_right, mode, allocator) for number, (kind, mode) in enumerate(zip(kinds, modes, strict=True))]
        verdicts = Scoring(ModelRunner(TARGET, 64, 4), TARGET.vocab_size, scorer).score(plan, with_hidden=True)
        for kind, part, verdict in zip(kinds, plan, verdicts, strict=True):
            if kind == CHUNK:
                assert verdict is None
                continue
            assert isinstance(verdict, Verdict)
            assert verdict.accepted == min(kind, num_right)
            seen.add(verdict.accepted)
            assert_belongs(verdict.hidden, [*part.generation.committed, *verdict.token_ids])
    assert seen == set(range(num_right + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_targets_of_every_number_type_can_be_asked(dtype):
    """One that could not would fail every request of a step as soon as a speculator is attached."""
    model, allocator = tiny_llama(dtype=dtype), BlockAllocator(64, 4)
    plan = [scheduled(0, 0, 0, Mode.COUPLED, allocator)]
    [verdict] = Scoring(ModelRunner(model, 64, 4), model.vocab_size, "expanded").score(plan, with_hidden=True)
    assert isinstance(verdict, Verdict)
    assert verdict.hidden is not None
    assert (verdict.hidden.dtype, len(verdict.hidden.data)) == (str(dtype).removeprefix("torch."), dtype.itemsize * model.hidden_size)


def test_nothing_is_collected_where_nobody_asks():
    allocator = BlockAllocator(64, 4)
    plan = [scheduled(0, 1, 1, Mode.COUPLED, allocator)]
    [verdict] = Scoring(ModelRunner(TARGET, 64, 4), TARGET.vocab_size, "expanded").score(plan)
    assert isinstance(verdict, Verdict)
    assert verdict.hidden is None


def test_a_chunk_alone_has_no_row_and_no_hidden_state():
    plan = [scheduled(0, CHUNK, 0, Mode.COUPLED, BlockAllocator(64, 4))]
    assert Scoring(ModelRunner(TARGET, 64, 4), TARGET.vocab_size, "expanded").score(plan, with_hidden=True) == [None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_numbers_cross_the_wire_as_they_are(dtype):
    rows = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    states = to_wire(rows)
    assert [len(state.data) for state in states] == [5 * dtype.itemsize] * 3
    assert torch.equal(to_rows(states, dtype), rows)


class Listening(RuleProposer):
    """Guesses right for a while; keeps what it was told, with the text that it was told it for."""

    def __init__(self, said: dict[tuple[int, ...], list[int]], num_right: int = 2) -> None:
        super().__init__(lambda text, room: None)
        self._said = said
        self._num_right = num_right
        self.heard: list[tuple[tuple[int, ...], HiddenState | None]] = []

    def propose(self, requests: Sequence[tuple[DraftSequence, int]]) -> list[list[Guess] | None]:
        self.heard += [(tuple(sequence.committed), sequence.hidden) for sequence, _ in requests]
        return [self._continue(sequence, room) for sequence, room in requests]

    def _continue(self, sequence: DraftSequence, room: int) -> list[Guess]:
        text = [*sequence.committed, *sequence.tail]
        [whole] = [[*prompt, *said] for prompt, said in self._said.items() if tuple(text[: len(prompt)]) == prompt]
        if text != whole[: len(text)] or len(text) >= len(whole):
            return []
        right = whole[len(text) : len(text) + self._num_right]
        return [Guess(token) for token in [*right, (right[-1] + 1) % TARGET.vocab_size][:room]]


def requests() -> list[Request]:
    return [
        Request(f"r{number}", (3 + number, 17, 5), SamplingParams(temperature=0.0), Stopping(24), seed=0, max_draft_tokens=4) for number in range(3)
    ]


def listeners(pair: VirtualPair, count: int, to_drafter: float = 0.001) -> list[Listening]:
    said = {request.prompt_ids: plain_tokens(request.prompt_ids, 24) for request in requests()}
    made = [Listening(said) for _ in range(count)]
    for proposer in made:
        clock = Clock()
        pair.attach(Drafter(proposer, 16, clock), clock, wants_hidden_state=True, to_drafter=delay(to_drafter))
    return made


def assert_heard(heard: Sequence[tuple[tuple[int, ...], HiddenState | None]], least: int) -> None:
    known = [(text, hidden) for text, hidden in heard if hidden is not None]
    assert len(known) >= least
    for text, hidden in known:
        assert_belongs(hidden, text)


def test_a_drafter_that_asks_hears_with_every_commit():
    pair = VirtualPair(TARGET)
    [proposer] = listeners(pair, 1)
    pair.run(*requests())
    assert sum(emission.accepted for emission in pair.emissions) > 20, "rounds of several accepted guesses are what is tested"
    assert_heard(proposer.heard, least=20)
    prompts = {request.prompt_ids for request in requests()}
    assert all(hidden is not None for text, hidden in proposer.heard if text not in prompts), "only a prompt has no chosen token yet"


def test_a_drafter_that_does_not_ask_hears_nothing():
    pair = VirtualPair(TARGET)
    [_] = listeners(pair, 1)
    said = {request.prompt_ids: plain_tokens(request.prompt_ids, 24) for request in requests()}
    quiet, clock = Listening(said), Clock()
    pair.attach(Drafter(quiet, 16, clock), clock)
    pair.run(*requests())
    assert quiet.heard
    assert all(hidden is None for _, hidden in quiet.heard)


def test_who_takes_over_hears_with_the_begin():
    pair = VirtualPair(TARGET)
    first, second = listeners(pair, 2)
    at_handover: list[int] = []

    def kill() -> None:
        host = next(host for host in pair.hosts.values() if host.drafter._proposer is first)  # noqa: SLF001  # the pair knows drafters only
        at_handover.append(len(second.heard))
        pair.kill(host)

    pair.at_step(4, kill)
    pair.run(*requests())
    taken_over = second.heard[at_handover[0] :]
    assert all(hidden is not None for _, hidden in taken_over)
    assert_heard(taken_over, least=10)


def test_commits_that_are_merged_on_the_way_bring_that_of_the_last():
    outbox = Outbox(1 << 20)
    states = to_wire(torch.arange(6.0, dtype=torch.float64).view(2, 3))
    outbox.add(StepBatch(1, commits=(Commit(7, 10, 0, (1,), 4, hidden=states[0]),)))
    outbox.add(StepBatch(2, commits=(Commit(7, 11, 1, (2, 3), 4, hidden=states[1]),)))
    batch = outbox.take()
    assert batch is not None
    assert batch.commits == (Commit(7, 10, 1, (1, 2, 3), 4, hidden=states[1]),)
