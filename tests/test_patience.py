import asyncio

import pytest

from shared.rpc.patience import Patience


async def _wait(seconds: float, waits: list[asyncio.Event]) -> str:
    with Patience(seconds) as patience:
        for event in waits:
            patience.starts()
            try:
                await event.wait()
            except asyncio.CancelledError:
                if patience.has_ended:
                    return "too long"
                raise
            patience.stops()
    return "done"


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


async def test_a_wait_that_never_ends_is_ended() -> None:
    assert await _wait(0.01, [_set(), asyncio.Event()]) == "too long"


async def test_waits_that_end_are_left_alone() -> None:
    assert await _wait(0.01, [_set()] * 1000) == "done"


async def test_between_waits_there_is_all_the_time_in_the_world() -> None:
    with Patience(0.01) as patience:
        patience.starts()
        patience.stops()
        later = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, later.set)
        await later.wait()
        assert not patience.has_ended


async def test_the_time_is_that_of_one_wait_not_of_all() -> None:
    loop = asyncio.get_running_loop()
    with Patience(0.5) as patience:
        for _ in range(12):
            patience.starts()
            event = asyncio.Event()
            loop.call_later(0.05, event.set)
            await event.wait()
            patience.stops()


async def test_a_cancellation_from_outside_stays_one() -> None:
    task = asyncio.create_task(_wait(60.0, [asyncio.Event()]))
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_after_it_has_ended_a_wait_its_task_goes_on() -> None:
    assert await _wait(0.01, [asyncio.Event()]) == "too long"
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.wait_for(_set().wait(), 60)
