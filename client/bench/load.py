"""Sends requests, on a schedule or a fixed number at a time, and notes when what came. It knows no network: who sends is passed in.

In an open loop every request is sent when it is due, whatever the others do, and its times count from when it was due: a stall
of the service is felt by all who would have come meanwhile, and is not hidden by a client that waits (coordinated omission, Tene).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from client.bench.prompts import Ask
from shared.errors import OutriderError

DEADLINE = "DEADLINE_EXCEEDED"


@dataclass(slots=True)
class Sample:
    """What became of one request. Times are seconds on the load's clock.

    Args:
        ask: the request.
        intended_at: when it was to start.
        sent_at: when it did.
        outputs: (time, number of new tokens) of every output that had some.
        ended_at: when it was over.
        token_ids: all tokens.
        prompt_ids: the prompt as the service understood it.
        rounds: verifications with guesses, as the service counted them.
        drafted: guesses scored.
        accepted: of those, the accepted ones.
        error: why it failed; empty if it did not.
    """

    ask: Ask
    intended_at: float
    sent_at: float = 0.0
    outputs: list[tuple[float, int]] = field(default_factory=list)
    ended_at: float = 0.0
    token_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    error: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens that came."""
        return sum(count for _, count in self.outputs)


class Send(Protocol):
    """Sends one request and fills in its sample, up to its end; the times of start and end are not its business."""

    def __call__(self, ask: Ask, sample: Sample) -> Awaitable[None]:
        """Returns when the request is over.

        Raises:
            OutriderError: it failed.
            TimeoutError: its deadline passed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """All samples of a load, and when it was whole.

    Args:
        samples: in the order of the requests.
        began_at: start of the load.
        ended_at: end of its last request.
        whole: from when to when all of a closed loop's places were busy producing tokens; None in an open loop.
    """

    samples: tuple[Sample, ...]
    began_at: float
    ended_at: float
    whole: tuple[float, float] | None = None


async def run_closed(asks: Sequence[Ask], concurrency: int, send: Send, clock: Callable[[], float]) -> Outcome:
    """Keeps `concurrency` requests under way until all are done: a request starts when another one has ended."""
    began_at = clock()
    samples: list[Sample] = []
    idle_at: list[float] = []
    left = iter(asks)

    async def keep_busy(left: Iterator[Ask]) -> None:
        for ask in left:
            sample = Sample(ask, clock())
            samples.append(sample)
            await _one(sample, send, clock)
        idle_at.append(clock())

    async with asyncio.TaskGroup() as places:
        for _ in range(min(concurrency, len(asks))):
            places.create_task(keep_busy(left))
    firsts = [sample.outputs[0][0] if sample.outputs else sample.ended_at for sample in samples[:concurrency]]
    return Outcome(tuple(samples), began_at, clock(), (max(firsts), min(idle_at)))


async def run_open(
    asks: Sequence[Ask], offsets: Sequence[float], send: Send, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> Outcome:
    """Sends each request at its time.

    Args:
        asks: the requests.
        offsets: ascending seconds from the start of the load, one per request.
        send: sends one.
        clock: monotonic seconds.
        sleep: takes seconds.
    """
    began_at = clock()
    samples = [Sample(ask, began_at + offset) for ask, offset in zip(asks, offsets, strict=True)]
    async with asyncio.TaskGroup() as sent:
        for sample in samples:
            if (ahead := sample.intended_at - clock()) > 0:
                await sleep(ahead)
            sent.create_task(_one(sample, send, clock))
    return Outcome(tuple(samples), began_at, clock())


async def _one(sample: Sample, send: Send, clock: Callable[[], float]) -> None:
    sample.sent_at = clock()
    try:
        await send(sample.ask, sample)
    except OutriderError as error:
        sample.error = error.reason
    except TimeoutError:
        sample.error = DEADLINE
    sample.ended_at = clock()
