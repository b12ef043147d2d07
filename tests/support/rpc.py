"""Real servers on free loopback ports, and what stands behind them in tests: a scripted engine and a recording one."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from shared.errors import HandshakeRefused
from shared.link import Capacity, Decline, Hello, ProposalBatch, Resync, StepBatch, Welcome
from shared.rpc.channel import open_channel
from shared.rpc.guards import Gate
from shared.rpc.health import Health
from shared.rpc.interceptors import CallInterceptor, Guard
from shared.rpc.options import GENERATE_MAX_MESSAGE_BYTES
from shared.rpc.server import bind, make_server
from verifier_service.request import Emission, FinishReason, Request

WELCOME = Welcome(vocab_size=1000, max_proposal_tokens=64, max_distribution_pairs=64, max_model_len=4096)


@asynccontextmanager
async def serving(
    add: Callable[[grpc.aio.Server], object],
    guards: Sequence[Guard] = (),
    write_timeout_s: float = 5.0,
    max_message_bytes: int = GENERATE_MAX_MESSAGE_BYTES,
    health: Health | None = None,
    services: Sequence[str] = (),
    grace_s: float = 0.0,
) -> AsyncIterator[str]:
    """Address of a server with what `add` adds; at the end its handlers get `grace_s` seconds to write their last log line."""
    server = make_server(CallInterceptor(guards, write_timeout_s), max_message_bytes, health or await Health.of(*services), services)
    add(server)
    address = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield address
    finally:
        await server.stop(grace_s)


@asynccontextmanager
async def connected(
    add: Callable[[grpc.aio.Server], object], guards: Sequence[Guard] = (), write_timeout_s: float = 5.0, grace_s: float = 0.0
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to such a server."""
    async with serving(add, guards, write_timeout_s, grace_s=grace_s) as address, open_channel(address, 64 << 20) as channel:
        yield channel


def opened_gate() -> Gate:
    gate = Gate("verifier")
    gate.open()
    return gate


class ScriptedCompletions:
    """Plays emissions. `play` gets the request; each request is in `opened` at once and in `closed` when its context has been left."""

    def __init__(self, play: Callable[[Request], AsyncIterator[Emission]]) -> None:
        self._play = play
        self.opened: list[Request] = []
        self.closed: asyncio.Queue[str] = asyncio.Queue()

    @asynccontextmanager
    async def open(self, request: Request) -> AsyncIterator[AsyncIterator[Emission]]:
        self.opened.append(request)
        try:
            yield self._play(request)
        finally:
            self.closed.put_nowait(request.request_id)


def emissions(*token_ids: Sequence[int], finish: FinishReason = FinishReason.LENGTH) -> Callable[[Request], AsyncIterator[Emission]]:
    """Emits these runs; the last one ends the completion."""

    async def play(request: Request) -> AsyncIterator[Emission]:
        for index, run in enumerate(token_ids):
            is_last = index == len(token_ids) - 1
            num_guesses = len(run) - 1
            yield Emission(request.request_id, tuple(run), num_guesses, num_guesses, finish=finish if is_last else None)

    return play


async def endless(request: Request) -> AsyncIterator[Emission]:
    """One token, then nothing."""
    yield Emission(request.request_id, (5,))
    await asyncio.Event().wait()


@dataclass
class RecordingLinks:
    """What attached draft services do, and a way to talk to them."""

    refuse: str = ""
    hellos: dict[int, Hello] = field(default_factory=dict)
    tell: dict[int, Callable[[StepBatch], None]] = field(default_factory=dict)
    close: dict[int, Callable[[str], None]] = field(default_factory=dict)
    attached: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    frames: asyncio.Queue[ProposalBatch | Decline | Capacity | Resync] = field(default_factory=asyncio.Queue)
    rejected: list[str] = field(default_factory=list)
    round_trips: asyncio.Queue[float] = field(default_factory=asyncio.Queue)
    detached: asyncio.Queue[int] = field(default_factory=asyncio.Queue)

    def attach(self, hello: Hello, on_batch: Callable[[StepBatch], None], on_close: Callable[[str], None]) -> int:
        if self.refuse:
            raise HandshakeRefused(self.refuse)
        link = len(self.hellos) + 1
        for older, other in self.hellos.items():
            if other.instance_id == hello.instance_id:
                self.close[older]("a newer stream of the same instance has attached")
        self.hellos[link], self.tell[link], self.close[link] = hello, on_batch, on_close
        self.attached.put_nowait(link)
        return link

    def receive(self, link: int, frame: ProposalBatch | Decline | Capacity | Resync) -> None:
        del link
        self.frames.put_nowait(frame)

    def reject(self, link: int, reason: str) -> None:
        del link
        self.rejected.append(reason)

    def observe_round_trip(self, link: int, seconds: float) -> None:
        del link
        self.round_trips.put_nowait(seconds)

    def detach(self, link: int) -> None:
        self.detached.put_nowait(link)


class NullObserver:
    """Takes what requests take, and remembers how they ended."""

    def __init__(self) -> None:
        self.finished: list[FinishReason] = []
        self.failed: list[str] = []
        self.rounds: list[tuple[int, int]] = []

    def count_prompt(self, num_tokens: int) -> None:
        pass

    def observe_first_token(self, seconds: float) -> None:
        pass

    def observe_tokens(self, num_tokens: int, seconds_per_token: float | None) -> None:
        pass

    def observe_round(self, drafted: int, accepted: int, overlapped: bool) -> None:
        del overlapped
        self.rounds.append((drafted, accepted))

    def count_discarded(self, num_tokens: int) -> None:
        pass

    def observe_finish(self, reason: FinishReason, seconds: float) -> None:
        del seconds
        self.finished.append(reason)

    def count_failure(self, reason: str) -> None:
        self.failed.append(reason)
