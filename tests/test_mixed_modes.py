"""Requests of both modes, plain ones and prompts in chunks share the steps of one verifier: every row and every tensor finds its own place."""

from draft_service.draft_model import DraftModel
from draft_service.drafter import Drafter
from shared.engine.block_allocator import BlockAllocator
from shared.sampling import Mode, SamplingParams
from tests.support.oracle import PlainDecoder
from tests.support.proposers import RuleProposer
from tests.support.tiny_models import tiny_llama
from tests.support.virtual_pair import Clock, TimedRunner, VirtualPair
from verifier_service.request import Request, Stopping

TARGET = tiny_llama()


def ask(name: str, mode: Mode, max_draft_tokens: int, prompt_length: int = 3, max_tokens: int = 24) -> Request:
    prompt = tuple((7 * index + len(name)) % 64 for index in range(prompt_length))
    return Request(name, prompt, SamplingParams(), Stopping(max_tokens), seed=len(name), mode=mode, max_draft_tokens=max_draft_tokens)


def attach_perfect_drafter(pair: VirtualPair) -> None:
    clock = Clock()
    runner = TimedRunner(TARGET, 128, 4, clock, 0.002)
    pair.attach(Drafter(DraftModel(runner, BlockAllocator(128, 4)), 16, clock), clock)


def test_in_rejection_mode_a_draft_equal_to_the_target_is_always_right_in_mixed_company():
    """Its 64 tokens all fit into the wire form, so both distributions are equal up to float32. A row in the wrong place is another distribution."""
    pair = VirtualPair(TARGET)
    attach_perfect_drafter(pair)
    asked = [
        ask("r", Mode.REJECTION, 4),
        ask("cc", Mode.COUPLED, 2),
        ask("rrr", Mode.REJECTION, 1),
        ask("plain", Mode.REJECTION, 0),
        ask("rrrrrr", Mode.REJECTION, 3),
        ask("ccccccc", Mode.COUPLED, 4),
    ]
    pair.run(*asked)
    for request in asked:
        rounds = [emission for emission in pair.emissions if emission.request_id == request.request_id]
        assert all(emission.accepted == emission.drafted for emission in rounds)
        assert (sum(emission.drafted for emission in rounds) > 2) is (request.max_draft_tokens > 0)
    assert any(len({emission.drafted for _, emission in output.emissions}) >= 4 for output in pair.outputs), "no step was ragged"


def test_nothing_absent_is_emitted_while_some_requests_are_in_the_midst_of_their_prompts():
    """A chunk of a prompt has no row: what fills its place in the contracted tensors must not become a token."""
    oracle = PlainDecoder(TARGET)
    asked = [ask("long", Mode.COUPLED, 0, prompt_length=40), ask("short", Mode.COUPLED, 4), ask("longer", Mode.COUPLED, 4, prompt_length=60)]
    expected = {request.request_id: oracle.tokens(request) for request in asked}
    texts = [[*request.prompt_ids, *expected[request.request_id]] for request in asked]

    def foresee(text: list[int], room: int) -> list[int]:
        return [whole[len(text)] for whole in texts if whole[: len(text)] == text and len(whole) > len(text)]

    pair = VirtualPair(TARGET, max_step_tokens=12)
    pair.attach(Drafter(RuleProposer(foresee), 16, Clock()))
    assert pair.run(*asked) == expected
    beside_chunks = [output for output in pair.outputs if output.stats.prefill_tokens and output.emissions]
    assert any(emission.drafted for output in beside_chunks for _, emission in output.emissions), "no guess was scored beside a chunk"
