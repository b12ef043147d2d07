"""The thread that runs an engine: commands, and who waits for whom."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
import torch

from shared.engine.thread import EngineThread, before_engine
from shared.errors import UnsupportedModel


class _Asked:
    """Always has work that is not due yet; answers when it is due only once it is allowed to."""

    has_work = True

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.answered_late = False
        self.steps = 0

    def wait_until(self, now: float) -> float:
        self.asked.set()
        self.answered_late |= not self.may_answer.wait(30)
        return now + 3600

    def step(self, now: float) -> None:
        self.steps += 1


def _run(engine: _Asked) -> tuple[EngineThread[None], list[BaseException]]:
    crashes: list[BaseException] = []
    thread: EngineThread[None] = EngineThread(engine, lambda _: None, crashes.append, time.monotonic, "test-engine")
    thread.start()
    return thread, crashes


def test_whoever_posts_does_not_wait_while_the_engine_thinks_about_waiting():
    engine = _Asked()
    thread, crashes = _run(engine)
    assert engine.asked.wait(30)
    done = threading.Event()
    thread.post(done.set)  # returns while `wait_until` is under way, or that gives up
    engine.may_answer.set()
    assert done.wait(30), "a command posted meanwhile is not slept over"
    thread.stop()
    assert not engine.answered_late
    assert (engine.steps, crashes) == (0, [])


def test_commands_run_in_the_order_they_were_posted():
    engine = _Asked()
    engine.may_answer.set()
    thread, crashes = _run(engine)
    order: list[int] = []
    done = threading.Event()

    def note(number: int) -> Callable[[], None]:
        return lambda: order.append(number)

    for number in range(100):
        thread.post(note(number))
    thread.post(done.set)
    assert done.wait(30)
    thread.stop()
    assert order == list(range(100))
    assert crashes == []


def test_what_comes_before_the_engine_leaves_no_thread_that_has_computed():
    used: list[threading.Thread] = []

    def load() -> int:
        used.append(threading.current_thread())
        return int(torch.arange(3).sum())

    assert asyncio.run(before_engine(load)) == 3
    used[0].join(30)
    assert not used[0].is_alive(), "its OpenMP team would keep the engine's from waiting awake"


def test_what_fails_before_the_engine_is_told_and_leaves_no_thread():
    used: list[threading.Thread] = []

    def load() -> None:
        used.append(threading.current_thread())
        raise UnsupportedModel("no such model")

    with pytest.raises(UnsupportedModel, match="no such model"):
        asyncio.run(before_engine(load))
    used[0].join(30)
    assert not used[0].is_alive()
