import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import structlog
from outrider.v1 import link_pb2_grpc

from draft_service.link_client import LinkClient, LinkState
from shared.digest import extend
from shared.link import Commit, FromDrafter, Hello, Proposal, ProposalBatch, StepBatch, Welcome
from shared.rpc.channel import open_channel
from shared.rpc.guards import bearer_guard
from shared.rpc.health import Health
from shared.rpc.interceptors import CallInterceptor
from shared.rpc.options import LINK_MAX_MESSAGE_BYTES
from shared.rpc.server import bind, make_server
from shared.sampling import Mode
from tests.support.rpc import WELCOME, RecordingLinks
from verifier_service.link_servicer import LinkServicer

HELLO = Hello(1, "instance-1", "edge", "ab", (Mode.COUPLED, Mode.REJECTION), 4)
BATCH = StepBatch(1, commits=(Commit(7, 3, 0, (1, 2), 4),))


def _guesses(step: int) -> ProposalBatch:
    return ProposalBatch(step, 0.0, (Proposal(7, 5, 1, (9,)),), idle=True)


class _RecordingDrafting:
    """Takes what the verifier says, and a way to send."""

    def __init__(self) -> None:
        self.sends: list[Callable[[Sequence[FromDrafter]], None]] = []
        self.heard: asyncio.Queue[Welcome | StepBatch | str] = asyncio.Queue()

    def attach(self, welcome: Welcome, send: Callable[[Sequence[FromDrafter]], None]) -> None:
        self.sends.append(send)
        self.heard.put_nowait(welcome)

    def apply(self, batch: StepBatch) -> None:
        self.heard.put_nowait(batch)

    def reset(self) -> None:
        self.heard.put_nowait("reset")


@dataclass
class _Pauses:
    """Instead of sleeping: notes how long, and returns when it is told to, or at once."""

    asked: asyncio.Queue[float] = field(default_factory=asyncio.Queue)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def sleep(self, seconds: float) -> None:
        self.asked.put_nowait(seconds)
        await self.released.wait()


class _Verifier:
    """A link server that can go and come back on its address."""

    def __init__(self, token: str = "", welcome: Welcome = WELCOME, **settings: Any) -> None:
        self.links = RecordingLinks()
        self.address = "127.0.0.1:0"
        self._settings = settings
        self._welcome = welcome
        self._guards = [bearer_guard("outrider.v1.LinkService", token)] if token else []

    async def start(self) -> None:
        self.servicer = LinkServicer(self.links, self._welcome, **self._settings)
        self._server = make_server(CallInterceptor(self._guards), LINK_MAX_MESSAGE_BYTES, await Health.of(), [])
        link_pb2_grpc.add_LinkServiceServicer_to_server(self.servicer, self._server)
        self.address = bind(self._server, self.address)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)


@dataclass
class _Draft:
    client: LinkClient
    drafting: _RecordingDrafting
    pauses: _Pauses
    states: asyncio.Queue[LinkState]
    round_trips: asyncio.Queue[float]
    running: asyncio.Task[None]


@asynccontextmanager
async def _pair(
    token: str = "", shown_token: str = "", refuse: str = "", start: bool = True, hello: Hello = HELLO, **settings: Any
) -> AsyncIterator[tuple[_Verifier, _Draft]]:
    verifier = _Verifier(token, **{key: settings.pop(key) for key in ("silence_s", "heartbeat_s", "welcome") if key in settings})
    verifier.links.refuse = refuse
    await verifier.start()
    if not start:
        await verifier.stop()
    async with open_channel(verifier.address, LINK_MAX_MESSAGE_BYTES) as channel:
        drafting, pauses = _RecordingDrafting(), _Pauses()
        states, round_trips = asyncio.Queue[LinkState](), asyncio.Queue[float]()
        client = LinkClient(
            channel,
            hello,
            drafting,
            shown_token,
            random.Random(0),
            states.put_nowait,
            round_trips.put_nowait,
            sleep=pauses.sleep,
            **{key.removeprefix("client_"): value for key, value in settings.items()},
        )
        running = asyncio.create_task(client.run())
        try:
            yield verifier, _Draft(client, drafting, pauses, states, round_trips, running)
        finally:
            pauses.released.set()
            client.stop()
            await running
            await verifier.stop()


async def test_it_attaches_and_carries_frames_both_ways() -> None:
    async with _pair() as (verifier, draft):
        assert await draft.drafting.heard.get() == WELCOME
        assert draft.client.state == LinkState(True)
        link = await verifier.links.attached.get()
        assert verifier.links.hellos[link] == HELLO
        verifier.links.tell[link](BATCH)
        assert await draft.drafting.heard.get() == BATCH
        await asyncio.to_thread(draft.drafting.sends[0], (_guesses(1),))  # as the engine thread does
        assert await verifier.links.frames.get() == _guesses(1)


@pytest.mark.parametrize(("wants", "hidden_size"), [(True, 0), (True, 64), (False, 0)])
async def test_a_speculator_that_will_hear_nothing_says_so(wants: bool, hidden_size: int) -> None:
    with structlog.testing.capture_logs() as lines:
        async with _pair(hello=replace(HELLO, wants_hidden_state=wants), welcome=replace(WELCOME, hidden_size=hidden_size)) as (_, draft):
            assert (await draft.drafting.heard.get()) == replace(WELCOME, hidden_size=hidden_size)
            await draft.states.get()
    warnings = [line["event"] for line in lines if line["log_level"] == "warning"]
    assert any("no hidden states" in event for event in warnings) is (wants and not hidden_size)


async def test_guesses_that_wait_are_put_together_up_to_what_the_welcome_allows() -> None:
    async with _pair(welcome=replace(WELCOME, max_proposal_tokens=3)) as (verifier, draft):
        await draft.drafting.heard.get()
        guesses = [Proposal(7, 5 + index, extend(0, range(index)), (index,)) for index in range(5)]
        draft.drafting.sends[0]([ProposalBatch(1, 0.0, (guess,), idle=False) for guess in guesses])
        sizes: list[int] = []
        while sum(sizes) < 5:
            frame = await verifier.links.frames.get()
            assert isinstance(frame, ProposalBatch)
            sizes.append(len(frame.proposals[0].token_ids))
        assert sizes == [3, 2]


async def test_stopping_says_goodbye_and_returns() -> None:
    async with _pair() as (verifier, draft):
        await draft.drafting.heard.get()
        draft.client.stop()
        await draft.running
        assert await draft.drafting.heard.get() == "reset"
        assert (draft.client.state.attached, draft.client.state.kind) == (False, "goodbye")
        assert await verifier.links.detached.get() == 1


async def test_after_a_restart_of_the_verifier_it_attaches_again_and_starts_anew() -> None:
    async with _pair() as (verifier, draft):
        assert await draft.drafting.heard.get() == WELCOME
        await verifier.stop()
        assert await draft.drafting.heard.get() == "reset"
        assert await draft.pauses.asked.get() <= 0.1
        assert draft.client.state.kind == "lost"
        await verifier.start()
        draft.pauses.released.set()
        assert await draft.drafting.heard.get() == WELCOME
        assert draft.client.state.attached


async def test_what_an_old_link_led_to_is_not_sent_on_the_new_one() -> None:
    async with _pair() as (verifier, draft):
        draft.pauses.released.set()
        await draft.drafting.heard.get()
        await verifier.stop()
        await verifier.start()
        assert [await draft.drafting.heard.get(), await draft.drafting.heard.get()] == ["reset", WELCOME]
        old, new = draft.drafting.sends
        old((_guesses(1),))
        new((_guesses(2),))
        assert await verifier.links.frames.get() == _guesses(2)


async def test_without_a_verifier_it_tries_for_ever_with_growing_pauses() -> None:
    async with _pair(start=False) as (verifier, draft):
        draft.pauses.released.set()
        pauses = [await draft.pauses.asked.get() for _ in range(8)]
        assert draft.client.state.kind == "unreachable"
        assert draft.client.state.detached_reason
        for attempt, seconds in enumerate(pauses):
            longest = min(5.0, 0.1 * 2**attempt)
            assert longest / 2 <= seconds <= longest
        await verifier.start()
        assert await draft.drafting.heard.get() == WELCOME


async def test_a_refused_handshake_is_retried_after_a_minute_and_its_reason_is_shown() -> None:
    async with _pair(refuse="its tokenizer is not the target's") as (_, draft):
        assert await draft.pauses.asked.get() == 60
        assert draft.client.state == LinkState(False, "its tokenizer is not the target's", "refused")
        assert draft.drafting.heard.empty()


async def test_a_wrong_token_is_shown_as_the_reason() -> None:
    async with _pair(token="right", shown_token="wrong") as (_, draft):
        await draft.pauses.asked.get()
        assert "token" in draft.client.state.detached_reason
        assert draft.drafting.heard.empty()


async def test_the_right_token_opens_the_link() -> None:
    async with _pair(token="right", shown_token="right") as (_, draft):
        assert await draft.drafting.heard.get() == WELCOME


async def test_the_verifiers_goodbye_is_followed_by_a_new_attempt() -> None:
    async with _pair() as (verifier, draft):
        await draft.drafting.heard.get()
        verifier.servicer.end_links()
        assert await draft.drafting.heard.get() == "reset"
        await draft.pauses.asked.get()
        assert draft.client.state.kind == "goodbye"
        draft.pauses.released.set()
        assert await draft.drafting.heard.get() == WELCOME


async def test_heartbeats_measure_the_round_trip_on_both_sides() -> None:
    async with _pair(heartbeat_s=0.05, client_heartbeat_s=0.05) as (verifier, draft):
        assert await draft.round_trips.get() >= 0
        assert await verifier.links.round_trips.get() >= 0


async def test_a_verifier_that_is_not_heard_from_is_left() -> None:
    async with _pair(heartbeat_s=3600, client_heartbeat_s=3600, client_silence_s=0.2) as (verifier, draft):
        assert await draft.drafting.heard.get() == WELCOME
        assert await draft.drafting.heard.get() == "reset"
        await draft.pauses.asked.get()
        assert draft.client.state.kind == "silent"
        assert await verifier.links.detached.get() == 1


async def test_an_idle_link_stays_up_by_heartbeats_alone() -> None:
    async with _pair(silence_s=0.5, heartbeat_s=0.1, client_silence_s=0.5, client_heartbeat_s=0.1) as (_, draft):
        for _ in range(10):
            await draft.round_trips.get()
        assert draft.client.state.attached
        assert draft.pauses.asked.empty()


@pytest.mark.parametrize("num_streams", [3])
async def test_two_processes_of_one_instance_do_not_throw_each_other_out_without_a_pause(num_streams: int) -> None:
    async with _pair() as (verifier, draft):
        draft.pauses.released.set()
        pauses = []
        for _ in range(num_streams):
            await draft.drafting.heard.get()
            link = await verifier.links.attached.get()
            verifier.links.close[link]("a newer stream of the same instance has attached")
            await draft.drafting.heard.get()
            pauses.append(await draft.pauses.asked.get())
        assert pauses[-1] > 0.1
