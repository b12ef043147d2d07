"""A drafter over a draft model, and what plain decoding makes of the same text. It knows no link."""

from typing import Any

import torch

from draft_service.draft_model import DraftModel
from draft_service.drafter import Drafter
from shared.engine.block_allocator import BlockAllocator
from shared.engine.forward_batch import Span
from shared.engine.model_loader import LoadedModel
from shared.engine.model_runner import ModelRunner
from shared.link import Begin, Commit, ProposalBatch, StepBatch, Welcome
from shared.noise import noise_key
from shared.picking import pick_tokens
from shared.sampling import Mode, Pick, SamplingParams, TokenRules

VOCAB = 64
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0)


class SpanLog(ModelRunner):
    """A runner that remembers how many tokens each sequence was fed, and lets a test spoil logits."""

    def __init__(self, model: LoadedModel, num_blocks: int, block_size: int) -> None:
        super().__init__(model, num_blocks, block_size)
        self.fed: list[list[tuple[int, int]]] = []
        self.spoil = lambda logits: logits

    def forward(self, spans):
        self.fed.append([(span.start, len(span.token_ids)) for span in spans])
        return self.spoil(super().forward(spans).clone())


class Rig:
    """A drafter over a draft model, with the parts at hand."""

    def __init__(
        self,
        model: LoadedModel,
        num_blocks: int = 64,
        block_size: int = 4,
        capacity: int = 8,
        vocab: int = VOCAB,
        budget: int = 512,
        beside: int = 512,
        min_confidence: float = 0.0,
    ) -> None:
        self.runner = SpanLog(model, num_blocks, block_size)
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.proposer = DraftModel(self.runner, self.allocator, budget, beside, min_confidence)
        self.drafter = Drafter(self.proposer, capacity, lambda: 0.0)
        self.drafter.attach(Welcome(vocab, 64, 64, 10_000))
        self.steps = 0

    def tell(self, **what) -> None:
        self.steps += 1
        self.drafter.apply(StepBatch(self.steps, **what))

    def run(self) -> list[Any]:
        frames = []
        while self.drafter.has_work:
            frames += self.drafter.step()
        return frames

    def guesses(self) -> dict[int, list[int]]:
        guessed: dict[int, list[int]] = {}
        for frame in self.run():
            for proposal in frame.proposals if isinstance(frame, ProposalBatch) else ():
                guessed.setdefault(proposal.sequence, []).extend(proposal.token_ids)
        return guessed


def begin(number, token_ids, window=4, sampling=GREEDY, mode=Mode.COUPLED, seed=11, **more) -> Begin:
    return Begin(number, len(token_ids), tuple(token_ids), mode, sampling, seed, window, **more)


def commit(number, base_length, token_ids, window=4, rewind=False) -> Commit:
    return Commit(number, base_length, 0, tuple(token_ids), window, rewind)


def last_logits(model: LoadedModel, text: list[int]) -> torch.Tensor:
    runner = ModelRunner(model, -(-len(text) // 4), 4)
    return runner.forward([Span(text, 0, list(range(-(-len(text) // 4))), 1)])


def decode(model: LoadedModel, text, num_tokens: int, sampling=GREEDY, seed=11, vocab=VOCAB, prompt_length=None) -> list[int]:
    """Plain decoding, every token from a fresh prefill."""
    grown: list[int] = list(text)
    rules = TokenRules(sampling, len(grown) if prompt_length is None else prompt_length, vocab)
    for _ in range(num_tokens):
        grown.append(int(pick_tokens(last_logits(model, grown), [Pick(rules, noise_key(seed), grown)])))
    return grown[-num_tokens:]
