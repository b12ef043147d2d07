import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from outrider.v1 import link_pb2 as pb
from outrider.v1 import link_pb2_grpc

from shared.errors import OutriderError
from shared.link import (
    MAX_BATCH_PROPOSALS,
    Begin,
    Capacity,
    Commit,
    Decline,
    FromDrafter,
    Goodbye,
    Heartbeat,
    Hello,
    Proposal,
    ProposalBatch,
    Resync,
    StepBatch,
)
from shared.rpc.channel import open_channel
from shared.rpc.convert_link import from_speculate_request, to_speculate_request
from shared.rpc.convert_step import PieceJoiner, to_speculate_responses
from shared.rpc.guards import bearer_guard
from shared.rpc.options import LINK_MAX_MESSAGE_BYTES
from shared.rpc.status import from_rpc_error
from shared.sampling import Mode, SamplingParams
from tests.support.rpc import WELCOME, RecordingLinks, serving
from verifier_service import link_servicer
from verifier_service.link_servicer import LinkServicer

HELLO = Hello(1, "instance-1", "edge", "ab", (Mode.COUPLED,), 4)
PROPOSALS = ProposalBatch(3, 0.5, (Proposal(7, 10, 99, (1, 2)),), idle=True)


@dataclass
class _Peer:
    """A draft service, frame by frame."""

    call: Any

    def __post_init__(self) -> None:
        self.joiner = PieceJoiner(WELCOME.max_model_len)

    async def send(self, *frames: FromDrafter | pb.SpeculateRequest) -> None:
        for frame in frames:
            await self.call.write(frame if isinstance(frame, pb.SpeculateRequest) else to_speculate_request(frame))

    async def hear(self, kind: type) -> Any:
        """The next frame of this kind."""
        while True:
            message = await self.call.read()
            assert message is not grpc.aio.EOF, "the stream has ended"
            frame = self.joiner.parse(message)
            if isinstance(frame, kind):
                return frame

    async def end(self) -> tuple[grpc.StatusCode, OutriderError | None]:
        """Code and error of the stream's end."""
        try:
            while await self.call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            known = from_rpc_error(error)
            assert isinstance(known, OutriderError)
            return error.code(), known
        return await self.call.code(), None


@dataclass
class _Side:
    links: RecordingLinks
    servicer: LinkServicer
    stub: Any

    def dial(self, **options: Any) -> _Peer:
        return _Peer(self.stub.Speculate(**options))

    async def attach(self, hello: Hello = HELLO) -> _Peer:
        peer = self.dial()
        await peer.send(hello)
        assert await peer.hear(type(WELCOME)) == WELCOME
        return peer


@asynccontextmanager
async def _verifier(token: str = "", **settings: Any) -> AsyncIterator[_Side]:
    links = RecordingLinks()
    servicer = LinkServicer(links, WELCOME, **settings)
    guards = [bearer_guard("outrider.v1.LinkService", token)] if token else []
    async with (
        serving(
            lambda server: link_pb2_grpc.add_LinkServiceServicer_to_server(servicer, server),
            guards,
            write_timeout_s=0.5,
            max_message_bytes=LINK_MAX_MESSAGE_BYTES,
        ) as address,
        open_channel(address, LINK_MAX_MESSAGE_BYTES) as channel,
    ):
        yield _Side(links, servicer, link_pb2_grpc.LinkServiceStub(channel))


def _commit(sequence: int, base: int, num_tokens: int = 1) -> StepBatch:
    return StepBatch(base, commits=(Commit(sequence, base, 0, (5,) * num_tokens, 4),))


async def test_a_drafter_attaches_hears_steps_and_is_heard() -> None:
    async with _verifier() as verifier:
        peer = await verifier.attach()
        link = await verifier.links.attached.get()
        assert verifier.links.hellos[link] == HELLO
        begin = Begin(7, 2, (1, 2, 3), Mode.COUPLED, SamplingParams(), 9, 4)
        verifier.links.tell[link](StepBatch(1, (begin,)))
        assert await peer.hear(StepBatch) == StepBatch(1, (begin,))
        frames = (PROPOSALS, Decline(7, "full"), Capacity(9), Resync(7))
        await peer.send(*frames)
        assert tuple([await verifier.links.frames.get() for _ in frames]) == frames
        await peer.send(pb.SpeculateRequest(goodbye=pb.Goodbye(reason="bye")))
        assert await peer.end() == (grpc.StatusCode.OK, None)
        assert await verifier.links.detached.get() == link


async def test_steps_that_come_while_the_link_is_busy_arrive_merged() -> None:
    async with _verifier() as verifier:
        peer = await verifier.attach()
        tell = verifier.links.tell[await verifier.links.attached.get()]
        for base in range(10):  # in one turn of the loop: nothing can be written in between
            tell(_commit(1, base))
        assert await peer.hear(StepBatch) == StepBatch(9, commits=(Commit(1, 0, 0, (5,) * 10, 4),))


@pytest.mark.parametrize(
    "first",
    [to_speculate_request(PROPOSALS), pb.SpeculateRequest(), pb.SpeculateRequest(heartbeat=pb.Heartbeat()), pb.SpeculateRequest(hello=pb.Hello())],
)
async def test_the_first_frame_must_be_a_good_hello(first: pb.SpeculateRequest) -> None:
    async with _verifier() as verifier:
        peer = verifier.dial()
        await peer.send(first)
        code, error = await peer.end()
        assert error is not None
        assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROTOCOL_VIOLATION")
        assert verifier.links.attached.empty()


async def test_no_hello_at_all_is_not_waited_for() -> None:
    async with _verifier(silence_s=0.1) as verifier:
        code, error = await verifier.dial().end()
        assert error is not None
        assert (code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "LINK_SILENT")


async def test_a_second_hello_ends_the_stream() -> None:
    async with _verifier() as verifier:
        peer = await verifier.attach()
        await peer.send(HELLO)
        code, error = await peer.end()
        assert error is not None
        assert (code, error.reason, str(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "PROTOCOL_VIOLATION", "a second hello")
        await verifier.links.detached.get()


async def test_bytes_that_are_no_frame_end_the_stream() -> None:
    links = RecordingLinks()
    async with (
        serving(lambda server: link_pb2_grpc.add_LinkServiceServicer_to_server(LinkServicer(links, WELCOME), server)) as address,
        open_channel(address) as channel,
    ):
        call: Any = channel.stream_stream("/outrider.v1.LinkService/Speculate")()
        await call.write(to_speculate_request(HELLO).SerializeToString())
        await call.read()
        await call.write(b"\xff\xff\xff\xff")
        code, error = await _Peer(call).end()
        assert error is not None
        assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROTOCOL_VIOLATION")
        await links.detached.get()


async def test_a_drafter_that_does_not_fit_is_told_why() -> None:
    async with _verifier() as verifier:
        verifier.links.refuse = "its tokenizer is not the target's"
        peer = verifier.dial()
        await peer.send(HELLO)
        code, error = await peer.end()
        assert error is not None
        assert (code, error.reason, str(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "HANDSHAKE_REFUSED", "its tokenizer is not the target's")


async def test_without_the_link_token_nobody_attaches() -> None:
    async with _verifier(token="open sesame") as verifier:
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            code, error = await verifier.dial(metadata=metadata).end()
            assert error is not None
            assert (code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
        peer = verifier.dial(metadata=(("authorization", "Bearer open sesame"),))
        await peer.send(HELLO)
        assert await peer.hear(type(WELCOME)) == WELCOME


BAD = [
    (pb.SpeculateRequest(), "bad_frame"),
    (pb.SpeculateRequest(proposals=pb.ProposalBatch(proposals=[pb.Proposal(token_ids=range(65))])), "too_long"),
    (pb.SpeculateRequest(proposals=pb.ProposalBatch(proposals=[pb.Proposal()])), "bad_shape"),
]


@pytest.mark.parametrize(("bad", "tag"), BAD)
async def test_a_malformed_frame_is_counted_and_dropped_and_the_link_goes_on(bad: pb.SpeculateRequest, tag: str) -> None:
    async with _verifier() as verifier:
        peer = await verifier.attach()
        await peer.send(bad, PROPOSALS)
        assert await verifier.links.frames.get() == PROPOSALS
        assert verifier.links.rejected == [tag]


async def test_a_large_frame_is_parsed_beside_the_event_loop_and_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def parse(message: pb.SpeculateRequest) -> FromDrafter:
        threads.append(threading.current_thread().name)
        return from_speculate_request(message)

    monkeypatch.setattr(link_servicer, "from_speculate_request", parse)
    large = ProposalBatch(4, 0.5, tuple(Proposal(number, 10, 99, tuple(range(16))) for number in range(MAX_BATCH_PROPOSALS)), idle=True)
    async with _verifier() as verifier:
        peer = await verifier.attach()
        await peer.send(PROPOSALS, large, PROPOSALS)
        assert [await verifier.links.frames.get() for _ in range(3)] == [PROPOSALS, large, PROPOSALS]
    here = threading.current_thread().name
    assert [name == here for name in threads] == [True, True, False, True]  # the first is the hello


async def test_a_large_frame_that_is_malformed_is_counted_like_any_other() -> None:
    async with _verifier() as verifier:
        peer = await verifier.attach()
        await peer.send(pb.SpeculateRequest(proposals=pb.ProposalBatch(proposals=[pb.Proposal(digest=2**64 - 1)] * 100_000)), PROPOSALS)
        assert await verifier.links.frames.get() == PROPOSALS
        assert verifier.links.rejected == ["too_long"]


async def test_bytes_are_told_by_direction_and_kind() -> None:
    told: dict[tuple[str, str], int] = {}

    def count(direction: str, kind: str, size: int) -> None:
        told[direction, kind] = told.get((direction, kind), 0) + size

    async with _verifier(on_bytes=count) as verifier:
        peer = await verifier.attach()
        verifier.links.tell[await verifier.links.attached.get()](_commit(1, 0))
        await peer.hear(StepBatch)
        await peer.send(PROPOSALS)
        await verifier.links.frames.get()
    assert told["received", "proposals"] == to_speculate_request(PROPOSALS).ByteSize()
    assert told["sent", "step"] == sum(message.ByteSize() for message in to_speculate_responses(_commit(1, 0)))
    assert told["sent", "welcome"] > 0


async def test_too_many_malformed_frames_within_a_minute_end_the_link() -> None:
    async with _verifier() as verifier:
        peer = await verifier.attach()
        for _ in range(15):
            await peer.send(pb.SpeculateRequest(), PROPOSALS)
            await verifier.links.frames.get()
        await peer.send(pb.SpeculateRequest())
        code, error = await peer.end()
        assert error is not None
        assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROTOCOL_VIOLATION")
        assert verifier.links.rejected == ["bad_frame"] * 16
        await verifier.links.detached.get()


async def test_heartbeats_go_both_ways_and_measure_the_round_trip() -> None:
    async with _verifier(heartbeat_s=0.05) as verifier:
        peer = await verifier.attach()
        await peer.send(Heartbeat(123, reply=False))
        beats = [await peer.hear(Heartbeat), await peer.hear(Heartbeat)]
        assert Heartbeat(123, reply=True) in beats
        (asked,) = [beat for beat in beats if not beat.reply]
        await peer.send(Heartbeat(asked.sent_ns + 1, reply=True), Heartbeat(asked.sent_ns, reply=True))
        assert await verifier.links.round_trips.get() >= 0
        assert verifier.links.round_trips.empty()  # what answers nothing measures nothing


async def test_a_silent_drafter_is_left() -> None:
    async with _verifier(silence_s=0.2, heartbeat_s=0.05) as verifier:
        peer = await verifier.attach()
        code, error = await peer.end()
        assert error is not None
        assert (code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "LINK_SILENT")
        await verifier.links.detached.get()


async def test_a_drafter_that_reads_nothing_is_left() -> None:
    async with _verifier(outbox_bytes=1 << 30, silence_s=3600) as verifier:
        peer = await verifier.attach()
        link = await verifier.links.attached.get()
        begins = [Begin(number, 1, (100_000,) * 100_000, Mode.COUPLED, SamplingParams(), 0, 0) for number in range(60)]
        verifier.links.tell[link](StepBatch(1, tuple(begins)))  # 18 MB: more than gRPC takes for a peer that does not read
        assert await verifier.links.detached.get() == link
        code, error = await peer.end()
        assert error is not None
        assert (code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SLOW_READER")


async def test_an_outbox_beyond_its_bound_detaches_at_once() -> None:
    async with _verifier(outbox_bytes=10_000) as verifier:
        peer = await verifier.attach()
        link = await verifier.links.attached.get()
        verifier.links.tell[link](_commit(1, 0, 5_000))
        assert verifier.links.detached.get_nowait() == link
        code, error = await peer.end()
        assert error is not None
        assert (code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SLOW_READER")


async def test_the_newest_stream_of_an_instance_wins() -> None:
    async with _verifier() as verifier:
        older = await verifier.attach()
        newer = await verifier.attach()
        assert await older.end() == (grpc.StatusCode.OK, None)
        await newer.send(PROPOSALS)
        assert await verifier.links.frames.get() == PROPOSALS


async def test_a_drafter_that_vanishes_is_detached() -> None:
    async with _verifier() as verifier:
        peer = await verifier.attach()
        link = await verifier.links.attached.get()
        peer.call.cancel()
        assert await verifier.links.detached.get() == link


async def test_half_close_without_goodbye_is_an_end_too() -> None:
    async with _verifier() as verifier:
        peer = await verifier.attach()
        await peer.call.done_writing()
        assert await peer.end() == (grpc.StatusCode.OK, None)
        await verifier.links.detached.get()


async def test_ending_links_says_goodbye_on_each() -> None:
    async with _verifier() as verifier:
        peers = [await verifier.attach(), await verifier.attach(Hello(1, "instance-2", "other", "", (), 1))]
        verifier.servicer.end_links()
        for peer in peers:
            assert (await peer.hear(Goodbye)).reason == "the verifier is shutting down"
            assert await peer.end() == (grpc.StatusCode.OK, None)


async def test_nothing_of_a_link_is_left_behind() -> None:
    async with _verifier() as verifier:
        peer = await verifier.attach()
        readers = [task for task in asyncio.all_tasks() if "_Session.read" in repr(task)]
        assert len(readers) == 1
        peer.call.cancel()
        await verifier.links.detached.get()
        await asyncio.wait(readers, timeout=10)
        assert readers[0].done()
