"""The load of `outrider bench` on virtual time: schedules are kept, and what a stall costs is not hidden."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from random import Random
from statistics import mean, stdev

import pytest

from client.bench.arrivals import arrival_times
from client.bench.load import Outcome, Sample, run_closed, run_open
from client.bench.measure import to_run
from client.bench.prompts import Ask
from client.bench.summary import percentile
from shared.errors import Overloaded
from tests.support.virtual_time import lateness, now, run_virtually

TOKEN_S = 0.01
STALL = (2.0, 7.0)


def asks(count: int, max_tokens: int = 10) -> list[Ask]:
    return [Ask("hello", max_tokens, seed) for seed in range(count)]


class Server:
    """Serves any number of requests at a token per 10 ms, and none from second 2 to second 7."""

    def __init__(self, stalls: bool) -> None:
        self.stalls = stalls
        self.busy = 0
        self.most_busy = 0
        self.starts: list[float] = []

    async def send(self, ask: Ask, sample: Sample) -> None:
        self.starts.append(now())
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        for _ in range(ask.max_tokens):
            if self.stalls and STALL[0] <= now() < STALL[1]:
                await asyncio.sleep(STALL[1] - now())
            await asyncio.sleep(TOKEN_S)
            sample.outputs.append((now(), 1))
        self.busy -= 1


def in_open_loop(server: Server, times: list[float]) -> Outcome:
    async def load() -> Outcome:
        return await run_open(asks(len(times)), times, server.send, now)

    return run_virtually(load())


def in_closed_loop(server: Server, count: int, concurrency: int) -> Outcome:
    async def load() -> Outcome:
        return await run_closed(asks(count), concurrency, server.send, now)

    return run_virtually(load())


def test_an_open_loop_sends_on_schedule_whatever_the_requests_before_do():
    server = Server(stalls=True)
    times = [0.1 * index for index in range(100)]
    in_open_loop(server, times)
    assert lateness(server.starts, times) < 1e-6
    assert server.most_busy > 40  # those that came during the stall were all sent


def test_times_count_from_when_a_request_was_due():
    """A sender that cannot keep up is late itself: that is in the latency, and told."""

    async def load() -> Outcome:
        async def late(seconds: float) -> None:
            await asyncio.sleep(seconds + 0.5)

        return await run_open(asks(3), [0.0, 0.1, 0.2], Server(stalls=False).send, now, late)

    run = to_run(run_virtually(load()))
    assert run.ttft_s == pytest.approx((TOKEN_S, 0.5 + TOKEN_S, 0.4 + TOKEN_S))
    assert run.send_lag_s == pytest.approx(0.5)


def test_a_stall_is_seen_in_an_open_loop_and_hidden_by_a_closed_one():
    """Coordinated omission: half of the requests were due during the stall, and waited. A closed loop would have sent one of them."""
    opened = to_run(in_open_loop(Server(stalls=True), [0.1 * index for index in range(100)]))
    closed = to_run(in_closed_loop(Server(stalls=True), 100, 1))
    # 50 of 100 took 0.1 s, the others that and what was left of the stall: evenly from 5 s down to nothing.
    assert mean(opened.e2e_s) == pytest.approx(0.1 + 0.5 * 2.5, abs=0.05)
    assert percentile(opened.e2e_s, 90) == pytest.approx(0.1 + 4.0, abs=0.1)
    assert percentile(closed.e2e_s, 90) == pytest.approx(0.1)


def test_a_closed_loop_keeps_as_many_under_way_as_it_is_told():
    server = Server(stalls=False)
    outcome = in_closed_loop(server, 12, 4)
    assert server.most_busy == 4
    assert [sample.ask.seed for sample in outcome.samples] == list(range(12))
    run = to_run(outcome)
    assert run.output_per_s == pytest.approx(4 / TOKEN_S)
    assert run.steady_per_s == pytest.approx(4 / TOKEN_S)


def test_tokens_per_second_with_all_places_busy_leave_out_the_end_when_some_have_nothing_to_do():
    """Two places, one long request and one short one: 200 tokens per second while both run, fewer over the whole."""

    async def load() -> Outcome:
        return await run_closed([Ask("a", 100, 0), Ask("b", 10, 1)], 2, Server(stalls=False).send, now)

    run = to_run(run_virtually(load()))
    assert run.steady_per_s == pytest.approx(2 / TOKEN_S)
    assert run.output_per_s == pytest.approx(110 / 1.0)


@pytest.mark.parametrize(("error", "reason"), [(Overloaded("full", 1.0), "OVERLOADED"), (TimeoutError(), "DEADLINE_EXCEEDED")])
def test_a_failed_request_is_counted_and_in_no_latency(error: Exception, reason: str):
    good = Server(stalls=False)

    async def send(ask: Ask, sample: Sample) -> None:
        if ask.seed % 2:
            sample.outputs.append((now(), 1))
            raise error
        await good.send(ask, sample)

    async def load(run: Callable[[], Awaitable[Outcome]]) -> Outcome:
        return await run()

    for run_load in (lambda: run_closed(asks(6), 2, send, now), lambda: run_open(asks(6), [0.0] * 6, send, now)):
        run = to_run(run_virtually(load(run_load)))
        assert run.errors == {reason: 3}
        assert len(run.e2e_s) == len(run.ttft_s) == 3
        assert run.requests_per_s * run.duration_s == pytest.approx(3)
        assert run.output_per_s * run.duration_s == pytest.approx(3 * 10 + 3)


def test_time_per_token_leaves_out_what_came_with_the_first_output():
    async def send(ask: Ask, sample: Sample) -> None:
        for count in (3, 2, 4):
            await asyncio.sleep(0.6)
            sample.outputs.append((now(), count))

    async def load() -> Outcome:
        return await run_closed(asks(1), 1, send, now)

    run = to_run(run_virtually(load()))
    assert run.tpot_s == pytest.approx((1.2 / 6,))
    assert run.gap_s == pytest.approx((0.6, 0.6))
    assert run.ttft_s == pytest.approx((0.6,))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_arrivals_have_the_rate_and_the_burstiness_that_were_asked_for(burstiness: float):
    """20,000 gaps: mean and coefficient of variation within five standard errors; false alarms below 1e-5 for the three together."""
    count, rate = 20_001, 8.0
    times = arrival_times(count, rate, burstiness, Random(7))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    variation = burstiness**-0.5
    assert times[0] == 0.0
    assert len(times) == count
    assert mean(gaps) * rate == pytest.approx(1.0, abs=5 * variation / len(gaps) ** 0.5)
    # The standard error of the coefficient of variation, for gamma: sqrt((1 + 1/k) / 2n) * cv, and some for the skew.
    assert stdev(gaps) / mean(gaps) == pytest.approx(variation, rel=5 * ((1 + 3 / burstiness) / (2 * len(gaps))) ** 0.5)


def test_the_test_of_arrivals_would_notice_another_burstiness():
    """Negative control: arrivals of burstiness 1 are not those of 1.2."""
    times = arrival_times(20_001, 8.0, 1.2, Random(7))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert abs(stdev(gaps) / mean(gaps) - 1.0) > 5 * (4 / (2 * len(gaps))) ** 0.5


def test_the_same_seed_gives_the_same_arrivals_and_an_infinite_rate_none_between():
    assert arrival_times(50, 3.0, 1.0, Random(1)) == arrival_times(50, 3.0, 1.0, Random(1))
    assert arrival_times(50, 3.0, 1.0, Random(1)) != arrival_times(50, 3.0, 1.0, Random(2))
    assert arrival_times(3, float("inf"), 1.0, Random(1)) == [0.0, 0.0, 0.0]
