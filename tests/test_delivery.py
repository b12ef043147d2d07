"""Who gets its tokens when: on virtual time."""

import asyncio

from tests.support.virtual_time import run_virtually
from verifier_service.delivery import AT_ONCE, Delivery
from verifier_service.request import Emission

NUMBERS = range(3 * AT_ONCE)


def _emissions(*token_ids: int) -> list[tuple[int, Emission]]:
    return [(number, Emission(str(number), token_ids)) for number in NUMBERS]


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_the_first_few_are_served_at_once_and_the_others_when_the_model_runs() -> None:
    async def work() -> None:
        served: list[int] = []
        delivery = Delivery(lambda number, _: served.append(number))
        delivery.add(_emissions(5))
        assert served == []  # links first
        await _turns(5)
        assert served == list(NUMBERS[:AT_ONCE])
        delivery.release()
        assert served == list(NUMBERS[: 2 * AT_ONCE])
        await _turns(2)
        assert served == list(NUMBERS)

    run_virtually(work())


def test_where_the_model_has_nothing_to_do_the_others_are_served_soon() -> None:
    async def work() -> None:
        served: list[int] = []
        delivery = Delivery(lambda number, _: served.append(number))
        delivery.add(_emissions(5))
        await asyncio.sleep(0.019)
        assert served == list(NUMBERS[:AT_ONCE])
        await asyncio.sleep(0.002)
        assert served == list(NUMBERS)

    run_virtually(work())


def test_steps_do_not_overtake_one_another_and_nothing_is_given_twice() -> None:
    async def work() -> None:
        given: list[tuple[int, int]] = []
        delivery = Delivery(lambda number, emission: given.append((number, emission.token_ids[0])))
        for step in range(4):
            delivery.add(_emissions(step))
            await _turns(step)
            delivery.release()
        await asyncio.sleep(1.0)
        assert given == [(number, step) for step in range(4) for number in NUMBERS]

    run_virtually(work())
