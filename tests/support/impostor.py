"""A draft service over plain gRPC that keeps to no rule: duplicates, what is late, what fits nothing, frames without a meaning."""

from typing import Any

import grpc
from outrider.v1 import link_pb2

from shared.digest import extend


class Impostor:
    """A draft service that knows the answers, so that some of its guesses are accepted, and sends everything else besides.

    Args:
        call: an open link.
        answers: the whole text by its prompt.
    """

    def __init__(self, call: Any, answers: dict[tuple[int, ...], list[int]]) -> None:
        self._call = call
        self._answers = answers
        self._texts: dict[int, list[int]] = {}
        self._whole: dict[int, list[int]] = {}
        self._malformed = iter(malformed())
        self._num_batches = 0
        self._num_empty = 0

    def flood(self) -> None:
        """From now on a frame that says nothing goes with every answer."""
        self._num_empty = 20

    async def run(self) -> None:
        while (message := await self._call.read()) is not grpc.aio.EOF:
            if message.WhichOneof("frame") == "heartbeat" and not message.heartbeat.reply:
                await self._send(heartbeat=link_pb2.Heartbeat(sent_ns=message.heartbeat.sent_ns, reply=True))
            if message.WhichOneof("frame") == "step":
                await self._answer(message.step)

    async def _answer(self, step: link_pb2.StepBatch) -> None:
        for begin in step.begins:
            text = list(begin.token_ids)
            prompt = tuple(text[: begin.prompt_length])
            self._texts[begin.sequence], self._whole[begin.sequence] = text, [*prompt, *self._answers[prompt]]
        for commit in step.commits:
            del self._texts[commit.sequence][commit.base_length :]
            self._texts[commit.sequence] += commit.token_ids
        for end in step.ends:
            self._texts.pop(end.sequence, None)
        for number, text in self._texts.items():
            await self._propose(step.step, number, text)
        self._num_batches += 1
        if self._num_batches % 2 == 0 and (broken := next(self._malformed, None)) is not None:
            await self._call.write(broken)
        for _ in range(self._num_empty):
            await self._call.write(link_pb2.SpeculateRequest())

    async def _propose(self, step: int, number: int, text: list[int]) -> None:
        whole, start = self._whole[number], len(text)
        digest = extend(0, text)
        right = whole[start : start + 3]
        kinds = (
            (step, start, digest, right or [0]),
            (step, start, digest, right or [0]),  # twice
            (step, start + 2, digest ^ 1, [1, 2]),  # of another text
            (step, max(0, start - 4), extend(0, text[:-4]), [3, 3]),  # of what is long committed
            (2**60, start + 50, digest, [4]),  # leaves a gap
            (step, start + len(right), extend(digest, right), [2**32 - 1, 5] + 40 * [6]),  # wrong, out of the vocabulary, beyond the window
        )
        for known, place, says, token_ids in kinds:
            proposal = link_pb2.Proposal(sequence=number, start=place, digest=says, token_ids=token_ids)
            await self._send(proposals=link_pb2.ProposalBatch(step=known, proposals=[proposal]))
        strange = link_pb2.Proposal(sequence=number + 10_000, start=0, digest=0, token_ids=[1])
        await self._send(proposals=link_pb2.ProposalBatch(step=step, proposals=[strange], idle=True))

    async def _send(self, **frame: Any) -> None:
        await self._call.write(link_pb2.SpeculateRequest(**frame))


def malformed() -> list[link_pb2.SpeculateRequest]:
    """Frames without a meaning; fewer than end a link."""
    nan, half = b"\x00\x00\xc0\x7f", b"\x00\x00\x00\x3f"
    bad = [
        link_pb2.Proposal(sequence=1),
        link_pb2.Proposal(sequence=1, token_ids=range(65)),
        link_pb2.Proposal(sequence=1, token_ids=[1], distributions=[link_pb2.Distribution(token_ids=[1], probabilities=nan)]),
        link_pb2.Proposal(sequence=1, token_ids=[1], distributions=[link_pb2.Distribution(token_ids=[1], probabilities=half)]),
        link_pb2.Proposal(sequence=1, token_ids=[1], distributions=[link_pb2.Distribution(token_ids=[1, 2], probabilities=half)]),
        link_pb2.Proposal(sequence=1, token_ids=[1], distributions=[link_pb2.Distribution(token_ids=[2, 3], probabilities=half + half)]),
    ]
    frames = [link_pb2.SpeculateRequest(proposals=link_pb2.ProposalBatch(proposals=[proposal])) for proposal in bad]
    twice = link_pb2.ProposalBatch(proposals=[link_pb2.Proposal(sequence=1, token_ids=[1])] * 2)
    return [*frames, link_pb2.SpeculateRequest(proposals=twice), link_pb2.SpeculateRequest()]
