"""The scheduler and its blocks, without a model: what is planned fits, nobody starves, blocks balance."""

from hypothesis import given
from hypothesis import strategies as st

from shared.digest import extend
from shared.engine.block_allocator import BlockAllocator
from shared.link import Proposal
from shared.sampling import SamplingParams
from verifier_service.generation import Generation, new_generation
from verifier_service.request import Request, Stopping
from verifier_service.scheduler import Scheduled, Scheduler, SchedulerLimits

BLOCK_SIZE = 4


def generation(number: int, prompt_length: int, max_tokens: int = 20, max_draft_tokens: int = 4, priority: int = 0, tenant: str = "") -> Generation:
    prompt = tuple(range(100 * number, 100 * number + prompt_length))  # of no two numbers alike
    request = Request(
        f"r{number}",
        prompt,
        SamplingParams(),
        Stopping(max_tokens),
        1,
        max_draft_tokens=max_draft_tokens,
        priority=priority,
        tenant=tenant,
    )
    return new_generation(number, request, 64, 0, 0.0)


def guess(of: Generation, count: int) -> None:
    """Gives it guesses that follow what it has."""
    chain = [*of.committed, *of.guesses.token_ids]
    of.guesses.join(Proposal(of.number, len(chain), extend(0, chain), (7,) * count), 64, False)


def run(plan: list[Scheduled]) -> None:
    """What a step would do: KV for what ran; a token where the last one did."""
    for part in plan:
        is_terminal = part.is_terminal
        part.generation.sequence.kv_len += part.num_tokens
        if is_terminal:
            part.generation.num_sound = part.generation.sequence.kv_len
            part.generation.committed.append(9)
            part.generation.guesses.commit([9])


def scheduler(num_blocks: int, max_running: int = 4, max_step_tokens: int = 16, max_draft_tokens: int = 4) -> tuple[Scheduler, BlockAllocator]:
    allocator = BlockAllocator(num_blocks, BLOCK_SIZE)
    return Scheduler(allocator, SchedulerLimits(max_running, max_step_tokens, max_draft_tokens)), allocator


def test_a_long_prompt_takes_a_quarter_of_a_step_in_which_others_decode():
    queue, _ = scheduler(64)
    queue.add(generation(1, 3))
    run(queue.schedule())
    queue.add(generation(2, 100))
    plan = queue.schedule()
    assert [(part.generation.number, part.num_tokens) for part in plan] == [(1, 1), (2, 4)]
    assert not plan[1].is_terminal


def test_many_long_prompts_stall_nobodys_tokens():
    queue, _ = scheduler(400, max_running=12)
    talking = [generation(number, 3, max_tokens=90, priority=-1) for number in range(3)]
    for one in talking:
        queue.add(one)
    run(queue.schedule())
    for number in range(3, 12):
        queue.add(generation(number, 90, priority=1))
    for _ in range(60):
        before = [one.num_generated for one in talking]
        plan = queue.schedule()
        assert sum(part.num_tokens for part in plan if not part.is_terminal) <= 16 // 4
        run(plan)
        assert [one.num_generated for one in talking] == [count + 1 for count in before]


def test_a_prompt_has_the_whole_step_when_nobody_decodes():
    queue, _ = scheduler(64)
    queue.add(generation(1, 100))
    assert [part.num_tokens for part in queue.schedule()] == [16]


def test_a_step_smaller_than_its_requests_lets_only_so_many_run():
    queue, _ = scheduler(64, max_running=8, max_step_tokens=3)
    for number in range(8):
        queue.add(generation(number, 1))
    for _ in range(8):
        plan = queue.schedule()
        assert sum(part.num_tokens for part in plan) <= 3
        run(plan)
    assert (queue.num_running, queue.num_waiting) == (3, 5)


def test_a_prompt_of_higher_priority_goes_before_the_rest_of_a_lower_one():
    queue, _ = scheduler(64)
    queue.add(generation(1, 90, priority=-5))
    run(queue.schedule())
    queue.add(generation(2, 20, priority=5))
    assert [(part.generation.number, part.num_tokens) for part in queue.schedule()] == [(2, 16)]


def test_guesses_of_older_requests_take_nobodys_token():
    """Six requests with more guesses than the step has room for: all six get their token, and the guesses that fit are dealt out evenly."""
    queue, _ = scheduler(200, max_running=8, max_step_tokens=16, max_draft_tokens=8)
    live = [generation(number, 2, max_draft_tokens=8) for number in range(6)]
    for one in live:
        queue.add(one)
    run(queue.schedule())
    for one in live:
        guess(one, 8)
    plan = queue.schedule()
    assert [part.num_tokens for part in plan] == [1] * 6
    assert sorted(part.num_guesses for part in plan) == [1, 1, 2, 2, 2, 2]


def test_a_prompt_gets_its_share_beside_requests_with_many_guesses():
    queue, _ = scheduler(200, max_running=8, max_step_tokens=16, max_draft_tokens=8)
    live = [generation(number, 2, max_draft_tokens=8) for number in range(3)]
    for one in live:
        queue.add(one)
    run(queue.schedule())
    for one in live:
        guess(one, 8)
    queue.add(generation(9, 50))
    plan = {part.generation.number: part for part in queue.schedule()}
    assert plan[9].num_tokens == 4
    assert sum(plan[number].num_guesses for number in range(3)) == 16 - 3 - 4


def test_guesses_are_clipped_to_what_the_request_can_still_use():
    queue, _ = scheduler(64)
    one = generation(1, 3, max_tokens=4)
    queue.add(one)
    run(queue.schedule())
    guess(one, 8)
    assert queue.schedule()[0].num_guesses == 2  # one token is out, the last one is the target's own


def test_blocks_that_guesses_had_are_there_for_the_next_who_needs_one():
    queue, allocator = scheduler(6, max_draft_tokens=8)
    one, two, three = (generation(number, 3, max_draft_tokens=8) for number in (1, 2, 3))
    for each in (one, two):
        queue.add(each)
    run(queue.schedule())
    for each in (one, two):
        guess(each, 8)
    plan = queue.schedule()
    assert [part.num_guesses for part in plan] == [7, 7]
    assert allocator.num_free == 0
    run(plan)  # the target has said otherwise
    queue.add(three)
    assert [(part.generation.number, part.num_tokens) for part in queue.schedule()] == [(1, 1), (2, 1), (3, 3)]
    assert queue.num_preempted == 0


def test_guesses_are_given_up_before_anyone_is_preempted():
    queue, allocator = scheduler(3)
    one, two = generation(1, 4), generation(2, 3)
    queue.add(one)
    queue.add(two)
    run(queue.schedule())
    guess(two, 4)
    plan = queue.schedule()
    assert [part.num_guesses for part in plan] == [0, 0]
    assert queue.num_preempted == 0
    assert allocator.num_free == 0


def test_the_youngest_is_preempted_and_keeps_its_tokens():
    queue, _ = scheduler(4)
    one, two = generation(1, 7), generation(2, 7)
    queue.add(one)
    queue.add(two)
    for _ in range(3):
        run(queue.schedule())
    assert queue.num_preempted == 1
    assert (two.sequence.block_table, two.sequence.kv_len) == ([], 0)
    assert len(two.committed) > 7
    assert len(one.committed) == 10


def test_the_lowest_priority_is_preempted_before_the_youngest():
    queue, _ = scheduler(4)
    one, two = generation(1, 7, priority=-1), generation(2, 7)
    queue.add(one)
    queue.add(two)
    for _ in range(3):
        run(queue.schedule())
    assert queue.num_preempted == 1
    assert one.sequence.block_table == []
    assert len(two.committed) == 10


def test_one_that_comes_back_is_computed_from_what_is_still_cached_of_it():
    queue, _ = scheduler(5)
    one, two = generation(1, 7, max_tokens=4), generation(2, 11)
    queue.add(one)
    queue.add(two)
    while not queue.num_preempted:
        run(queue.schedule())
    assert (two.sequence.kv_len, two.sequence.block_table, len(two.committed)) == (0, [], 12)
    queue.remove(one)
    assert [(part.generation.number, part.num_tokens) for part in queue.schedule()] == [(2, 12 - 8)]
    assert (two.num_cached, queue.num_cached_tokens) == (0, 0)  # the prompt was computed for nobody else
    queue.check_integrity([two])


def test_a_removed_request_leaves_no_block():
    queue, allocator = scheduler(8)
    one = generation(1, 10)
    queue.add(one)
    run(queue.schedule())
    queue.remove(one)
    assert allocator.num_free == 8


@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    num_blocks=st.integers(14, 40),
    max_step_tokens=st.integers(1, 20),
    guesses=st.lists(st.integers(0, 6), max_size=40),
)
def test_everybody_gets_done_within_the_budget_and_blocks_balance(prompts, num_blocks, max_step_tokens, guesses):
    queue, allocator = scheduler(num_blocks, max_running=3, max_step_tokens=max_step_tokens)
    alive = {number: generation(number, length) for number, length in enumerate(prompts)}
    for one in alive.values():
        queue.add(one)
    amounts = iter(guesses)
    for _ in range(2_000):
        if not alive:
            break
        for one in alive.values():
            if one.num_pending == 1 and (count := next(amounts, 0)):
                guess(one, count)
        plan = queue.schedule()
        assert 0 < sum(part.num_tokens + part.num_guesses for part in plan) <= max_step_tokens
        assert len(plan) <= 3
        for part in plan:
            length = part.generation.sequence.kv_len + part.num_tokens + part.num_guesses
            assert len(part.generation.sequence.block_table) * BLOCK_SIZE >= length
        run(plan)
        for one in [one for one in alive.values() if one.room == 0]:
            queue.remove(one)
            del alive[one.number]
        allocator.check_integrity([one.sequence.block_table for one in alive.values()])
    assert not alive
    assert allocator.num_free == num_blocks
