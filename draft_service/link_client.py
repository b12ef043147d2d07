"""The draft service's end of the link: attaches, stays attached, carries frames both ways. It does not know what they mean."""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import structlog
from outrider.v1 import link_pb2, link_pb2_grpc

from shared.errors import HandshakeRefused, OutriderError, ProtocolViolation, Unavailable
from shared.link import MAX_PROPOSAL_TOKENS, FromDrafter, FromVerifier, Goodbye, Heartbeat, Hello, StepBatch, Welcome
from shared.merging import take_next
from shared.rpc.convert_link import to_speculate_request
from shared.rpc.convert_step import PieceJoiner
from shared.rpc.patience import Patience
from shared.rpc.status import from_rpc_error

# In the draft service's own health: whether it is attached.
LINK_SERVICE_NAME = link_pb2.DESCRIPTOR.services_by_name["LinkService"].full_name
_SILENCE_S = 5.0  # nothing heard for this long: the stream is dropped
_HEARTBEAT_S = 1.0
_FIRST_RETRY_S = 0.1
_MAX_RETRY_S = 5.0
_REFUSED, _LOADING = "refused", "loading"
# A verifier that loads is there and soon ready; one that refuses will do so until somebody changes something.
_FIXED_RETRY_S = {_REFUSED: 60.0, _LOADING: 0.5}

_KIND_OF_REASON = {"LINK_SILENT": "silent", "LOADING": _LOADING}

_Call = grpc.aio.StreamStreamCall[link_pb2.SpeculateRequest, link_pb2.SpeculateResponse]
_log = structlog.stdlib.get_logger(__name__)


class Drafting(Protocol):
    """What the link is for. Each method returns at once and takes effect in the order of the calls."""

    def attach(self, welcome: Welcome, send: Callable[[Sequence[FromDrafter]], None]) -> None:
        """A new link. `send` may be called on any thread; what comes of this link's batches goes there and nowhere else."""

    def apply(self, batch: StepBatch) -> None:
        """The verifier's word."""

    def reset(self) -> None:
        """The link is gone: forget all sequences."""


@dataclass(frozen=True, slots=True)
class LinkState:
    """Whether the draft service is attached; if not, why.

    Args:
        attached: it is.
        detached_reason: a sentence.
        kind: `goodbye`, `loading`, `lost`, `refused`, `silent` or `unreachable`; empty while attached.
    """

    attached: bool
    detached_reason: str = ""
    kind: str = ""


class LinkClient:
    """Keeps a draft service attached to a verifier, for ever.

    Args:
        channel: to the verifier's link address.
        hello: how the draft service introduces itself.
        drafting: gets what the verifier says.
        token: the link token, if the verifier wants one.
        rng: spreads the retries of many draft services.
        on_state: told each time that the link is attached or an attempt has ended.
        on_round_trip: told of each heartbeat's round trip, in seconds.
        silence_s: a verifier from which nothing was heard for this long is left.
        heartbeat_s: time between heartbeats.
        clock: monotonic seconds.
        sleep: waits between two attempts, seconds.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        hello: Hello,
        drafting: Drafting,
        token: str = "",
        rng: random.Random | None = None,
        on_state: Callable[[LinkState], None] = lambda _: None,
        on_round_trip: Callable[[float], None] = lambda _: None,
        silence_s: float = _SILENCE_S,
        heartbeat_s: float = _HEARTBEAT_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self._stub = link_pb2_grpc.LinkServiceStub(channel)
        self._hello = hello
        self._drafting = drafting
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._rng = rng or random.Random()
        self._on_state = on_state
        self._on_round_trip = on_round_trip
        self._silence_s = silence_s
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._sleep = sleep
        self._stopping = asyncio.Event()
        self._link: _OpenLink | None = None
        self.state = LinkState(False, "not attached yet")

    def stop(self) -> None:
        """Say goodbye and let `run` return."""
        self._stopping.set()
        if self._link is not None:
            self._link.say_goodbye()

    async def run(self) -> None:
        """Attach, and attach again whenever the link is lost, until `stop`."""
        retry_s = _FIRST_RETRY_S
        while not self._stopping.is_set():
            began = self._clock()
            kind, reason = await self._serve_one_link()
            if self.state.attached:
                self._drafting.reset()
                if self._clock() - began > _MAX_RETRY_S:  # else two processes of one instance id would throw each other out without a pause
                    retry_s = _FIRST_RETRY_S
            is_news = reason != self.state.detached_reason
            self._change_state(LinkState(False, reason, kind))
            if self._stopping.is_set():
                return
            delay_s = _FIXED_RETRY_S.get(kind) or retry_s * self._rng.uniform(0.5, 1.0)
            _log.log(logging.WARNING if is_news else logging.DEBUG, "not attached to the verifier", reason=reason, retry_s=round(delay_s, 3))
            retry_s = min(2 * retry_s, _MAX_RETRY_S)
            await self._pause(delay_s)

    async def _pause(self, delay_s: float) -> None:
        waits = [asyncio.ensure_future(self._sleep(delay_s)), asyncio.ensure_future(self._stopping.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _serve_one_link(self) -> tuple[str, str]:
        """One stream from hello to its end; returns the kind of its end, and why it ended."""
        call: _Call = self._stub.Speculate(metadata=self._metadata)
        link = self._link = _OpenLink(call, self._hello, self._heartbeat_s, self._clock)
        writer = asyncio.create_task(link.write_all())
        try:
            return "goodbye", await self._receive(call, link)
        except OutriderError as error:
            if self._stopping.is_set():
                return "goodbye", "this draft service is shutting down"
            return self._kind(error), str(error)
        except grpc.aio.AioRpcError as error:
            known = from_rpc_error(error)
            return self._kind(known), str(known)
        finally:
            self._link = None
            call.cancel()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _receive(self, call: _Call, link: "_OpenLink") -> str:
        """Passes on what the verifier says until its goodbye; returns why it went."""
        joiner = PieceJoiner()
        with closing(Patience(self._silence_s)) as patience:
            welcome = await self._read(call, joiner, patience)
            if not isinstance(welcome, Welcome):
                raise ProtocolViolation("the verifier's first frame is no welcome")
            link.max_proposal_tokens = welcome.max_proposal_tokens
            self._drafting.attach(welcome, link.send)
            if self._hello.wants_hidden_state and not welcome.hidden_size:
                _log.warning("the target has no hidden states to give: nothing can be guessed from them")
            self._change_state(LinkState(True))
            while True:
                frame = await self._read(call, joiner, patience)
                match frame:
                    case StepBatch():
                        self._drafting.apply(frame)
                    case Heartbeat(reply=True):
                        seconds = link.round_trip(frame)
                        if seconds is not None:
                            self._on_round_trip(seconds)
                    case Heartbeat():
                        link.send((Heartbeat(frame.sent_ns, reply=True),))
                    case Goodbye():
                        return f"the verifier has said goodbye: {frame.reason}"
                    case Welcome():
                        raise ProtocolViolation("the verifier has sent a second welcome")

    async def _read(self, call: _Call, joiner: PieceJoiner, patience: Patience) -> FromVerifier:
        try:
            with patience:
                message = await call.read()
        except TimeoutError:
            raise Unavailable("LINK_SILENT", f"nothing was heard from the verifier for {self._silence_s:g} seconds") from None
        if not isinstance(message, link_pb2.SpeculateResponse):  # the end of the stream
            raise Unavailable("VERIFIER_UNREACHABLE", "the verifier has ended the link without a goodbye")
        return joiner.parse(message)

    def _kind(self, error: Exception) -> str:
        if isinstance(error, HandshakeRefused):
            return _REFUSED
        if isinstance(error, OutriderError) and error.reason in _KIND_OF_REASON:
            return _KIND_OF_REASON[error.reason]
        return "lost" if self.state.attached else "unreachable"

    def _change_state(self, state: LinkState) -> None:
        self.state = state
        self._on_state(state)
        if state.attached:
            _log.info("attached to the verifier")


class _OpenLink:
    """What is to be sent on one stream. It dies with the stream: guesses of an old link never get onto a new one."""

    def __init__(self, call: _Call, hello: Hello, heartbeat_s: float, clock: Callable[[], float]) -> None:
        self.max_proposal_tokens = MAX_PROPOSAL_TOKENS  # until the welcome tells
        self._call = call
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        # Unbounded, but windows bound the guesses, and a verifier that takes nothing is silent and left within seconds.
        self._outgoing: deque[FromDrafter] = deque([hello])
        self._news = asyncio.Event()
        self._beat_ns = 0

    def send(self, frames: Sequence[FromDrafter]) -> None:
        """From any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, frames)

    def say_goodbye(self) -> None:
        """Nothing is sent after what is waiting now."""
        self._put((Goodbye("the draft service is shutting down"),))

    def round_trip(self, answer: Heartbeat) -> float | None:
        """Seconds since the heartbeat that is answered; None if it answers none."""
        if answer.sent_ns != self._beat_ns:
            return None
        self._beat_ns = 0
        return self._clock() - answer.sent_ns / 1e9

    async def write_all(self) -> None:
        """Sends frames and heartbeats until the goodbye. If the stream breaks it just ends: the reader learns why."""
        next_beat = self._clock() + self._heartbeat_s
        try:
            while True:
                self._news.clear()
                while self._outgoing:
                    frame = take_next(self._outgoing, self.max_proposal_tokens)
                    await self._call.write(to_speculate_request(frame))
                    if isinstance(frame, Goodbye):
                        await self._call.done_writing()
                        return
                now = self._clock()
                if now >= next_beat:
                    next_beat, self._beat_ns = now + self._heartbeat_s, int(now * 1e9)
                    self._outgoing.append(Heartbeat(self._beat_ns, reply=False))
                    continue
                try:
                    async with asyncio.timeout(next_beat - now):
                        await self._news.wait()
                except TimeoutError:
                    continue
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return
        except Exception:  # the task's boundary; a link on which nothing is said is ended by the verifier
            _log.exception("the link's writer has failed")

    def _put(self, frames: Sequence[FromDrafter]) -> None:
        self._outgoing.extend(frames)
        self._news.set()
