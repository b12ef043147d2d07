"""The cost of a step is measured before the first request, in bounded time, with blocks that are free again afterwards."""

import pytest

from shared.engine.block_allocator import BlockAllocator
from tests.support.coin_pair import CoinRunner
from tests.support.tiny_models import tiny_llama
from tests.support.virtual_pair import Clock, TimedRunner
from verifier_service.calibration import Space, calibrate
from verifier_service.expansion import Scorer

BOTH: tuple[Scorer, ...] = ("multi_query", "expanded")


def test_a_timed_step_is_measured_for_what_it_costs():
    clock, allocator = Clock(), BlockAllocator(64, 4)
    found = calibrate(CoinRunner(64, clock, 0.030, 0.001), allocator, 64, BOTH, Space(8, 64, 1024), clock)
    assert found.points == pytest.approx({rows: 0.03 + 0.001 * rows for rows in (1, 2, 4, 8, 16, 32, 64)})
    assert allocator.num_used == 0


def test_a_slow_model_is_measured_only_as_far_as_time_allows():
    clock = Clock()
    found = calibrate(CoinRunner(64, clock, 0.2, 0.05), BlockAllocator(64, 4), 64, BOTH, Space(8, 512, 1024, budget_s=8.0), clock)
    assert {1, 2} <= set(found.points) < {1, 2, 4, 8, 16, 32, 64, 128, 256, 512}
    assert clock.now < 12.0


class SlowIfExpanded(CoinRunner):
    """Each span costs."""

    def forward(self, spans, *args, **kwargs):
        self._clock.now += 0.01 * len(spans)
        return super().forward(spans, *args, **kwargs)


def test_the_faster_scorer_is_chosen():
    clock = Clock()
    found = calibrate(SlowIfExpanded(64, clock, 0.03, 0.0), BlockAllocator(64, 4), 64, ("expanded", "multi_query"), Space(4, 8, 1024), clock)
    assert found.scorer == "multi_query"
    assert found.scorer_seconds["expanded"] > found.scorer_seconds["multi_query"] > 0


def test_a_scorer_that_is_hardly_faster_is_not_preferred_to_the_first():
    class SlowIfTogether(CoinRunner):
        def forward(self, spans, *args, **kwargs):
            self._clock.now += 0.001 * (len(spans) == 1)
            return super().forward(spans, *args, **kwargs)

    clock = Clock()
    found = calibrate(SlowIfTogether(64, clock, 0.03, 0.0), BlockAllocator(64, 4), 64, BOTH, Space(4, 8, 1024), clock)
    assert found.scorer == "multi_query"
    assert found.scorer_seconds["expanded"] < found.scorer_seconds["multi_query"]


def test_a_scorer_that_was_asked_for_is_not_compared():
    clock = Clock()
    found = calibrate(SlowIfExpanded(64, clock, 0.03, 0.0), BlockAllocator(64, 4), 64, ("expanded",), Space(4, 8, 1024), clock)
    assert (found.scorer, found.scorer_seconds) == ("expanded", {})


def test_a_real_model_is_measured_in_a_small_pool():
    model, clock, allocator = tiny_llama(), Clock(), BlockAllocator(3, 4)
    found = calibrate(TimedRunner(model, 3, 4, clock, 0.03), allocator, model.vocab_size, BOTH, Space(4, 16, 12), clock)
    assert set(found.points) == {1, 2, 4, 8, 16}
    assert allocator.num_used == 0


def test_a_pool_without_room_for_a_round_is_not_measured():
    clock, allocator = Clock(), BlockAllocator(1, 4)
    found = calibrate(CoinRunner(64, clock, 0.03, 0.0), allocator, 64, BOTH, Space(8, 64, 4), clock)
    assert found.points == {}
    assert allocator.num_used == 0


def test_speculation_may_be_off():
    clock = Clock()
    assert calibrate(CoinRunner(64, clock, 0.03, 0.0), BlockAllocator(64, 4), 64, BOTH, Space(0, 4, 1024), clock).points.keys() == {1, 2, 4}
