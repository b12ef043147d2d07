import asyncio
from contextlib import closing, suppress
from typing import Any

import pytest

from shared.rpc.patience import Patience
from tests.support.virtual_time import run_virtually


async def _wait(seconds: float, waits: list[asyncio.Event]) -> str:
    with closing(Patience(seconds)) as patience:
        for event in waits:
            try:
                with patience:
                    await event.wait()
            except TimeoutError:
                return "too long"
    return "done"


async def _fail_after(seconds: float) -> None:
    """Fails earlier if it is cancelled, and does not say that it was."""
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(seconds)
    raise ConnectionError


def _num_cancels() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


def test_a_wait_that_never_ends_is_ended_when_its_time_is_over() -> None:
    async def work() -> float:
        loop = asyncio.get_running_loop()
        with closing(Patience(5.0)) as patience:
            await asyncio.sleep(3.0)
            began = loop.time()
            with pytest.raises(TimeoutError), patience:
                await asyncio.Event().wait()
            return loop.time() - began

    assert run_virtually(work()) == pytest.approx(5.0)


def test_between_waits_there_is_all_the_time_in_the_world() -> None:
    async def work() -> None:
        with closing(Patience(5.0)) as patience:
            with patience:
                await asyncio.sleep(1.0)
            await asyncio.sleep(500.0)
            with patience:
                await asyncio.sleep(1.0)

    run_virtually(work())


def test_the_time_is_that_of_one_wait_not_of_all() -> None:
    async def work() -> None:
        with closing(Patience(5.0)) as patience:
            for _ in range(12):
                with patience:
                    await asyncio.sleep(4.9)

    run_virtually(work())


def test_a_wait_that_failed_is_over_too() -> None:
    """What follows, such as a stream's last words, is not cancelled for it."""

    async def work() -> None:
        with closing(Patience(5.0)) as patience:
            with pytest.raises(ConnectionError), patience:
                await _fail_after(4.0)
            await asyncio.sleep(60.0)

    run_virtually(work())


def test_each_wait_has_its_limit_also_after_one_that_was_too_long() -> None:
    async def work() -> int:
        with closing(Patience(5.0)) as patience:
            for _ in range(3):
                with pytest.raises(TimeoutError), patience:
                    await asyncio.sleep(60.0)
            return _num_cancels()

    assert run_virtually(work()) == 0


def test_a_wait_that_ends_otherwise_when_it_is_cancelled_leaves_no_cancellation_behind() -> None:
    async def work() -> int:
        with closing(Patience(5.0)) as patience, pytest.raises(ConnectionError), patience:
            await _fail_after(60.0)
        return _num_cancels()

    assert run_virtually(work()) == 0


async def test_a_cancellation_from_outside_stays_one() -> None:
    task = asyncio.create_task(_wait(60.0, [asyncio.Event()]))
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_cancellation_from_outside_at_the_same_time_is_not_lost() -> None:
    async def work() -> None:
        task = asyncio.create_task(_wait(5.0, [asyncio.Event()]))
        asyncio.get_running_loop().call_later(5.0, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtually(work())


def test_one_timer_does_for_many_waits_and_does_not_stay_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> list[asyncio.TimerHandle]:
        loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
        call_later = loop.call_later

        def note(*args: Any) -> asyncio.TimerHandle:
            timers.append(call_later(*args))
            return timers[-1]

        monkeypatch.setattr(loop, "call_later", note)
        event = asyncio.Event()
        event.set()
        assert await _wait(5.0, [event] * 1000) == "done"
        return timers

    (timer,) = run_virtually(work())
    assert timer.cancelled()


async def test_after_it_has_ended_a_wait_its_task_goes_on() -> None:
    assert await _wait(0.01, [asyncio.Event()]) == "too long"
    assert _num_cancels() == 0
    event = asyncio.Event()
    event.set()
    await asyncio.wait_for(event.wait(), 60)
