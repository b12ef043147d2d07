"""A drafter under test, and what a verifier says to it. It knows no proposer."""

from typing import Any

from draft_service.drafter import Drafter
from shared.link import Begin, Commit, Proposal, ProposalBatch, Welcome
from shared.sampling import Mode, SamplingParams
from tests.support.virtual_pair import Clock

WELCOME = Welcome(vocab_size=1_000, max_proposal_tokens=3, max_distribution_pairs=64, max_model_len=200)


def drafter_of(proposer, capacity=8, clock=None, welcome=WELCOME, on_step=lambda seconds, num_fed: None) -> Drafter:
    drafter = Drafter(proposer, capacity, clock or Clock(), on_step)
    drafter.attach(welcome)
    return drafter


def begin(number, token_ids=(1, 2, 3), window=4, mode=Mode.COUPLED) -> Begin:
    return Begin(number, len(token_ids), tuple(token_ids), mode, SamplingParams(), draft_seed=number, window=window)


def commit(number, base_length, token_ids, window=4, rewind=False) -> Commit:
    return Commit(number, base_length, 0, tuple(token_ids), window, rewind)


def run(drafter) -> list[Any]:
    frames = []
    while drafter.has_work:
        frames += drafter.step()
    return frames


def proposals_of(frames) -> list[Proposal]:
    return [proposal for frame in frames if isinstance(frame, ProposalBatch) for proposal in frame.proposals]
