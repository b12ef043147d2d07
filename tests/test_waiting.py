"""Whose turn it is: by priority, then the tenant with least service, then by arrival, and nobody waits forever."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shared.sampling import SamplingParams
from tests.support.paper_engine import PaperEngine
from verifier_service.generation import Generation, new_generation
from verifier_service.request import Request, Stopping
from verifier_service.scheduler import SchedulerLimits
from verifier_service.tenants import Tenants
from verifier_service.waiting import Waiting


def generation(number: int, priority: int = 0, tenant: str = "") -> Generation:
    request = Request(f"r{number}", (1,), SamplingParams(), Stopping(4), 1, priority=priority, tenant=tenant)
    return new_generation(number, request, 64, 0, 0.0)


def order(waiting: Waiting) -> list[int]:
    taken = []
    while (one := waiting.next()) is not None:
        waiting.take(one)
        taken.append(one.number)
    return taken


def queue(*generations: Generation, max_overtaken: int = 100) -> tuple[Waiting, Tenants]:
    tenants = Tenants()
    waiting = Waiting(tenants, max_overtaken)
    for one in generations:
        tenants.join(one.request.tenant)
        waiting.add(one)
    return waiting, tenants


def test_the_higher_priority_goes_first_then_the_older():
    waiting, _ = queue(generation(1), generation(2, 5), generation(3, -5), generation(4, 5))
    assert len(waiting) == 4
    assert order(waiting) == [2, 4, 1, 3]
    assert len(waiting) == 0


def test_of_one_priority_the_tenant_with_least_service_goes_first():
    waiting, tenants = queue(generation(1, tenant="a"), generation(2, tenant="a"), generation(3, tenant="b"))
    tenants.charge("a", 10)
    assert order(waiting) == [3, 1, 2]


def test_one_that_comes_back_stands_before_those_that_came_after_it():
    first, second = generation(1), generation(2)
    waiting, _ = queue(first, second)
    waiting.take(first)
    waiting.add(first)
    assert order(waiting) == [1, 2]


def test_one_that_is_given_up_is_nobodys_turn():
    first, second = generation(1), generation(2)
    waiting, _ = queue(first, second)
    waiting.remove(first)
    assert order(waiting) == [2]


@given(
    max_overtaken=st.integers(1, 6),
    low=st.lists(st.tuples(st.integers(-100, 0), st.sampled_from("ab")), min_size=1, max_size=6),
)
def test_nobody_is_overtaken_too_often(max_overtaken, low):
    """Requests of the highest priority never end; the head of each line is next after at most max_overtaken + lines - 1 others."""
    waiting, tenants = queue(*[generation(number, *line) for number, line in enumerate(low)], max_overtaken=max_overtaken)
    num_lines = len({*low, (100, "c")})
    passed: Counter[tuple[int, str]] = Counter()
    left = Counter(low)
    for number in range(100, 100 + 20 * num_lines):
        tenants.join("c")
        waiting.add(generation(number, 100, "c"))
        one = waiting.next()
        assert one is not None
        waiting.take(one)
        turn = (one.request.priority, one.request.tenant)
        left -= Counter([turn])
        for line in left:
            passed[line] = 0 if line == turn else passed[line] + 1
            assert passed[line] <= max_overtaken + num_lines - 1
    assert not left


def test_a_newcomer_is_lifted_to_the_least_served():
    tenants = Tenants()
    for tenant in "ab":
        tenants.join(tenant)
    tenants.charge("a", 70)
    tenants.charge("b", 50)
    tenants.join("c")
    assert tenants.service("c") == 50


def test_nobody_saves_up_by_staying_away_or_starts_over_by_coming_back():
    tenants = Tenants()
    for tenant in "ab":
        tenants.join(tenant)
    tenants.charge("a", 70)
    tenants.leave("a")
    tenants.charge("b", 50)
    tenants.join("a")
    assert (tenants.service("a"), tenants.service("b")) == (70, 50)
    tenants.leave("b")
    tenants.charge("a", 30)
    tenants.join("b")
    assert tenants.service("b") == 100


def test_absent_tenants_are_remembered_in_bounded_space():
    tenants = Tenants()
    tenants.join("stays")
    for number in range(5_000):
        tenants.join(str(number))
        tenants.charge(str(number), 1)
        tenants.leave(str(number))
    assert len(tenants) <= 1 + 1024
    tenants.leave("stays")
    assert len(tenants) == 0


def _served(tenant_of_long: str, tenant_of_short: str) -> Counter[int]:
    """Weighted tokens by length of prompt, where requests of two sizes always wait."""
    engine = PaperEngine(64, 4, SchedulerLimits(4, 32, 0, prefix_cache=False))
    served: Counter[int] = Counter()
    for step in range(1_500):
        for size, tenant in ((40, tenant_of_long), (8, tenant_of_short)):
            while sum(len(one.request.prompt_ids) == size for one in engine.live.values()) < 8:
                engine.arrive((step % 50,) * size, size, tenant=tenant)
        for part in engine.step():
            weight = 2 if part.generation.num_generated > 1 else 1
            served[len(part.generation.request.prompt_ids)] += weight * part.num_tokens
    return served


def test_two_tenants_that_always_want_more_get_the_same_whatever_the_size_of_their_requests():
    served = _served("a", "b")
    assert abs(served[40] - served[8]) < 0.1 * served[40]


def test_of_one_tenant_long_requests_crowd_out_short_ones():
    """The negative control: the same requests, nobody to be fair to."""
    served = _served("a", "a")
    assert served[40] > 3 * served[8]
