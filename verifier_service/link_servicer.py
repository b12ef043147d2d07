"""`LinkService` over gRPC: one attached draft service per stream. It owns a stream's manners (handshake, heartbeats, bounds), not the
meaning of what crosses it."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import grpc
import structlog
from outrider.v1 import link_pb2, link_pb2_grpc

from shared.errors import OutriderError, ProtocolViolation, Unavailable
from shared.link import Capacity, Decline, FromVerifier, Goodbye, Heartbeat, Hello, ProposalBatch, Resync, StepBatch, Welcome
from shared.rpc.convert_link import MalformedFrame, from_speculate_request
from shared.rpc.convert_step import to_speculate_responses
from shared.rpc.interceptors import current_call
from shared.rpc.server import add_to_running
from verifier_service.outbox import Outbox

# The file that declares the service has to be loaded for reflection to know it.
SERVICE_NAME = link_pb2.DESCRIPTOR.services_by_name["LinkService"].full_name
# Nothing heard, or nothing taken, for this long ends a link. The second is the interceptor's write timeout of the link's server.
SILENCE_S = 5.0
_HEARTBEAT_S = 1.0
_OUTBOX_BYTES = 8 << 20
_SMALL_FRAME_BYTES = 64 << 10  # a larger one is parsed beside the event loop: that may take a second
_MAX_BAD_FRAMES = 16  # within a minute
_BAD_FRAMES_S = 60.0

_log = structlog.stdlib.get_logger(__name__)


class Links(Protocol):
    """What the attached draft services work for."""

    def attach(self, hello: Hello, on_batch: Callable[[StepBatch], None], on_close: Callable[[str], None]) -> int:
        """Number of the new link; both callbacks run on the event loop. Raises HandshakeRefused."""
        ...

    def receive(self, link: int, frame: ProposalBatch | Decline | Capacity | Resync) -> None:
        """A well-formed frame."""

    def reject(self, link: int, reason: str) -> None:
        """A malformed one, by the kind of its fault."""

    def observe_round_trip(self, link: int, seconds: float) -> None:
        """A heartbeat came back."""

    def detach(self, link: int) -> None:
        """The link is gone. May be called twice."""


class LinkServicer(link_pb2_grpc.LinkServiceServicer):
    """Where draft services attach. Calls must come through a `CallInterceptor` with a write timeout of `SILENCE_S`.

    Args:
        links: the engine.
        welcome: the limits that draft services are told.
        silence_s: a link from which nothing was heard for this long ends.
        heartbeat_s: time between heartbeats.
        outbox_bytes: most that may be pending for a link; more ends it.
        clock: monotonic seconds.
        on_bytes: told the direction (`received` or `sent`), the kind (the name of the frame's arm) and the size of each message.
    """

    def __init__(
        self,
        links: Links,
        welcome: Welcome,
        silence_s: float = SILENCE_S,
        heartbeat_s: float = _HEARTBEAT_S,
        outbox_bytes: int = _OUTBOX_BYTES,
        clock: Callable[[], float] = time.monotonic,
        on_bytes: Callable[[str, str, int], None] = lambda _direction, _kind, _size: None,
    ) -> None:
        self._links = links
        self._welcome = welcome
        self._silence_s = silence_s
        self._heartbeat_s = heartbeat_s
        self._outbox_bytes = outbox_bytes
        self._clock = clock
        self._on_bytes = on_bytes
        self._sessions: set[_Session] = set()

    def serve_on(self, server: grpc.aio.Server) -> None:
        """Take this service's calls on a server that runs already."""
        add_to_running(link_pb2_grpc.add_LinkServiceServicer_to_server, self, server)

    def end_links(self) -> None:
        """Say goodbye on every link."""
        for session in self._sessions:
            session.close("the verifier is shutting down")

    async def Speculate(  # noqa: N802  # the name is the proto's
        self, request_iterator: AsyncIterator[link_pb2.SpeculateRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[link_pb2.SpeculateResponse]:
        """An attached draft service; see link.proto."""
        del context
        messages = aiter(request_iterator)
        hello = await self._read_hello(messages)
        session = _Session(self._links, Outbox(self._outbox_bytes), self._silence_s, self._heartbeat_s, self._clock, self._on_bytes)
        link = self._links.attach(hello, session.tell, session.close)
        session.link = link
        self._sessions.add(session)
        current_call().fields.update(link=link, drafter=hello.name, instance=hello.instance_id)
        _log.info("drafter attached", link=link, drafter=hello.name, instance=hello.instance_id, capacity=hello.capacity)
        reader = asyncio.create_task(session.read(messages))
        try:
            frame: FromVerifier | None = self._welcome
            while frame is not None:
                for message in to_speculate_responses(frame):
                    yield message
                    self._on_bytes("sent", message.WhichOneof("frame") or "", message.ByteSize())
                frame = await session.next_frame()
        finally:
            self._links.detach(link)
            self._sessions.discard(session)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            _log.info("drafter detached", link=link, drafter=hello.name, instance=hello.instance_id)

    async def _read_hello(self, messages: AsyncIterator[link_pb2.SpeculateRequest]) -> Hello:
        try:
            async with asyncio.timeout(self._silence_s):
                frame = from_speculate_request(await anext(messages))
        except TimeoutError:
            raise Unavailable("LINK_SILENT", f"no hello for {self._silence_s:g} seconds") from None
        except StopAsyncIteration:
            raise ProtocolViolation("the stream ended before a hello") from None
        if not isinstance(frame, Hello):
            raise ProtocolViolation("the first frame must be hello")
        return frame


class _Session:
    """One link: what is to be sent, what was heard. Lives on the event loop."""

    def __init__(
        self,
        links: Links,
        outbox: Outbox,
        silence_s: float,
        heartbeat_s: float,
        clock: Callable[[], float],
        on_bytes: Callable[[str, str, int], None],
    ) -> None:
        self.link = 0
        self._links = links
        self._outbox = outbox
        self._silence_s = silence_s
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._on_bytes = on_bytes
        self._heard_at = clock()
        self._next_beat = clock() + heartbeat_s
        self._beat_ns = 0  # of the heartbeat that is not answered yet
        self._to_answer: Heartbeat | None = None
        self._bad_frames: deque[float] = deque(maxlen=_MAX_BAD_FRAMES)
        self._goodbye: Goodbye | None = None
        self._peer_is_done = False
        self._failure: BaseException | None = None
        self._news = asyncio.Event()

    def tell(self, batch: StepBatch) -> None:
        """A step for the draft service."""
        try:
            self._outbox.add(batch)
        except OutriderError as error:
            self._fail(error)
        if self._outbox.overflowed:
            self._links.detach(self.link)  # at once: a write may hold the stream for seconds yet
        self._news.set()

    def close(self, reason: str) -> None:
        """The verifier ends the link."""
        self._goodbye = Goodbye(reason)
        self._news.set()

    async def next_frame(self) -> FromVerifier | None:
        """What to send next; None after the last.

        Raises:
            Unavailable: the draft service is silent, or does not take what it is sent.
            ProtocolViolation: it does not keep to the protocol.
        """
        while True:
            self._news.clear()
            now = self._clock()
            if self._failure is not None:
                raise self._failure
            if self._outbox.overflowed:
                raise Unavailable("SLOW_READER", "more is waiting to be sent than may wait")
            if self._peer_is_done:
                return None
            if (frame := self._due(now)) is not None:
                return frame
            silent_at = self._heard_at + self._silence_s
            if now >= silent_at:
                raise Unavailable("LINK_SILENT", f"nothing was heard for {self._silence_s:g} seconds")
            try:
                async with asyncio.timeout(min(silent_at, self._next_beat) - now):
                    await self._news.wait()
            except TimeoutError:
                continue

    def _due(self, now: float) -> FromVerifier | None:
        if self._goodbye is not None:
            self._peer_is_done = True
            return self._goodbye
        if self._to_answer is not None:
            answer, self._to_answer = Heartbeat(self._to_answer.sent_ns, reply=True), None
            return answer
        if now >= self._next_beat:
            self._next_beat, self._beat_ns = now + self._heartbeat_s, int(now * 1e9)
            return Heartbeat(self._beat_ns, reply=False)
        return self._outbox.take()

    async def read(self, messages: AsyncIterator[link_pb2.SpeculateRequest]) -> None:
        """Takes what the draft service sends until it ends."""
        try:
            async for message in messages:
                self._heard_at = self._clock()
                size = message.ByteSize()
                goes_on = await self._take(message, size)
                self._on_bytes("received", message.WhichOneof("frame") or "", size)
                if not goes_on:
                    break
        except Exception as error:  # the task's boundary: the stream's own task raises it
            self._fail(error)
        self._peer_is_done = True
        self._news.set()

    async def _take(self, message: link_pb2.SpeculateRequest, size: int) -> bool:
        """Whether more may follow."""
        try:
            is_small = size <= _SMALL_FRAME_BYTES
            frame = from_speculate_request(message) if is_small else await asyncio.to_thread(from_speculate_request, message)
        except MalformedFrame as error:
            self._count_bad_frame(error)
            return True
        match frame:
            case Hello():
                raise ProtocolViolation("a second hello")
            case Goodbye():
                _log.info("drafter says goodbye", link=self.link, reason=frame.reason)
                return False
            case Heartbeat(reply=True):
                if frame.sent_ns == self._beat_ns:  # nothing else is an answer to anything
                    self._links.observe_round_trip(self.link, self._heard_at - self._beat_ns / 1e9)
                    self._beat_ns = 0
            case Heartbeat():
                self._to_answer = frame  # only the last is answered: a flood of them is not worth memory
                self._news.set()
            case ProposalBatch() | Decline() | Capacity() | Resync():
                self._links.receive(self.link, frame)
        return True

    def _count_bad_frame(self, error: MalformedFrame) -> None:
        self._links.reject(self.link, error.tag)
        self._bad_frames.append(self._heard_at)
        if len(self._bad_frames) == _MAX_BAD_FRAMES and self._heard_at - self._bad_frames[0] <= _BAD_FRAMES_S:
            raise ProtocolViolation(f"{_MAX_BAD_FRAMES} malformed frames within {_BAD_FRAMES_S:g} seconds; the last: {error}")

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._news.set()
