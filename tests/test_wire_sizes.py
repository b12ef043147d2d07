from collections import deque

import pytest
from outrider.v1 import link_pb2 as pb

from bench.wire import framing_bytes, measure
from draft_service.drafter import Drafter
from draft_service.stand_in import StandInProposer
from shared.link import Begin, Commit, FromDrafter, Proposal, ProposalBatch, StepBatch, Welcome
from shared.merging import take_next
from shared.rpc.convert_link import to_speculate_request
from shared.rpc.convert_step import to_speculate_responses
from shared.sampling import Mode, SamplingParams
from shared.simulation import VOCAB_SIZE, Simulation

MAX_COMMIT_BYTES = 64
MAX_PROPOSAL_BYTES = 100


@pytest.mark.parametrize("acceptance", [0.8, 1.0])
def test_a_commit_and_eight_guesses_in_one_message_keep_to_their_bytes_on_the_link(acceptance: float) -> None:
    sizes = {(size.name, size.num_sequences): size for size in measure(8, acceptance, 2000)}
    for num_sequences in (1, 64):
        assert sizes["commit", num_sequences].worst <= MAX_COMMIT_BYTES
        assert sizes["proposal, one piece", num_sequences].worst <= MAX_PROPOSAL_BYTES
        more = sizes["commit, with a hidden state", num_sequences].mean - sizes["commit", num_sequences].mean
        assert 2 * 576 < more < 2 * 576 + 32, "the numbers, their type and shape, and little else"


def test_a_drafter_sends_its_guesses_one_by_one_and_that_row_says_what_they_take() -> None:
    """On a link that keeps up nothing is merged: eight messages, and their bytes are beyond the limit of a single one."""
    drafter = Drafter(StandInProposer(Simulation(), sleep=lambda seconds: None), 1, lambda: 0.0)
    drafter.attach(Welcome(VOCAB_SIZE, 64, 0, 4096))
    begin = Begin(sequence=1, prompt_length=3, token_ids=(100, 101, 102), mode=Mode.COUPLED, sampling=SamplingParams(), draft_seed=1, window=8)
    drafter.apply(StepBatch(1, begins=(begin,)))
    sent = deque[FromDrafter]()
    messages = []
    while drafter.has_work:
        sent.extend(drafter.step())
        while sent:
            messages.append(to_speculate_request(take_next(sent, 64)))
    assert [len(message.proposals.proposals[0].token_ids) for message in messages] == [1] * 8
    (row,) = (size for size in measure(8, 0.8, 2000, batch_sizes=(1,)) if size.name == "proposal, one by one")
    assert MAX_PROPOSAL_BYTES < sum(message.ByteSize() for message in messages) <= row.worst


def test_the_longest_numbers_that_the_protocol_allows_in_a_round_of_eight_still_keep_to_them() -> None:
    longest_ids = (151_935,) * 9
    commit = Commit(2**32, 2**31, 8, longest_ids, 256, rewind=True)
    (message,) = to_speculate_responses(StepBatch(2**32, commits=(commit,)))
    assert message.ByteSize() <= MAX_COMMIT_BYTES
    batch = ProposalBatch(2**32, 4.0, (Proposal(2**32, 2**31, 2**64 - 1, longest_ids[:8]),), idle=True)
    assert to_speculate_request(batch).ByteSize() <= MAX_PROPOSAL_BYTES


def test_sizes_are_those_of_the_bytes_that_cross() -> None:
    message = to_speculate_request(ProposalBatch(7, 0.001, (Proposal(1, 5, 99, (1, 2, 3)),), idle=False))
    crossed = message.SerializeToString()
    assert message.ByteSize() == len(crossed)
    assert pb.SpeculateRequest.FromString(crossed) == message


def test_a_message_longer_than_a_frame_pays_for_each_frame() -> None:
    assert framing_bytes(0) == framing_bytes(16_379) == 14
    assert framing_bytes(16_380) == 23
