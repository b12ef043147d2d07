"""The traffic of a pair of services through handlers that do nothing: what gRPC itself takes, in the same two processes.

    python -m bench.empty verifier LISTEN LINK
    python -m bench.empty draft LINK

A round is one StepBatch to the drafter, its ProposalBatches back, and an Output on every open stream, with pauses where the models would run. How
many and how large the first request of each set says (`Traffic`). The messages are made once; nothing is looked at but the arrival.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import astuple, dataclass
from typing import Any

import grpc
import uvloop
from outrider.v1 import generate_pb2, info_pb2, link_pb2, link_pb2_grpc, verifier_pb2_grpc

from shared.link import Commit, Proposal, ProposalBatch, StepBatch
from shared.rpc.channel import open_channel
from shared.rpc.convert_link import to_speculate_request
from shared.rpc.convert_step import to_speculate_responses
from shared.rpc.options import GENERATE_MAX_MESSAGE_BYTES, LINK_MAX_MESSAGE_BYTES, server_options

_ID = 100_000  # three bytes, as most ids
_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What crosses in a round. Crosses itself as the prompt of the request that opens a stream.

    Args:
        num_sequences: streams; the rounds start when so many are open, and end when one of them is closed.
        num_pieces: ProposalBatches.
        num_guesses: ids in them for each sequence.
        num_tokens: committed for each sequence.
        draft_us: pause before each piece.
        target_us: pause between the last piece and the outputs.
    """

    num_sequences: int
    num_pieces: int
    num_guesses: int
    num_tokens: int
    draft_us: int
    target_us: int

    def request(self) -> generate_pb2.GenerateRequest:
        """Opens one of the streams."""
        return generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=astuple(self)))


class EmptyVerifier(verifier_pb2_grpc.VerifierServiceServicer, link_pb2_grpc.LinkServiceServicer):
    """Both services of a verifier."""

    def __init__(self) -> None:
        self._streams: dict[int, asyncio.Queue[generate_pb2.GenerateResponse]] = {}
        self._steps: asyncio.Queue[link_pb2.SpeculateResponse] = asyncio.Queue()
        self._pieces: asyncio.Queue[link_pb2.SpeculateRequest] = asyncio.Queue()
        self._round = 10_000  # answers to the last round of an earlier set may still come

    async def Generate(  # noqa: N802  # the name is the proto's
        self, request: generate_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        """An output a round."""
        del context
        traffic = Traffic(*request.token_ids.ids)
        stream = self._streams[id(request)] = asyncio.Queue()
        rounds = asyncio.create_task(self._run(traffic)) if len(self._streams) == traffic.num_sequences else None
        try:
            while True:
                yield await stream.get()
        finally:
            del self._streams[id(request)]
            if rounds is not None:
                rounds.cancel()
                await asyncio.gather(rounds, return_exceptions=True)

    async def GetInfo(  # noqa: N802  # the name is the proto's
        self, request: info_pb2.GetInfoRequest, context: _Context
    ) -> info_pb2.GetInfoResponse:
        """Nothing."""
        del request, context
        return info_pb2.GetInfoResponse()

    async def Speculate(  # noqa: N802  # the name is the proto's
        self, request_iterator: AsyncIterator[link_pb2.SpeculateRequest], context: _Context
    ) -> AsyncIterator[link_pb2.SpeculateResponse]:
        """Steps out, pieces in."""
        del context
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while True:
                yield await self._steps.get()
        finally:
            reader.cancel()

    async def _read(self, messages: AsyncIterator[link_pb2.SpeculateRequest]) -> None:
        async for message in messages:
            self._pieces.put_nowait(message)

    async def _run(self, traffic: Traffic) -> None:
        ids = (_ID,) * traffic.num_tokens
        # The drafter is told by fields that nobody else reads here how to answer.
        sequences = range(10_000, 10_000 + traffic.num_sequences)
        commits = tuple(Commit(number, traffic.draft_us, traffic.num_pieces, ids, traffic.num_guesses) for number in sequences)
        (step,) = to_speculate_responses(StepBatch(0, commits=commits))
        while True:
            self._round += 1
            step.step.step = self._round
            self._steps.put_nowait(step)
            num_missing = traffic.num_pieces
            while num_missing:
                num_missing -= (await self._pieces.get()).proposals.step == self._round
            began = time.perf_counter()
            await asyncio.sleep(traffic.target_us / 1e6)
            paused_us = round(1e6 * (time.perf_counter() - began))
            output = generate_pb2.Output(text="four words or so", token_ids=ids, accepted=paused_us)
            for stream in self._streams.values():
                stream.put_nowait(generate_pb2.GenerateResponse(output=output))


async def serve_verifier(listen: str, link: str) -> None:
    """Serves for ever."""
    empty, door, link_door = EmptyVerifier(), _server(GENERATE_MAX_MESSAGE_BYTES), _server(LINK_MAX_MESSAGE_BYTES)
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(empty, door)
    link_pb2_grpc.add_LinkServiceServicer_to_server(empty, link_door)
    door.add_insecure_port(listen)
    link_door.add_insecure_port(link)
    await asyncio.gather(door.start(), link_door.start())
    await door.wait_for_termination()


async def serve_draft(link: str) -> None:
    """Answers for ever."""
    async with open_channel(link, LINK_MAX_MESSAGE_BYTES) as channel:
        call = link_pb2_grpc.LinkServiceStub(channel).Speculate(wait_for_ready=True)
        await call.write(link_pb2.SpeculateRequest())
        made: dict[tuple[int, ...], link_pb2.SpeculateRequest] = {}
        async for message in call:
            commits = message.step.commits
            kind = (len(commits), commits[0].accepted, commits[0].window)
            piece = made[kind] = made.get(kind) or _piece(*kind)
            piece.proposals.step = message.step.step
            for _ in range(commits[0].accepted):
                _pause(commits[0].base_length)
                await call.write(piece)


def _pause(microseconds: int) -> None:
    """On the loop's own thread: nothing else is to go on here meanwhile, and a loop's timers are too coarse."""
    time.sleep(microseconds / 1e6)


def _piece(num_sequences: int, num_pieces: int, num_guesses: int) -> link_pb2.SpeculateRequest:
    ids = (_ID,) * max(1, round(num_guesses / num_pieces))
    proposals = tuple(Proposal(10_000 + index, 10_000, 1 << 63, ids) for index in range(num_sequences))
    return to_speculate_request(ProposalBatch(0, 0.01, proposals, idle=False))


def _server(max_message_bytes: int) -> grpc.aio.Server:
    return grpc.aio.server(options=server_options(max_message_bytes))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("verifier", "draft"))
    parser.add_argument("addresses", nargs="+")
    arguments = parser.parse_args()
    uvloop.run((serve_verifier if arguments.role == "verifier" else serve_draft)(*arguments.addresses))


if __name__ == "__main__":
    main()
