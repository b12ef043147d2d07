"""When one that is refused is told to come again."""

from tests.support.virtual_pair import Clock
from verifier_service.turnover import Turnover


def test_one_second_as_long_as_nobody_has_ended():
    assert Turnover(Clock()).refuse() == 1.0


def test_when_the_next_place_comes_free_and_one_after_another():
    clock = Clock()
    turnover = Turnover(clock)
    for _ in range(50):
        clock.now += 2.0
        turnover.end()
    delays = [turnover.refuse() for _ in range(3)]
    assert [round(seconds, 6) for seconds in delays] == [2.0, 4.0, 6.0]
    clock.now += 2.0
    turnover.end()
    assert round(turnover.refuse(), 6) == 2.0


def test_idle_time_is_no_interval_and_a_long_silence_is():
    clock = Clock()
    turnover = Turnover(clock)
    clock.now = 1000.0
    turnover.begin()
    clock.now += 0.5
    turnover.end()
    assert turnover.refuse() == 0.5
    clock.now += 7.0
    turnover.end()
    clock.now += 9.0
    assert turnover.refuse() == 9.0


def test_never_at_once_and_never_after_half_a_minute():
    clock = Clock()
    turnover = Turnover(clock)
    turnover.end()
    assert turnover.refuse() == 0.1
    clock.now += 500.0
    assert turnover.refuse() == 30.0
