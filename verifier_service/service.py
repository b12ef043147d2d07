"""The engine as the event loop sees it: requests are streams, links are callbacks. It owns both directions of the crossing between
the loop and the engine thread, and knows no gRPC, no text and no tensor."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

from shared.engine.thread import EngineThread
from shared.errors import EngineFailure, HandshakeRefused, InvalidRequest, Overloaded, Unavailable
from shared.link import PROTOCOL_REVISION, Hello, StepBatch
from verifier_service.delivery import AT_ONCE, Delivery
from verifier_service.engine import Engine, StepOutput
from verifier_service.inbox import Frame, Inbox
from verifier_service.info import DrafterInfo, RefusedDrafter
from verifier_service.request import Emission, Request
from verifier_service.stats import LinkCounters, StepStats
from verifier_service.turnover import Turnover

_MAX_REFUSED = 16
# Far more than any drafter sends during a step; a drafter that sends more than the engine takes is not waited for.
_MAX_WAITING_FRAMES = 1024
_MAX_WAITING_IDS = 1 << 20

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Link:
    """An attached draft service, on the loop's side."""

    hello: Hello
    on_batch: Callable[[StepBatch], None]
    on_close: Callable[[str], None]
    inbox: Inbox = field(default_factory=lambda: Inbox(_MAX_WAITING_FRAMES, _MAX_WAITING_IDS))


class Verifier:
    """All requests and links of a verifier. Its methods are called on the event loop only.

    Args:
        tokenizer_fingerprint: of the target.
        max_queue: requests that may wait beyond those that run.
        max_running: requests that run at once.
        clock: monotonic seconds, the engine's.
        on_stats: takes the numbers of each step.
        on_round_trip: takes the round trip of a link's heartbeat, in seconds.
        on_crash: the engine thread has ended by itself: nothing will be served any more.
    """

    def __init__(
        self,
        tokenizer_fingerprint: str,
        max_queue: int,
        max_running: int,
        clock: Callable[[], float],
        on_stats: Callable[[StepStats], None],
        on_round_trip: Callable[[float], None],
        on_crash: Callable[[], None],
    ) -> None:
        self._fingerprint = tokenizer_fingerprint
        self._max_live = max_running + max_queue
        self._clock = clock
        self._on_stats = on_stats
        self._on_round_trip = on_round_trip
        self._on_crash = on_crash
        self._streams: dict[int, asyncio.Queue[Emission]] = {}
        self._delivery = Delivery(self._give)
        self._has_held = False  # the engine thread's: whether its last step gave more than is delivered at once
        self._request_ids: set[str] = set()
        self._next_number = itertools.count(1)
        self._links: dict[int, _Link] = {}
        self._next_link = itertools.count(1)
        self._refused: deque[RefusedDrafter] = deque(maxlen=_MAX_REFUSED)
        self._crashed = False
        self._turnover = Turnover(clock)

    def start(self, build: Callable[[Callable[[int, StepBatch], None], Callable[[], None]], Engine]) -> None:
        """Starts the engine thread.

        Args:
            build: makes the engine, given where its batches for drafters go and what it calls when the model is about to run.
        """
        self._loop = asyncio.get_running_loop()
        self._engine = build(self._tell_from_thread, self._release_from_thread)
        self._thread: EngineThread[StepOutput] = EngineThread(
            self._engine,
            self._deliver_from_thread,
            lambda error: self._post_to_loop(self._crash),
            self._clock,
            "verifier-engine",
        )
        self._thread.start()

    @property
    def num_live(self) -> int:
        """Requests that wait or run."""
        return len(self._streams)

    @property
    def has_crashed(self) -> bool:
        """Whether the engine thread has ended by itself."""
        return self._crashed

    @property
    def engine_age_s(self) -> float:
        """Seconds since the engine thread last showed itself."""
        return self._thread.age_s

    @asynccontextmanager
    async def open(self, request: Request) -> AsyncGenerator[AsyncIterator[Emission], None]:
        """A request for as long as the context lives; leaving it, however, ends the request and frees its blocks.

        Raises:
            Overloaded: too many requests wait already.
            Unavailable: the engine is dead.
            InvalidRequest: a live request has this id.
        """
        if self._crashed:
            raise Unavailable("ENGINE_STALLED", "the engine has stopped", retry_after_s=10.0)
        if len(self._streams) >= self._max_live:
            raise Overloaded(f"{len(self._streams)} requests are running or waiting already", self._turnover.refuse())
        if request.request_id in self._request_ids:
            raise InvalidRequest("request_id", "a request of this id is running")
        if not self._streams:
            self._turnover.begin()
        number = next(self._next_number)
        stream = self._streams[number] = asyncio.Queue()
        self._request_ids.add(request.request_id)
        self._thread.post(lambda: self._submit(number, request))
        try:
            yield _emissions(stream)
        finally:
            del self._streams[number]
            self._turnover.end()
            self._request_ids.remove(request.request_id)
            # Of a request that has ended by itself the engine knows nothing any more, and does nothing.
            self._thread.post(lambda: self._engine.cancel(number))

    async def close(self) -> None:
        """Ends the engine thread, after the step it is in."""
        await asyncio.to_thread(self._thread.stop)

    def attach(self, hello: Hello, on_batch: Callable[[StepBatch], None], on_close: Callable[[str], None]) -> int:
        """Attaches a draft service; of one instance the newest stream wins.

        Args:
            hello: how it introduced itself.
            on_batch: takes what it is to be told, on the event loop.
            on_close: called at most once, on the event loop, with the reason, when the verifier ends the link.

        Returns:
            Number of the link, never reused.

        Raises:
            HandshakeRefused: it cannot serve this verifier; the text says why.
        """
        reason = self._reason_to_refuse(hello)
        if reason is not None:
            self._refused.append(RefusedDrafter(hello.instance_id, hello.name, reason))
            raise HandshakeRefused(reason)
        for number, other in list(self._links.items()):
            if other.hello.instance_id == hello.instance_id:
                self._close(number, "a newer stream of the same instance has attached")
        link = next(self._next_link)
        self._links[link] = _Link(hello, on_batch, on_close)
        self._post_for(link, lambda: self._engine.speculation.attach(link, hello, self._clock()))
        return link

    def receive(self, link: int, frame: Frame) -> None:
        """Hands a well-formed frame to the engine, which takes all that has come once per step. Too many of them end the link."""
        known = self._links.get(link)
        if known is None:
            return
        is_first = known.inbox.put(frame, self._clock())
        if is_first is None:
            self._close(link, "the draft service sends more than is taken")
        elif is_first:
            self._post_for(link, lambda: self._take(link, known.inbox))

    def reject(self, link: int, reason: str) -> None:
        """Counts a malformed proposal."""
        self._post_for(link, lambda: self._engine.speculation.reject(link, reason))

    def observe_round_trip(self, link: int, seconds: float) -> None:
        """Takes note of a heartbeat's round trip."""
        del link
        self._on_round_trip(seconds)

    def detach(self, link: int) -> None:
        """The link is gone. Its sequences are handed to others; no request notices. Detaching twice does nothing."""
        if self._links.pop(link, None) is not None:
            self._post_for(link, lambda: self._engine.speculation.detach(link, self._clock()))

    def drafters(self) -> tuple[DrafterInfo, ...]:
        """The attached draft services. Read beside the running engine: each number is right, together they may be a step apart."""
        return tuple(
            DrafterInfo(drafter.hello.instance_id, drafter.hello.name, drafter.capacity, len(drafter.sequences), drafter.suspended_until is not None)
            for drafter in self._engine.speculation.drafters
        )

    def refused_drafters(self) -> tuple[RefusedDrafter, ...]:
        """Those turned away since the start, newest last."""
        return tuple(self._refused)

    def link_counters(self) -> dict[int, LinkCounters]:
        """Counters per attached link, and under 0 those of the links that are gone."""
        speculation = self._engine.speculation
        return {0: speculation.gone, **{drafter.link: drafter.counters for drafter in speculation.drafters}}

    def _reason_to_refuse(self, hello: Hello) -> str | None:
        if hello.protocol_revision != PROTOCOL_REVISION:
            return f"it speaks revision {hello.protocol_revision} of the protocol, this verifier {PROTOCOL_REVISION}"
        if hello.tokenizer_fingerprint not in ("", self._fingerprint):
            return "its tokenizer is not the target's: the fingerprints differ"
        return None

    def _close(self, link: int, reason: str) -> None:
        known = self._links.get(link)
        if known is not None:
            self.detach(link)
            known.on_close(reason)

    def _submit(self, number: int, request: Request) -> None:
        try:
            self._engine.submit(number, request)
        except Exception:  # the command's boundary: a request that cannot be taken in fails alone
            _log.exception("request failed before its first step", request_id=request.request_id)
            self._post_to_loop(self._fail, number, request.request_id)

    def _take(self, link: int, inbox: Inbox) -> None:
        for frame, arrived in inbox.take():
            # Between two steps the end of the last one lies before every arrival: only what came while it ran is older than its end.
            self._engine.speculation.receive(link, frame, arrived, overlapped=arrived < self._engine.last_step_ended)

    def _post_for(self, link: int, command: Callable[[], None]) -> None:
        """Posts what a link has led to."""

        def run() -> None:
            try:
                command()
            except Exception:  # the command's boundary: a fault in dealing with a link ends that link
                _log.exception("link failed", link=link)
                self._post_to_loop(self._close, link, "the verifier could not deal with what this link has sent")

        self._thread.post(run)

    def _fail(self, number: int, request_id: str) -> None:
        self._give(number, Emission(request_id, error=EngineFailure("the request could not be taken in")))

    def _post_to_loop(self, callback: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def _tell_from_thread(self, link: int, batch: StepBatch) -> None:
        self._post_to_loop(self._tell, link, batch)

    def _tell(self, number: int, batch: StepBatch) -> None:
        link = self._links.get(number)
        if link is not None:
            link.on_batch(batch)

    def _deliver_from_thread(self, output: StepOutput) -> None:
        self._has_held = len(output.emissions) > AT_ONCE
        self._post_to_loop(self._deliver, output)

    def _release_from_thread(self) -> None:
        if self._has_held:
            self._has_held = False
            self._post_to_loop(self._delivery.release)

    def _deliver(self, output: StepOutput) -> None:
        self._delivery.add(output.emissions)
        self._loop.call_soon(self._on_stats, output.stats)

    def _give(self, number: int, emission: Emission) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            stream.put_nowait(emission)

    def _crash(self) -> None:
        self._crashed = True
        # Behind what was computed before: a request that is complete has not failed.
        self._delivery.add((number, Emission("", error=EngineFailure("the engine has stopped"))) for number in self._streams)
        self._on_crash()


async def _emissions(stream: asyncio.Queue[Emission]) -> AsyncIterator[Emission]:
    while True:
        emission = await stream.get()
        yield emission
        if emission.finish is not None or emission.error is not None:
            return
